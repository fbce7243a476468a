// Vectors of the CPU's full width. Arithmetic is in float32; loads convert from bfloat16 and int8, and stores to bfloat16.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
constexpr int W = 16;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int W = 8;
#else
#error "needs AVX2 and FMA"
#endif

using bf16 = uint16_t;
typedef float vf __attribute__((vector_size(4 * W)));     // W numbers
typedef int32_t vi __attribute__((vector_size(4 * W)));   // also the result of comparing two vf: -1 or 0
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));  // W bfloat16

inline int64_t divide_up(int64_t x, int64_t by) { return (x + by - 1) / by; }
inline int64_t round_up(int64_t x, int64_t multiple) { return divide_up(x, multiple) * multiple; }

inline vf splat(float x) { return x - vf{}; }

// Unaligned loads and stores of W numbers.
inline vf load(const float* p) {
    vf x;
    memcpy(&x, p, sizeof x);
    return x;
}

// With intrinsics, because GCC compiles __builtin_convertvector to four instructions.
inline vf load(const bf16* p) {
#ifdef __AVX512F__
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#else
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#endif
}

inline vf load(const int8_t* p) {
#ifdef __AVX512F__
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#else
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#endif
}

inline void store(float* p, vf x) { memcpy(p, &x, sizeof x); }

#ifndef __AVX512BF16__
// The nearest bfloat16, ties to even, in the low 16 bits; NaN stays NaN.
inline vu nearest_bf16(vf x) {
    vu bits = (vu)x;
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return x == x ? bits : vu{} + 0x7fc0;
}
#endif

// Rounds to the nearest bfloat16, ties to even; NaN stays NaN. The CPU's own instruction flushes numbers below 2^-126 to 0.
inline void store(bf16* p, vf x) {
#ifdef __AVX512BF16__
    _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    vh half = __builtin_convertvector(nearest_bf16(x), vh);
    memcpy(p, &half, sizeof half);
#endif
}

// Stores W pairs, rounded in the same way: a number of `first`, one of `second`, and so on.
inline void store_pairs(bf16* p, vf first, vf second) {
#ifdef __AVX512BF16__
    typedef uint16_t halves __attribute__((vector_size(4 * W)));
    halves at;
    for (int i = 0; i < 2 * W; i++) at[i] = i % 2 * W + i / 2;
    const halves pairs = __builtin_shuffle((halves)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first), at);
#else
    const vu pairs = nearest_bf16(first) | nearest_bf16(second) << 16;
#endif
    memcpy(p, &pairs, sizeof pairs);
}

inline float number(float x) { return x; }
inline float number(int8_t x) { return x; }
inline float number(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, sizeof y);
    return y;
}

inline void put(float* p, float x) { *p = x; }
inline void put(bf16* p, float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    *p = x == x ? (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) : (bf16)0x7fc0;
}

// a * b + c, rounded once. Compilers may not fuse a product and a sum by themselves (FLAGS in `library.py`): GCC does it in one
// instance of a template and not in another, depending on the CPU that it tunes for, and their results would differ.
inline vf fused(vf a, vf b, vf c) {
#ifdef __AVX512F__
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#endif
}

inline float sum(vf x) {
    float total = 0;
    for (int i = 0; i < W; i++) total += x[i];
    return total;
}

inline vf larger(vf a, vf b) { return a > b ? a : b; }

// e^x, within 2 units in the last place; 0 below -87, infinity above 88.7, NaN for NaN.
// x = n ln 2 + r, |r| <= ln 2 / 2; a polynomial in r (Cephes' expf), then the exponent bits of 2^n.
inline vf exp(vf x) {
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    vf clamped = x > splat(88.7228f) ? splat(88.7228f) : x;
    clamped = clamped < splat(-87.3365f) ? splat(-87.3365f) : clamped;
    vf shifted = fused(clamped, splat(1.44269504f), magic);
    vf n = shifted - magic;
    vf r = fused(n, splat(-0.693359375f), clamped);
    r = fused(n, splat(2.12194440e-4f), r);
    vf y = splat(1.9875691500e-4f);
    y = fused(y, r, splat(1.3981999507e-3f));
    y = fused(y, r, splat(8.3334519073e-3f));
    y = fused(y, r, splat(4.1665795894e-2f));
    y = fused(y, r, splat(1.6666665459e-1f));
    y = fused(y, r, splat(5.0000001201e-1f));
    y = fused(y, r * r, r) + 1.0f;
    // 2^n in two factors, because n may be 128.
    vi exponent = __builtin_convertvector(n, vi);
    vi half = exponent >> 1;
    y = y * (vf)((half + 127) << 23) * (vf)((exponent - half + 127) << 23);
    y = x < splat(-87.3365f) ? vf{} : y;
    y = x > splat(88.7228f) ? splat(__builtin_inff()) : y;
    return x == x ? y : x;
}
