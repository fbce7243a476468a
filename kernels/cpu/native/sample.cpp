#include "sample.h"

#include <algorithm>
#include <cmath>

#include "simd.h"
#include "team.h"

namespace {

constexpr int32_t INFINITE = 0x7f800000;

struct Found {
    float number;
    int64_t token;
};

inline vi lanes() {
    vi x;
    for (int n = 0; n < W; n++) x[n] = n;
    return x;
}

// The larger number in any lane, and its token; the smaller token of equal ones.
Found best_of(vf numbers, vi tokens) {
    Found best{numbers[0], tokens[0]};
    for (int n = 1; n < W; n++) {
        if (numbers[n] > best.number || (numbers[n] == best.number && tokens[n] < best.token)) {
            best = {numbers[n], tokens[n]};
        }
    }
    return best;
}

// W numbers from `i` on; past the end, minus infinity.
inline vf load_within(const float* x, int64_t i, int64_t width) {
    if (i + W <= width) return load(x + i);
    vf part = splat(-INFINITY);
    memcpy(&part, x + i, (width - i) * sizeof(float));
    return part;
}

Found find_largest(const float* x, int64_t width) {
    vf best = splat(-INFINITY), odd = {};
    vi at = {}, here = lanes();
    int64_t i = 0;
    for (; i + W <= width; i += W) {
        const vf y = load(x + i);
        const vi better = y > best;
        best = better ? y : best;
        at = better ? here : at;
        here += W;
        // 0 for a finite number; NaN for NaN and infinity, which are told apart below.
        odd += y - y;
    }
    Found found = best_of(best, at);
    float rest = sum(odd);
    for (; i < width; i++) {
        if (x[i] > found.number) found = {x[i], i};
        rest += x[i] - x[i];
    }
    if (rest != 0.0f) {
        for (i = 0; i < width; i++) {
            if (std::isnan(x[i])) return {x[i], i};
        }
    }
    return found;
}

uint64_t splitmix64(uint64_t x) {
    x += 0x9E3779B97F4A7C15;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
}

// `noise.exponential` for the tokens of W lanes: the same integers, and the logarithm within 3 units in the last place.
inline vf noise(vu tokens, uint32_t first, uint32_t second) {
    vu x = tokens ^ first;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x += second;
    x *= 0x846CA68Bu;
    x ^= x >> 16;
    x *= 0x2C1B3C6Du;
    x ^= x >> 15;
    x &= 0x7FFFFFFFu;
    vf u = (__builtin_convertvector((vi)x, vf) + 0.5f) * 0x1p-31f;
    const vf most = splat(1.0f - 0x1p-24f);
    u = u < most ? u : most;
    // 1 - u = m 2^e with m from sqrt(1/2) to sqrt(2). m - 1 is rounded once, so small u keep all of their bits.
    const vi e = ((vi)(1.0f - u) - 0x3f3504f3) >> 23;
    const vf s = (vf)((127 - e) << 23);
    const vf f = fused(-u, s, s - 1.0f), z = f * f, exponent = __builtin_convertvector(e, vf);
    vf y = splat(7.0376836292e-2f);  // Cephes' logf
    y = fused(y, f, splat(-1.1514610310e-1f));
    y = fused(y, f, splat(1.1676998740e-1f));
    y = fused(y, f, splat(-1.2420140846e-1f));
    y = fused(y, f, splat(1.4249322787e-1f));
    y = fused(y, f, splat(-1.6668057665e-1f));
    y = fused(y, f, splat(2.0000714765e-1f));
    y = fused(y, f, splat(-2.4999993993e-1f));
    y = fused(y, f, splat(3.3333331174e-1f));
    y = y * f * z;
    y = fused(exponent, splat(-2.12194440e-4f), y);
    y = fused(z, splat(-0.5f), y);
    return -fused(exponent, splat(0.693359375f), f + y);
}

// Filters compare keys: the bits of -s, which ascend as s descends, since s is 0 or less.
inline vi keys_of(vf s) { return (vi)s & 0x7fffffff; }

float number_of(int32_t key) {
    float x;
    memcpy(&x, &key, sizeof x);
    return -x;
}

// The smallest key from `low` to `high` with `weigh(key) >= target`, where `weigh` ascends and the last one reaches it.
template <class Weigh>
int32_t smallest_key(int32_t low, int32_t high, double target, Weigh weigh) {
    while (low < high) {
        const int32_t middle = low + (high - low) / 2;
        if (weigh(middle) >= target) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

inline bool any(vi mask) {
#ifdef __AVX512F__
    return _mm512_movepi32_mask((__m512i)mask) != 0;
#else
    return _mm256_movemask_ps((__m256)mask) != 0;
#endif
}

// A sum in float64.
class Mass {
public:
    void add(vf x) {
#ifdef __AVX512F__
        low_ += (vd)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)x));
        high_ += (vd)_mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)x, 1));
