// Products of 16 by 16 bits, added in pairs; see `integers.h`.
#pragma once

#include "integer_rows.h"

namespace {

// Adds the products of W pairs.
inline vi dot(vi sums, vi weights, vi x) {
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
    return (vi)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)weights, (__m512i)x);
#elif defined(__AVX512F__)
    return sums + (vi)_mm512_madd_epi16((__m512i)weights, (__m512i)x);
#elif defined(__AVXVNNI__)
    return (vi)_mm256_dpwssd_avx_epi32((__m256i)sums, (__m256i)weights, (__m256i)x);
#else
    return sums + (vi)_mm256_madd_epi16((__m256i)weights, (__m256i)x);
#endif
}

// The first input of a row's next two, or four, for all lanes.
template <int INPUTS>
inline vi splat_inputs(const int16_t* x) {
    if constexpr (INPUTS == 4) {
        int64_t four;
        memcpy(&four, x, sizeof four);
#ifdef __AVX512F__
        return (vi)_mm512_set1_epi64(four);
#else
        return (vi)_mm256_set1_epi64x(four);
#endif
    } else {
        int32_t pair;
        memcpy(&pair, x, sizeof pair);
        return vi{} + pair;
    }
}

// Sums of neighbours, those of `a` first.
inline vi neighbours(vi a, vi b) {
    vi even;
    for (int i = 0; i < W; i++) even[i] = 2 * i;
    return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, even + 1);
}

// The weights of 4 W bytes of int8, or of 2 W bytes of 4 bits, as two vectors of pairs of 16 bits. Of int8, each has four
// inputs of W / 2 outputs; of 4 bits, two inputs of W outputs.
template <WeightType TYPE>
inline void words(const uint8_t* codes, vi* out) {
#ifdef __AVX512F__
    const __m256i bytes = _mm256_loadu_si256((const __m256i*)codes);
    if constexpr (TYPE == INT8) {
        out[0] = (vi)_mm512_cvtepi8_epi16(bytes);
        out[1] = (vi)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)(codes + 2 * W)));
    } else if constexpr (TYPE == INT4) {
        const __m512i wide = _mm512_cvtepu8_epi16(bytes);
        out[0] = (vi)_mm512_and_si512(wide, _mm512_set1_epi16(15));
        out[1] = (vi)_mm512_srli_epi16(wide, 4);
    } else {
        const __m256i halves[2] = {bytes, _mm256_srli_epi16(bytes, 4)};
        const __m256i table = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
        for (int i = 0; i < 2; i++) {
            const __m256i code = _mm256_and_si256(halves[i], _mm256_set1_epi8(15));
            out[i] = (vi)_mm512_cvtepi8_epi16(_mm256_shuffle_epi8(table, code));
        }
    }
#else
    const __m128i bytes = _mm_loadu_si128((const __m128i*)codes);
    if constexpr (TYPE == INT8) {
        out[0] = (vi)_mm256_cvtepi8_epi16(bytes);
        out[1] = (vi)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(codes + 2 * W)));
    } else if constexpr (TYPE == INT4) {
        const __m256i wide = _mm256_cvtepu8_epi16(bytes);
        out[0] = (vi)_mm256_and_si256(wide, _mm256_set1_epi16(15));
        out[1] = (vi)_mm256_srli_epi16(wide, 4);
    } else {
        const __m128i halves[2] = {bytes, _mm_srli_epi16(bytes, 4)};
        const __m128i table = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
        for (int i = 0; i < 2; i++) {
            const __m128i code = _mm_and_si128(halves[i], _mm_set1_epi8(15));
            out[i] = (vi)_mm256_cvtepi8_epi16(_mm_shuffle_epi8(table, code));
        }
    }
#endif
}

// Products of words. A prepared row has its integers, their sum in each group, and its scale.
template <WeightType TYPE, bool GROUPED>
struct Words : ByVectors<Words<TYPE, GROUPED>> {
    using A = int16_t;
    // Sums of integers, and with groups of float32 too, stay in registers.
    static constexpr bool FOURS = TYPE == INT8;
    static constexpr int TALLEST = W == 16 ? (FOURS && GROUPED ? 4 : 6) : FOURS && GROUPED ? 1 : 2;
    static constexpr int64_t PREPARED = PREPARED_BYTES / sizeof(A);

    static int64_t stride(const LinearArgs& args) { return stride_of(args.inputs, GROUPED ? groups_of(args) : 0); }

    static int64_t prepared_floats(int64_t inputs) {
        return rows_at_once<Words>(inputs) * stride_of(inputs, divide_up(inputs, 32)) / 2;
    }

