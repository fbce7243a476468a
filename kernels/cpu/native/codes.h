// Weights of 4 or 8 bits, and their decoding. value = (number of the code - zero) * scale, where scale and zero belong to
// one output and `group` consecutive inputs.
//
// The codes of a block are in the order of bfloat16 weights (linear.h): a vector is a pair of inputs for W outputs, 2 W
// codes. With 4 bits, the low halves of 2 W bytes are one such vector and the high halves are the next one. int8 has four
// inputs side by side, as products of bytes take them.
//
//     codes   [block][pair of inputs][output in block][input in pair]
//             [block][four inputs][output in block][input in four]     int8
//     scales  [block][group][output in block]                          float32
//     zeros   [block][group][output in block]                          uint8, or none: 0
#pragma once

#include "linear.h"

struct Codes {
    const uint8_t* codes;
    const float* scales;
    const uint8_t* zeros;  // null: 0
    int64_t inputs;
    int64_t group;  // inputs; a multiple of the inputs of a tile
    WeightType type;

    // Whether an output has one scale and no zero: its products are scaled, not its weights.
    bool whole() const { return group >= inputs && zeros == nullptr; }
    int64_t groups() const { return divide_up(inputs, group); }
    int64_t block_bytes() const { return packed_pairs(inputs, type) * 2 * W * weight_bits(type) / 8; }
};

// The numbers of W codes: int8, float8 (E4M3, no infinities), 4 bits without a sign, or float4 (E2M1).
template <WeightType TYPE>
inline vf numbers(vi codes) {
    if constexpr (TYPE == INT8) {
        return __builtin_convertvector((codes << 24) >> 24, vf);
    } else if constexpr (TYPE == INT4) {
        return __builtin_convertvector(codes, vf);
    } else if constexpr (TYPE == FLOAT8) {
        // The exponent and mantissa at their places in float32 are 2^-120 of the number, subnormal ones too.
        const vf magnitude = (vf)((codes & 0x7f) << 20) * 0x1p120f;
        return (vf)((vi)magnitude | (codes & 0x80) << 24);
    } else {
        const vf magnitude = (vf)((codes & 7) << 22) * 0x1p126f;
        return (vf)((vi)magnitude | (codes & 8) << 28);
    }
}

// W codes of 8 bits. With intrinsics, because GCC compiles __builtin_convertvector from bytes to one move for each.
inline vi load_codes(const uint8_t* p) {
#ifdef __AVX512F__
    return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#else
    return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#endif
}

// For each output of a block twice, one after the other, as the two inputs of a pair need them.
inline void twice(vf x, vf (&halves)[2]) {
    vi at;
    for (int i = 0; i < W; i++) at[i] = i / 2;
    halves[0] = __builtin_shuffle(x, at);
    halves[1] = __builtin_shuffle(x, at + W / 2);
}

// Decodes `count` bytes of codes, which are multiples of 2 W, to `to(numbers, half)`.
template <WeightType TYPE, class Convert>
inline bf16* decode_run(const uint8_t* codes, const uint8_t* end, bf16* out, Convert convert) {
    constexpr int AHEAD = 2048;
    for (; codes < end; codes += 2 * W) {
        __builtin_prefetch(codes + AHEAD);
        if constexpr (fours(TYPE)) {
            uint16_t both[W][2];  // pairs of inputs of each output
            alignas(64) uint16_t pairs[2][W];
            memcpy(both, codes, sizeof both);
            for (int i = 0; i < 2 * W; i++) pairs[i / W][i % W] = both[i % W][i / W];
            codes += 2 * W;
            for (int i = 0; i < 4; i++, out += W) store(out, convert(numbers<TYPE>(load_codes((const uint8_t*)pairs + i * W)), i % 2));
            continue;
        }
        const vi bytes[2] = {load_codes(codes), load_codes(codes + W)};
        if constexpr (weight_bits(TYPE) == 8) {
            for (int half = 0; half < 2; half++, out += W) store(out, convert(numbers<TYPE>(bytes[half]), half));
        } else {
            for (int half = 0; half < 2; half++, out += W) store(out, convert(numbers<TYPE>(bytes[half] & 15), half));
            for (int half = 0; half < 2; half++, out += W) store(out, convert(numbers<TYPE>(bytes[half] >> 4), half));
        }
    }
    return out;
}

// Decodes block `block`, and prefetches 2 KiB ahead. A scale of all inputs is left to the sums of the product.
template <WeightType TYPE>
void decode(const Codes& from, int64_t block, bf16* out) {
    const int64_t groups = from.groups(), group_bytes = from.group * 2 * W * weight_bits(TYPE) / 16;
    const uint8_t *codes = from.codes + block * from.block_bytes(), *end = codes + from.block_bytes();
    if (from.whole()) {
        decode_run<TYPE>(codes, end, out, [](vf x, int) { return x; });
        return;
    }
    for (int64_t group = 0; group < groups; group++) {
        const int64_t at = (block * groups + group) * W;
        const uint8_t* last = group + 1 < groups ? codes + group_bytes : end;
        vf scales[2];
        twice(load(from.scales + at), scales);
        if (from.zeros == nullptr) {
            out = decode_run<TYPE>(codes, last, out, [&](vf x, int half) { return x * scales[half]; });
        } else {
            vf shifts[2];
            twice((vf)__builtin_convertvector(load_codes(from.zeros + at), vf) * load(from.scales + at), shifts);
            out = decode_run<TYPE>(codes, last, out, [&](vf x, int half) { return fused(x, scales[half], -shifts[half]); });
        }
        codes = last;
    }
}

// The value of one weight.
template <WeightType TYPE>
float decode_one(const Codes& from, int64_t output, int64_t input) {
    constexpr int BITS = weight_bits(TYPE);
    const int64_t block = output / W, at = (block * from.groups() + input / from.group) * W + output % W;
    int64_t offset = packed_offset<bf16>(output % W, input);
    const int64_t vector = offset / (2 * W), lane = offset % (2 * W);
    if constexpr (fours(TYPE)) offset = fours_offset(output % W, input);
    const uint8_t* codes = from.codes + block * from.block_bytes();
    const int code = BITS == 8 ? codes[offset] : codes[vector / 2 * 2 * W + lane] >> (vector % 2 * 4) & 15;
    const float zero = from.zeros == nullptr ? 0.0f : from.zeros[at];
    return (numbers<TYPE>(vi{} + code)[0] - zero) * from.scales[at];
}
