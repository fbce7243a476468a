// Products of weights of 4 bits with inputs rounded to 8 bits, span by span of a row; see `integers.h`.
#pragma once

#include "integer_bytes.h"
#include "integer_rows.h"

namespace {

// Inputs that are rounded together. They share their weights' scales.
inline int64_t span_of(const LinearArgs& args) {
    return args.group >= args.inputs || args.group % STEP == 0 ? STEP : STEP / 2;
}

// Of the numbers of a vector, the largest, and the sum. With intrinsics, because GCC takes them one by one.
inline int32_t largest_of(vi x) {
#ifdef __AVX512F__
    return _mm512_reduce_max_epi32((__m512i)x);
#else
    __m128i half = _mm_max_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(half, _mm_shuffle_epi32(half, 0xb1)));
#endif
}
inline int32_t sum_of(vi x) {
#ifdef __AVX512F__
    return _mm512_reduce_add_epi32((__m512i)x);
#else
    __m128i half = _mm_add_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1)));
#endif
}

// The scale of a span's integers, and their sum.
struct Span {
    float scale;
    int32_t sum;
};

// Products of words, added in pairs.
inline vi multiply_words(vi a, vi b) {
#ifdef __AVX512F__
    return (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#else
    return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
}

// Adds the products of W times four bytes, of which weights have no sign: to W integers with VNNI, otherwise to 2 W words.
inline vi add_products(vi sums, vi weights, vi x) {
#ifdef KVRELAY_BYTES
    return dot_bytes(sums, weights, x);
#else
#ifdef __AVX512F__
    sums = (vi)_mm512_add_epi16((__m512i)sums, _mm512_maddubs_epi16((__m512i)weights, (__m512i)x));
#else
    sums = (vi)_mm256_add_epi16((__m256i)sums, _mm256_maddubs_epi16((__m256i)weights, (__m256i)x));
#endif
    // Otherwise GCC adds in another order, and keeps many products in memory until then.
    asm("" : "+v"(sums));
    return sums;
#endif
}

// A byte's number for each byte from 0 to 15.
inline vi look_up(__m128i table, vi bytes) {
#ifdef __AVX512F__
    return (vi)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), (__m512i)bytes);
#else
    return (vi)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), (__m256i)bytes);
#endif
}

// The weights of 4 W bytes, as integers without a sign: four inputs of W outputs, and the next four.
template <WeightType TYPE>
inline void nibbles(const uint8_t* codes, vi (&out)[2]) {
    vu both;
    memcpy(&both, codes, sizeof both);
    out[0] = (vi)(both & 0x0f0f0f0f);
    out[1] = (vi)(both >> 4 & 0x0f0f0f0f);
    if constexpr (TYPE == FLOAT4) {
        // Twice the number, and 12 more.
        const __m128i table = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
        for (vi& half : out) half = look_up(table, half);
    }
}

// A prepared row has its integers, and then its spans.
template <WeightType TYPE>
struct Nibbles : ByVectors<Nibbles<TYPE>> {
    using A = int8_t;
    static constexpr int TALLEST = W == 16 ? 12 : 4;
    static constexpr int64_t PREPARED = PREPARED_BYTES;

    static int64_t stride(const LinearArgs& args) { return stride_of(args.inputs); }
    static int64_t prepared_floats(int64_t inputs) { return rows_at_once<Nibbles>(inputs) * stride_of(inputs) / 4; }

    static void prepare(const LinearArgs& args, const float* from, A* to) {
        if (span_of(args) == STEP) {
            prepare_spans<STEP>(args, from, to);
        } else {
            prepare_spans<STEP / 2>(args, from, to);
        }
    }

private:
    friend ByVectors<Nibbles>;
#ifdef KVRELAY_BYTES
    static constexpr bool WORDS = false;
#else
    static constexpr bool WORDS = true;
#endif
    // Inputs after which sums of words, of two products each, may be full: 8 * 2 * 15 * 127 and 4 * 2 * 24 * 127 are below 2^15.
    static constexpr int64_t RUN = TYPE == INT4 ? 32 : 16;

