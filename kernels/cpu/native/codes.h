// Weights of 4 or 8 bits, and their decoding. value = (number of the code - zero) * scale, where scale and zero belong to
// one output and `group` consecutive inputs.
//
// The codes of a block are in the order of bfloat16 weights (linear.h): a vector is a pair of inputs for W outputs, 2 W
// codes. With 4 bits, the low halves of 2 W bytes are one such vector and the high halves are the next one.
//
//     codes   [block][pair of inputs][output in block][input in pair]
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

// W codes of 8 bits.
inline vi load_codes(const uint8_t* p) {
    typedef uint8_t vb __attribute__((vector_size(W)));
    vb bytes;
    memcpy(&bytes, p, W);
    return __builtin_convertvector(bytes, vi);
}

// For each output of a block twice, one after the other, as the two inputs of a pair need them.
inline void twice(vf x, vf (&halves)[2]) {
    for (int i = 0; i < W; i++) {
        halves[0][i] = x[i / 2];
        halves[1][i] = x[W / 2 + i / 2];
    }
}

// Decodes block `block`, and prefetches 2 KiB ahead.
template <WeightType TYPE>
void decode(const Codes& from, int64_t block, bf16* out) {
    constexpr int BITS = weight_bits(TYPE), VECTORS = 8 / BITS, AHEAD = 2048;
    const int64_t pairs = packed_pairs(from.inputs, TYPE), groups = from.groups();
    const uint8_t* codes = from.codes + block * from.block_bytes();
    for (int64_t group = 0; group < groups; group++) {
        const int64_t at = (block * groups + group) * W;
        vf scales[2], zeros[2] = {};
        twice(load(from.scales + at), scales);
        if (from.zeros != nullptr) twice(__builtin_convertvector(load_codes(from.zeros + at), vf), zeros);
        const int64_t end = group + 1 < groups ? (group + 1) * from.group / 2 : pairs;
        for (int64_t pair = group * from.group / 2; pair < end; pair += VECTORS, codes += 2 * W) {
            __builtin_prefetch(codes + AHEAD);
            for (int half = 0; half < 2; half++) {
                const vi bytes = load_codes(codes + half * W);
                for (int i = 0; i < VECTORS; i++, out += 2 * W) {
                    const vi code = BITS == 8 ? bytes : i == 0 ? bytes & 15 : bytes >> 4;
                    store(out + half * W, (numbers<TYPE>(code) - zeros[half]) * scales[half]);
                }
                out -= VECTORS * 2 * W;
            }
            out += VECTORS * 2 * W;
        }
    }
}

// The value of one weight.
template <WeightType TYPE>
float decode_one(const Codes& from, int64_t output, int64_t input) {
    constexpr int BITS = weight_bits(TYPE);
    const int64_t block = output / W, at = (block * from.groups() + input / from.group) * W + output % W;
    const int64_t offset = packed_offset<bf16>(output % W, input), vector = offset / (2 * W), lane = offset % (2 * W);
    const uint8_t* codes = from.codes + block * from.block_bytes();
    const int code = BITS == 8 ? codes[offset] : codes[vector / 2 * 2 * W + lane] >> (vector % 2 * 4) & 15;
    const float zero = from.zeros == nullptr ? 0.0f : from.zeros[at];
    return (numbers<TYPE>(vi{} + code)[0] - zero) * from.scales[at];
}
