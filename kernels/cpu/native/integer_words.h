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

// A row's next four inputs, for all lanes.
inline vi splat_inputs(const int16_t* x) {
    int64_t four;
    memcpy(&four, x, sizeof four);
#ifdef __AVX512F__
    return (vi)_mm512_set1_epi64(four);
#else
    return (vi)_mm256_set1_epi64x(four);
#endif
}

// Sums of neighbours, those of `a` first.
inline vi neighbours(vi a, vi b) {
    vi even;
    for (int i = 0; i < W; i++) even[i] = 2 * i;
    return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, even + 1);
}

// The weights of 4 W bytes, as two vectors of pairs of 16 bits. Each has four inputs of W / 2 outputs.
inline void words(const uint8_t* codes, vi* out) {
#ifdef __AVX512F__
    for (int i = 0; i < 2; i++) out[i] = (vi)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)(codes + i * 2 * W)));
#else
    for (int i = 0; i < 2; i++) out[i] = (vi)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(codes + i * 2 * W)));
#endif
}

// Products of words, of int8. A prepared row has its integers, its scale and, for weights with minima, the sum of the
// integers of each group.
template <bool GROUPED>
struct Words : ByVectors<Words<GROUPED>> {
    using A = int16_t;
    // Sums of integers, and with groups of float32 too, stay in registers.
    static constexpr int TALLEST = W == 16 ? (GROUPED ? 4 : 6) : GROUPED ? 1 : 2;
    static constexpr int64_t PREPARED = PREPARED_BYTES / sizeof(A);

    static int64_t stride(const LinearArgs& args) { return stride_of(args.inputs); }
    static int64_t prepared_floats(int64_t inputs) { return rows_at_once<Words>(inputs) * stride_of(inputs) / 2; }

    static void prepare(const LinearArgs& args, const float* from, A* to) {
        const float scale = round_row(args, from, [&](int64_t k, vi x) {
            narrow(to + k, x);
        });
        memcpy(to + scale_at(args.inputs), &scale, sizeof scale);
        if (!GROUPED || args.minima == nullptr) return;
        int32_t* sums = reinterpret_cast<int32_t*>(to + sums_at(args.inputs));
        for (int64_t group = 0, groups = groups_of(args), k = 0; group < groups; group++) {
            const int64_t end = group + 1 < groups ? k + args.group : args.inputs;
            for (sums[group] = 0; k < end; k++) sums[group] += to[k];
        }
    }

private:
    friend ByVectors<Words>;

    static int64_t scale_at(int64_t inputs) { return whole_steps(inputs); }
    static int64_t sums_at(int64_t inputs) { return scale_at(inputs) + 2; }
    static int64_t stride_of(int64_t inputs) {
        return round_up(sums_at(inputs) + (GROUPED ? 2 * whole_steps(inputs) / SMALLEST_GROUP : 0), 32) + 32;
    }

    template <int M>
    static void tile(const LinearArgs& args, const A* a, int64_t stride, int64_t row, const Pair<uint8_t>& blocks) {
        const int64_t groups = GROUPED ? groups_of(args) : 1, inputs = 2 * packed_pairs(args.inputs, INT8);
        const uint8_t *w0 = blocks.w0, *w1 = blocks.w1;
        const A* extra = a + scale_at(args.inputs);
        const int64_t ahead = later_pair(blocks, inputs * W);
        alignas(64) float found[M][2][W];
        vf totals[M][2];
        for (auto& total : totals) total[0] = total[1] = vf{};
        for (int64_t group = 0; group < groups; group++) {
            const int64_t at0 = (blocks.b0 * groups + group) * W, at1 = (blocks.b1 * groups + group) * W;
            const A *x = a + group * args.group, *end = group + 1 < groups ? x + args.group : a + inputs;
            vi high[M][2] = {}, low[M][2] = {};
            while (x < end) {
                vi sums[M][2][2] = {};
                for (const A* until = std::min(end, x + SECTION); x < until; x += 4, w0 += 4 * W, w1 += 4 * W) {
                    __builtin_prefetch(w0 + ahead, 0, 2);
                    __builtin_prefetch(w1 + ahead, 0, 2);
                    vi v0[2], v1[2];
                    words(w0, v0);
                    words(w1, v1);
#pragma GCC unroll 16
                    for (int m = 0; m < M; m++) {
                        const vi y = splat_inputs(x + m * stride);
#pragma GCC unroll 2
                        for (int i = 0; i < 2; i++) {
                            sums[m][0][i] = dot(sums[m][0][i], v0[i], y);
                            sums[m][1][i] = dot(sums[m][1][i], v1[i], y);
                        }
                    }
                }
#pragma GCC unroll 16
                for (int m = 0; m < M; m++) {
#pragma GCC unroll 2
                    for (int i = 0; i < 2; i++) {
                        const vi sum = neighbours(sums[m][i][0], sums[m][i][1]);
                        high[m][i] += sum >> 16;
                        low[m][i] += sum & 0xffff;
                    }
                }
            }
            // A scale of all inputs is applied at the end.
            const vf scale0 = scaled_last(args) ? splat(1.0f) : load(args.scales + at0);
            const vf scale1 = scaled_last(args) ? splat(1.0f) : load(args.scales + at1);
#pragma GCC unroll 16
            for (int m = 0; m < M; m++) {
                totals[m][0] = fused(joined(high[m][0], low[m][0]), scale0, totals[m][0]);
                totals[m][1] = fused(joined(high[m][1], low[m][1]), scale1, totals[m][1]);
            }
            if (!GROUPED || args.minima == nullptr) continue;
            const vf minimum0 = load(args.minima + at0), minimum1 = load(args.minima + at1);
#pragma GCC unroll 16
            for (int m = 0; m < M; m++) {
                int32_t sum;
                memcpy(&sum, extra + m * stride + 2 * (1 + group), sizeof sum);
                totals[m][0] = fused(splat((float)sum), minimum0, totals[m][0]);
                totals[m][1] = fused(splat((float)sum), minimum1, totals[m][1]);
            }
        }
        for (int m = 0; m < M; m++) {
            float scale;
            memcpy(&scale, extra + m * stride, sizeof scale);
            store(found[m][0], totals[m][0] * scale);
            store(found[m][1], totals[m][1] * scale);
        }
        finish(args, row, M, blocks.b0, blocks.b1, stored(found));
    }
};

}  // namespace
