#include <algorithm>

#include "states.h"
#include "team.h"

namespace {

inline vf silu(vf x) { return x / (1.0f + exp(-x)); }

// Out is float with gates, else T.
template <class T, class Out, bool GATED>
void convolve(const ConvArgs& args, int64_t begin, int64_t end) {
    const int64_t width = args.width, channels = args.channels;
    for (int64_t row = 0; row < *args.of.rows; row++) {
        const int64_t first = args.of.firsts[row], length = args.of.firsts[row + 1] - first;
        T* state = state_of<T>(args.of, row);
        for (int64_t k = 0; k < width; k++) begin_state<T>(args.of, row, k * channels + begin, k * channels + end);
        T* in = static_cast<T*>(args.in) + first * args.in_stride;
        Out* out = static_cast<Out*>(args.out) + first * args.out_stride;
        if (args.of.starts[row] == 0)
            for (int64_t k = 0; k < width; k++) std::fill(state + k * channels + begin, state + k * channels + end, T(0));
        for (int64_t t = 0; t < length; t++) {
            const float *b = nullptr, *c = nullptr;
            if constexpr (GATED) {
                b = args.gates + (first + t) * args.gates_stride, c = b + channels;
                const float* x = c + channels;
                T* to = in + t * args.in_stride;
                int64_t i = begin;
                for (; i + W <= end; i += W) store(to + i, load(b + i) * load(x + i));
                for (; i < end; i++) put(to + i, b[i] * x[i]);
            }
            // Tap k reads the input of width - 1 - k tokens ago.
            const auto at = [&](int64_t k) {
                const int64_t token = t - (width - 1 - k);
                return token < 0 ? state + (width + token) * channels : in + token * args.in_stride;
            };
            int64_t i = begin;
            for (; i + W <= end; i += W) {
                vf y = args.bias != nullptr ? load(args.bias + i) : vf{};
                for (int64_t k = 0; k < width; k++) y = fused(load(args.weight + k * channels + i), load(at(k) + i), y);
                y = args.silu ? silu(y) : y;
                if constexpr (GATED) y *= load(c + i);
                store(out + t * args.out_stride + i, y);
            }
            for (; i < end; i++) {
                float y = args.bias != nullptr ? args.bias[i] : 0.0f;
                for (int64_t k = 0; k < width; k++) y += args.weight[k * channels + i] * number(at(k)[i]);
                y = args.silu ? silu(splat(y))[0] : y;
                if constexpr (GATED) y *= c[i];
                put(out + t * args.out_stride + i, y);
            }
        }
        for (int64_t k = 0; k < width; k++) {
            const int64_t token = length - width + k;
            const T* from = token < 0 ? state + (width + token) * channels : in + token * args.in_stride;
            std::copy(from + begin, from + end, state + k * channels + begin);
        }
    }
}

}  // namespace

void kvrelay_conv(const void* raw, int thread, int threads) {
    const ConvArgs& args = *static_cast<const ConvArgs*>(raw);
    // Whole cache lines of channels for each thread.
    const Share share(divide_up(args.channels, 16), thread, threads);
    const int64_t begin = share.begin * 16, end = std::min(args.channels, share.end * 16);
    if (args.gates != nullptr) {
        if (args.bfloat16) convolve<bf16, float, true>(args, begin, end);
        else convolve<float, float, true>(args, begin, end);
    } else if (args.bfloat16) {
        convolve<bf16, bf16, false>(args, begin, end);
    } else {
        convolve<float, float, false>(args, begin, end);
    }
}