#else
        low_ += (vd)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)x));
        high_ += (vd)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)x, 1));
#endif
    }

    double total() const {
        const vd both = low_ + high_;
        double total = 0;
        for (int n = 0; n < W / 2; n++) total += both[n];
        return total;
    }

private:
    typedef double vd __attribute__((vector_size(4 * W)));
    vd low_ = {}, high_ = {};
};

// The smallest s of `row` [width] that top_k keeps.
float bound_of_count(const float* row, int64_t width, int64_t top_k) {
    return number_of(smallest_key(0, INFINITE, double(top_k), [&](int32_t key) {
        vi count = {};
        for (int64_t i = 0; i < width; i += W) count -= keys_of(load_within(row, i, width)) <= key;
        // What is loaded past the end counts for the last key only, which reaches every target.
        int64_t total = 0;
        for (int n = 0; n < W; n++) total += count[n];
        return double(total);
    }));
}

// The smallest s that top_p keeps of those that are `least` or more. The workspace has room for 2 * width numbers.
float bound_of_mass(const float* row, int64_t width, float least, double top_p, float* workspace) {
    Mass all;
    for (int64_t i = 0; i < width; i += W) {
        const vf s = load_within(row, i, width);
        all.add(s >= least ? exp(s) : vf{});
    }
    const double total = all.total();
    // Tokens below this have less than half of what top_p removes, so it removes all of them.
    least = std::max(least, float(std::log(0.5 * (1.0 - top_p) * total / double(width))));
    float *kept = workspace, *weights = workspace + round_up(width, 16);
    int64_t count = 0;
    for (int64_t i = 0; i < width; i += W) {
        const vf s = load_within(row, i, width);
        const vi more = s >= least;
        if (!any(more)) continue;
        const vf weight = exp(s);
        for (int n = 0; n < W; n++) {
            kept[count] = s[n];
            weights[count] = weight[n];
            count -= more[n];
        }
    }
    for (int64_t i = count; i < round_up(count, W); i++) {
        kept[i] = -INFINITY;
        weights[i] = 0.0f;
    }
    return number_of(smallest_key(0, keys_of(splat(least))[0], top_p * total, [&](int32_t key) {
        Mass mass;
        for (int64_t i = 0; i < count; i += W) mass.add(keys_of(load(kept + i)) <= key ? load(weights + i) : vf{});
        return mass.total();
    }));
}

// The winner of the race between the tokens of `s` [width] from `lowest` up.
int64_t race(const float* s, int64_t width, float lowest, int64_t fallback, const SampleRow& draw) {
    const uint64_t mixed = splitmix64(splitmix64(draw.seed) ^ uint64_t(draw.position));
    const uint32_t first = uint32_t(mixed), second = uint32_t(mixed >> 32);
    vf best = {};
    vi at = vi{} + int32_t(fallback), here = lanes();
    for (int64_t i = 0; i < width; i += W) {
        const vf x = load_within(s, i, width);
        const vf score = exp(x) / noise((vu)here, first, second);
        const vi better = (x >= lowest) & (score > best);
        best = better ? score : best;
        at = better ? here : at;
        here += W;
    }
    return best_of(best, at).token;
}

// Overwrites `row`.
int64_t draw_token(float* row, const SampleArgs& args, const SampleRow& draw, const Found& largest, float* workspace) {
    const int64_t width = args.width;
    int64_t i = 0;
    for (; i + W <= width; i += W) store(row + i, (load(row + i) - largest.number) / draw.temperature);
    for (; i < width; i++) row[i] = (row[i] - largest.number) / draw.temperature;
    float lowest = -INFINITY;
    if (draw.top_k > 0 && draw.top_k < width) lowest = bound_of_count(row, width, draw.top_k);
    if (draw.top_p < 1.0) lowest = bound_of_mass(row, width, lowest, draw.top_p, workspace);
    return race(row, width, std::max(lowest, draw.lowest), largest.token, draw);
}

}  // namespace

void kvrelay_sample(const void* raw, int thread, int threads) {
    const SampleArgs& args = *static_cast<const SampleArgs*>(raw);
    const Share share(*args.rows, thread, threads);
    float* workspace = args.workspace + thread * 2 * round_up(args.width, 16);
    for (int64_t row = share.begin; row < share.end; row++) {
        float* logits = args.in + row * args.in_stride;
        const SampleRow& draw = args.draws[row];
        const Found largest = find_largest(logits, args.width);
        const bool drawn = draw.temperature > 0.0f && std::isfinite(largest.number);
        args.largest[row] = largest.number;
        args.tokens[row] = drawn ? draw_token(logits, args, draw, largest, workspace) : largest.token;
    }
}