    static void prepare(const LinearArgs& args, const float* from, A* to) {
        const float scale = round_row(args, from, [&](int64_t k, vi x) {
            narrow(to + k, x);
        });
        memcpy(to + scale_at(args.inputs), &scale, sizeof scale);
        if constexpr (GROUPED) {
            for (int64_t group = 0; group < groups_of(args); group++) {
                const int64_t end = std::min(args.inputs, (group + 1) * args.group);
                int32_t sum = 0;
                for (int64_t k = group * args.group; k < end; k++) sum += to[k];
                memcpy(to + scale_at(args.inputs) + 2 + 2 * group, &sum, sizeof sum);
            }
        }
    }

private:
    friend ByVectors<Words>;
    static constexpr int HALVES = FOURS ? 2 : 1;  // vectors of the sums of a block

    static int64_t scale_at(int64_t inputs) { return whole_steps(inputs); }
    static int64_t stride_of(int64_t inputs, int64_t groups) { return round_up(scale_at(inputs) + 2 + 2 * groups, 32) + 32; }

    // The sums of W outputs.
    static vi whole(const vi (&sums)[HALVES]) {
        if constexpr (FOURS) return neighbours(sums[0], sums[1]);
        return sums[0];
    }

    template <int M>
    static void tile(const LinearArgs& args, const A* a, int64_t stride, int64_t row, const Pair<uint8_t>& blocks) {
        const int64_t groups = GROUPED ? groups_of(args) : 1, inputs = 2 * packed_pairs(args.inputs, TYPE);
        constexpr int64_t BYTES = 4 * W * weight_bits(TYPE) / 8;  // of the codes of four inputs
        const uint8_t *w0 = blocks.w0, *w1 = blocks.w1;
        const A* extra = a + scale_at(args.inputs);
        alignas(64) float found[M][2][W];
        vf totals[M][2];
        for (auto& total : totals) total[0] = total[1] = vf{};
        for (int64_t group = 0; group < groups; group++) {
            vi sums[M][2][HALVES] = {};
            const int64_t at0 = (blocks.b0 * groups + group) * W, at1 = (blocks.b1 * groups + group) * W;
            if (!FOURS && args.zeros != nullptr) {
                const vi zero0 = load_codes(args.zeros + at0), zero1 = load_codes(args.zeros + at1);
#pragma GCC unroll 16
                for (int m = 0; m < M; m++) {
                    int32_t sum;
                    memcpy(&sum, extra + m * stride + 2 + 2 * group, sizeof sum);
                    sums[m][0][0] = zero0 * -sum;
                    sums[m][1][0] = zero1 * -sum;
                }
            }
            const A *x = a + group * args.group, *end = group + 1 < groups ? x + args.group : a + inputs;
            for (; x < end; x += 4, w0 += BYTES, w1 += BYTES) {
                constexpr int AHEAD = 2048;  // bytes; also across pages, where the CPU's own prefetcher stops
                __builtin_prefetch(w0 + AHEAD);
                __builtin_prefetch(w1 + AHEAD);
                vi v0[2], v1[2];
                words<TYPE>(w0, v0);
                words<TYPE>(w1, v1);
#pragma GCC unroll 16
                for (int m = 0; m < M; m++) {
#pragma GCC unroll 2
                    for (int i = 0; i < 2; i++) {
                        const vi y = splat_inputs<FOURS ? 4 : 2>(x + m * stride + (FOURS ? 0 : 2 * i));
                        sums[m][0][i % HALVES] = dot(sums[m][0][i % HALVES], v0[i], y);
                        sums[m][1][i % HALVES] = dot(sums[m][1][i % HALVES], v1[i], y);
                    }
                }
            }
            // A scale of all inputs is applied at the end.
            const vf scale0 = scaled_last(args) ? splat(1.0f) : load(args.scales + at0);
            const vf scale1 = scaled_last(args) ? splat(1.0f) : load(args.scales + at1);
#pragma GCC unroll 16
            for (int m = 0; m < M; m++) {
                totals[m][0] = fused(__builtin_convertvector(whole(sums[m][0]), vf), scale0, totals[m][0]);
                totals[m][1] = fused(__builtin_convertvector(whole(sums[m][1]), vf), scale1, totals[m][1]);
            }
        }
        for (int m = 0; m < M; m++) {
            float scale;
            memcpy(&scale, extra + m * stride, sizeof scale);
            if (TYPE == FLOAT4) scale *= 0.5f;  // the integers are twice the numbers
            store(found[m][0], totals[m][0] * scale);
            store(found[m][1], totals[m][1] * scale);
        }
        finish(args, row, M, blocks.b0, blocks.b1, stored(found));
    }
};

}  // namespace
