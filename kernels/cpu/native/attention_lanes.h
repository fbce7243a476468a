// Exchanges between the lanes of vectors, loads and stores of part of a vector, and the exponential of a softmax.
#pragma once

#include <utility>

#include "simd.h"

// Lane i is number from(i) of the 2 W numbers of a and b.
template <auto from, int... I>
inline vf shuffle(vf a, vf b, std::integer_sequence<int, I...>) {
#ifdef __clang__
    return __builtin_shufflevector(a, b, from(I)...);
#else
    return __builtin_shuffle(a, b, vi{from(I)...});
#endif
}

template <auto from>
inline vf shuffle(vf a, vf b) {
    return shuffle<from>(a, b, std::make_integer_sequence<int, W>{});
}

// The first `count` < W numbers; the other lanes are 0.
template <typename T>
inline vf load(const T* p, int64_t count) {
    float lanes[W] = {};
    for (int64_t i = 0; i < count; i++) lanes[i] = number(p[i]);
    return load(lanes);
}

inline void store(float* p, vf x, int64_t count) {
    float lanes[W];
    store(lanes, x);
    memcpy(p, lanes, count * sizeof(float));
}

// Lane i of the result is the sum of the lanes of x[i]. Overwrites x.
//
// Each round halves the number of vectors. Before it, every vector has partial sums of S of the original ones: lane i has
// a part of the sum of number i % S.
template <int S = 1>
inline vf sums(vf* x) {
    if constexpr (S == W) {
        return x[0];
    } else {
        for (int i = 0; i < W / S / 2; i++) {
            vf a = x[2 * i], b = x[2 * i + 1];
            // Only one of the two moves lanes.
            constexpr auto in_place = [](int lane) { return lane % (2 * S) < S ? lane : W + lane; };
            constexpr auto moved = [](int lane) { return lane % (2 * S) < S ? lane + S : W + lane - S; };
            x[i] = shuffle<in_place>(a, b) + shuffle<moved>(a, b);
        }
        return sums<2 * S>(x);
    }
}

// Reduces all lanes to one number with `join`, pairwise.
template <int S = W / 2, typename Join>
inline float reduce(vf x, Join join) {
    constexpr auto turned = [](int lane) { return (lane + S) % W; };
    x = join(x, shuffle<turned>(x, x));
    if constexpr (S > 1) return reduce<S / 2>(x, join);
    return x[0];
}

// Transposes x [W, W] in log2(W) rounds; each interleaves the first half of the vectors with the second half.
inline void transpose(vf* x) {
    constexpr auto low = [](int lane) { return lane / 2 + lane % 2 * W; };
    constexpr auto high = [](int lane) { return W / 2 + lane / 2 + lane % 2 * W; };
    for (int round = 1; round < W; round *= 2) {
        vf y[W];
        for (int i = 0; i < W / 2; i++) {
            y[2 * i] = shuffle<low>(x[i], x[i + W / 2]);
            y[2 * i + 1] = shuffle<high>(x[i], x[i + W / 2]);
        }
        for (int i = 0; i < W; i++) x[i] = y[i];
    }
}

// 2^x for x <= 0, within 2 units in the last place; 0 below -126, NaN for NaN. A minimax polynomial of the distance from x
// to the nearest integer, then the exponent bits.
inline vf exp2_nonpositive(vf x) {
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    vf clamped = x < splat(-126.0f) ? splat(-126.0f) : x;
    vf shifted = clamped + magic;
    vf r = clamped - (shifted - magic);
    vf y = splat(1.534581242594868e-4f);
    y = fused(y, r, splat(1.3399930903688073e-3f));
    y = fused(y, r, splat(9.618489071726799e-3f));
    y = fused(y, r, splat(5.550328642129898e-2f));
    y = fused(y, r, splat(0.24022646248340607f));
    y = fused(y, r, splat(0.6931471824645996f));
    y = fused(y, r, splat(1.0f));
    y = (vf)((vi)y + ((vi)shifted << 23));
    return x < splat(-126.0f) ? vf{} : y;
}

// c tanh(x / c), within 1e-7 c; `inverse` is 1 / c. NaN stays NaN.
inline vf capped(vf x, float cap, float inverse) {
    const vi sign = (vi)x & (vi{} + int32_t(0x80000000));
    const vf size = (vf)((vi)x ^ sign);
    // tanh |x| = (1 - t) / (1 + t), t = e^(-2 |x|)
    const vf t = exp2_nonpositive(size * (-2.0f * 1.44269504f * inverse));
    return (vf)((vi)(splat(cap) * (1.0f - t) / (1.0f + t)) ^ sign);
}
