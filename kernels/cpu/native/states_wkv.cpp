#include <algorithm>

#include "states.h"
#include "team.h"

namespace {

constexpr float NOTHING = -1e38f;  // the exponent of an empty sum

// W channels, or fewer at the end, of all tokens of a row.
template <class T>
void channels_of(const WkvArgs& args, int64_t row, int64_t begin, int64_t count) {
    const int64_t first = args.of.firsts[row], end = args.of.firsts[row + 1];
    float* state = state_of<float>(args.of, row) + begin;
    const float* origin = origin_of<float>(args.of, row) + begin;
    const auto get = [&](const auto* from) {
        if (count == W) return load(from);
        vf x = {};
        for (int64_t i = 0; i < count; i++) x[i] = number(from[i]);
        return x;
    };
    const auto set = [&](auto* to, vf x) {
        if (count == W) return store(to, x);
        for (int64_t i = 0; i < count; i++) put(to + i, x[i]);
    };
    vf num = {}, den = {}, most = splat(NOTHING);
    if (args.of.starts[row] != 0) {
        num = get(origin);
        den = get(origin + args.channels);
        most = get(origin + 2 * args.channels);
    }
    const vf decay = get(args.decay + begin), bonus = get(args.first + begin);
    for (int64_t t = first; t < end; t++) {
        const vf k = get(static_cast<const T*>(args.k) + t * args.k_stride + begin);
        const vf v = get(static_cast<const T*>(args.v) + t * args.v_stride + begin);
        vf largest = larger(most, k + bonus);
        vf old = exp(most - largest), own = exp(k + bonus - largest);
        set(static_cast<T*>(args.out) + t * args.out_stride + begin, (old * num + own * v) / (old * den + own));
        largest = larger(most + decay, k);
        old = exp(most + decay - largest);
        own = exp(k - largest);
        num = old * num + own * v;
        den = old * den + own;
        most = largest;
    }
    set(state, num);
    set(state + args.channels, den);
    set(state + 2 * args.channels, most);
}

}  // namespace

void kvrelay_wkv(const void* raw, int thread, int threads) {
    const WkvArgs& args = *static_cast<const WkvArgs*>(raw);
    const Share share(divide_up(args.channels, 16), thread, threads);
    const int64_t first = share.begin * 16, last = std::min(args.channels, share.end * 16);
    for (int64_t row = 0; row < *args.of.rows; row++)
        for (int64_t begin = first; begin < last; begin += W) {
            const int64_t count = std::min<int64_t>(W, last - begin);
            if (args.bfloat16) channels_of<bf16>(args, row, begin, count);
            else channels_of<float>(args, row, begin, count);
        }
}