    static int64_t stride_of(int64_t inputs) {
        const int64_t steps = whole_steps(inputs);
        return round_up(steps + 2 * steps / STEP * (int64_t)sizeof(Span), LINE) + LINE;
    }
    static Span* spans_of(const LinearArgs& args, A* a) { return reinterpret_cast<Span*>(a + whole_steps(args.inputs)); }
    static const Span* spans_of(const LinearArgs& args, const A* a) {
        return reinterpret_cast<const Span*>(a + whole_steps(args.inputs));
    }

    template <int64_t SPAN>
    static void prepare_spans(const LinearArgs& args, const float* from, A* to) {
        constexpr int64_t VECTORS = SPAN / W;
        const int64_t inputs = args.inputs, count = whole_steps(inputs) / SPAN;
        Span* spans = spans_of(args, to);
        vf squares = {};
        for (int64_t s = 0; s < count; s++, to += SPAN) {
            const int64_t begin = s * SPAN, left = inputs - begin;
            alignas(64) float last[2][SPAN] = {};  // inputs and norms of a span that isn't whole
            const float *x = from + begin, *norm = args.norm == nullptr ? nullptr : args.norm + begin;
            if (left < SPAN) {
                for (int64_t k = 0; k < left; k++) {
                    last[0][k] = x[k];
                    last[1][k] = norm == nullptr ? 0.0f : norm[k];
                }
                x = last[0];
                norm = norm == nullptr ? nullptr : last[1];
            }
            vf numbers[VECTORS];
#pragma GCC unroll 8
            for (int64_t i = 0; i < VECTORS; i++) {
                numbers[i] = load(x + i * W);
                squares = fused(numbers[i], numbers[i], squares);
                if (norm != nullptr) numbers[i] *= load(norm + i * W);
            }
            spans[s] = round_span(numbers, to);
        }
        if (args.norm == nullptr) return;
        const float norm = 1.0f / std::sqrt(sum(squares) / (float)inputs + args.eps);
        for (int64_t s = 0; s < count; s++) spans[s].scale *= norm;
    }

    // Rounds the numbers of a span. Its scale is NaN if one isn't finite.
    template <size_t VECTORS>
    static Span round_span(const vf (&x)[VECTORS], A* to) {
        // As integers, magnitudes are in the order of the numbers, and all that aren't finite come after those.
        vi most = {};
        for (const vf& numbers : x) {
            const vi magnitude = (vi)numbers & 0x7fffffff;
            most = magnitude > most ? magnitude : most;
        }
        const int32_t bits = largest_of(most);
        float largest;
        memcpy(&largest, &bits, sizeof largest);
        if (!(largest >= 0x1p-100f && bits < 0x7f800000)) {  // 127 / largest isn't finite, or all are as good as 0
            memset(to, 0, VECTORS * W);
            return {bits < 0x7f800000 ? 0.0f : std::numeric_limits<float>::quiet_NaN(), 0};
        }
        const float factor = 127.0f / largest;
        vi sums = {};
        for (size_t i = 0; i < VECTORS; i++) {
            const vi integers = rounded(x[i] * factor);
            narrow(reinterpret_cast<uint8_t*>(to) + i * W, integers);
            sums += integers;
        }
        return {largest / 127.0f, sum_of(sums)};
    }

    // The zeros of W outputs, as words with 0 between them.
    static vi zeros(const LinearArgs& args, int64_t at) {
        if constexpr (TYPE == FLOAT4) return vi{} + 12;
        return args.zeros == nullptr ? vi{} : load_codes(args.zeros + at);
    }

    template <int M>
    static void tile(const LinearArgs& args, const A* a, int64_t stride, int64_t row, const Pair<uint8_t>& blocks) {
        const int64_t inputs = whole_steps(args.inputs), span = span_of(args), groups = groups_of(args);
        const uint8_t *w0 = blocks.w0, *w1 = blocks.w1;
        const A* extra = a + inputs;
        const bool scaled = scaled_last(args);
        const int64_t ahead = later_pair(blocks, inputs * W / 2);
        vf totals[M][2];
        for (auto& total : totals) total[0] = total[1] = vf{};
        for (int64_t k = 0, group = 0, next = args.group; k < inputs; extra += sizeof(Span)) {
            if (k == next && group + 1 < groups) {
                group++;
                next += args.group;
            }
            const int64_t at0 = (blocks.b0 * groups + group) * W, at1 = (blocks.b1 * groups + group) * W;
            const vi zero0 = zeros(args, at0), zero1 = zeros(args, at1);
            Span spans[M];
            vi sums[M][2];
#pragma GCC unroll 16
            for (int m = 0; m < M; m++) {
                memcpy(&spans[m], extra + m * stride, sizeof spans[m]);
                const vi x = vi{} + (-spans[m].sum & 0xffff);
                sums[m][0] = multiply_words(zero0, x);
                sums[m][1] = multiply_words(zero1, x);
            }
            for (const int64_t end = k + span; k < end;) {
                vi words[M][2] = {};
                auto& to = WORDS ? words : sums;
#pragma GCC unroll 4
                for (int64_t line = 0; line < RUN / 8 * 4 * W; line += LINE) {
                    __builtin_prefetch(w0 + ahead + line, 0, 2);
                    __builtin_prefetch(w1 + ahead + line, 0, 2);
                }
#pragma GCC unroll 4
                for (int64_t i = 0; i < RUN; i += 8, k += 8, w0 += 4 * W, w1 += 4 * W) {
                    vi v0[2], v1[2];
                    nibbles<TYPE>(w0, v0);
                    nibbles<TYPE>(w1, v1);
#pragma GCC unroll 2
                    for (int half = 0; half < 2; half++) {
#pragma GCC unroll 16
                        for (int m = 0; m < M; m++) {
                            int32_t four;
                            memcpy(&four, a + m * stride + k + 4 * half, sizeof four);
                            const vi x = vi{} + four;
                            to[m][0] = add_products(to[m][0], v0[half], x);
                            to[m][1] = add_products(to[m][1], v1[half], x);
                        }
                    }
                }
                if constexpr (WORDS) {
#pragma GCC unroll 16
                    for (int m = 0; m < M; m++) {
                        sums[m][0] += multiply_words(words[m][0], vi{} + 0x00010001);
                        sums[m][1] += multiply_words(words[m][1], vi{} + 0x00010001);
                    }
                }
            }
            // A scale of all inputs is applied at the end.
            const vf scale0 = scaled ? splat(1.0f) : load(args.scales + at0);
            const vf scale1 = scaled ? splat(1.0f) : load(args.scales + at1);
#pragma GCC unroll 16
            for (int m = 0; m < M; m++) {
                const float scale = TYPE == FLOAT4 ? 0.5f * spans[m].scale : spans[m].scale;
                totals[m][0] = fused(__builtin_convertvector(sums[m][0], vf) * scale, scale0, totals[m][0]);
                totals[m][1] = fused(__builtin_convertvector(sums[m][1], vf) * scale, scale1, totals[m][1]);
            }
            if (args.minima == nullptr) continue;
            const vf minimum0 = load(args.minima + at0), minimum1 = load(args.minima + at1);
#pragma GCC unroll 16
            for (int m = 0; m < M; m++) {
                const vf sum = splat(spans[m].scale * (float)spans[m].sum);
                totals[m][0] = fused(sum, minimum0, totals[m][0]);
                totals[m][1] = fused(sum, minimum1, totals[m][1]);
            }
        }
        alignas(64) float found[M][2][W];
        for (int m = 0; m < M; m++) {
            store(found[m][0], totals[m][0]);
            store(found[m][1], totals[m][1]);
        }
        finish(args, row, M, blocks.b0, blocks.b1, stored(found));
    }
};

}  // namespace
