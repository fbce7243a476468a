// Weights of 4 or 8 bits, and their decoding. value = (number of the code - zero) * scale + minimum, where scale,
// zero and minimum belong to one output and `group` consecutive inputs.
//
// The codes of a block have four inputs of an output side by side, as products of bytes take them. A vector is four inputs
// of W outputs, 4 W codes. With 4 bits, the low halves of 4 W bytes are one such vector and the high halves are the next one.
//
//     codes   [block][four inputs][output in block][input in four]
//     scales  [block][group][output in block]                          float32
//     zeros   [block][group][output in block]                          uint8, or none: 0
//     minima  [block][group][output in block]                          float32, or none: 0; not with zeros
#pragma once

#include "linear.h"

struct Codes {
    const uint8_t* codes;
    const float* scales;
    const uint8_t* zeros;  // null: 0
    const float* minima;   // null: 0
    int64_t inputs;
    int64_t group;  // inputs; a multiple of the inputs of a tile, or 16 with INT8
    WeightType type;

    // Whether an output has one scale, and neither zero nor minimum: its products are scaled, not its weights.
    bool whole() const { return group >= inputs && zeros == nullptr && minima == nullptr; }
    int64_t groups() const { return divide_up(inputs, group); }
    int64_t block_bytes() const { return packed_pairs(inputs, type) * 2 * W * weight_bits(type) / 8; }
};

// The place within a block of the code of output n and input k.
struct CodePlace {
    int64_t byte;
    int shift;

    CodePlace(int64_t n, int64_t k, int bits) {
        const int64_t vector = k / 4, lane = n * 4 + k % 4;
        byte = (bits == 8 ? vector : vector / 2) * 4 * W + lane;
        shift = bits == 8 ? 0 : int(vector % 2) * 4;
    }
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

// Decodes codes up to `end` to pairs of bfloat16, as linear.h has them.
template <WeightType TYPE, class Convert>
inline bf16* decode_run(const uint8_t* codes, const uint8_t* end, bf16* out, Convert convert) {
    constexpr int AHEAD = 2048;
    const auto decode_pair = [&](vi first, vi second) {
        store_pairs(out, convert(numbers<TYPE>(first)), convert(numbers<TYPE>(second)));
        out += 2 * W;
    };
    for (; codes < end; codes += 4 * W) {
        __builtin_prefetch(codes + AHEAD);
        vu fours;
        memcpy(&fours, codes, sizeof fours);
        if constexpr (weight_bits(TYPE) == 8) {
            decode_pair((vi)(fours & 255), (vi)(fours >> 8 & 255));
            decode_pair((vi)(fours >> 16 & 255), (vi)(fours >> 24));
        } else {
            decode_pair((vi)(fours & 15), (vi)(fours >> 8 & 15));
            decode_pair((vi)(fours >> 16 & 15), (vi)(fours >> 24 & 15));
            decode_pair((vi)(fours >> 4 & 15), (vi)(fours >> 12 & 15));
            decode_pair((vi)(fours >> 20 & 15), (vi)(fours >> 28));
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
        decode_run<TYPE>(codes, end, out, [](vf x) { return x; });
        return;
    }
    for (int64_t group = 0; group < groups; group++) {
        const int64_t at = (block * groups + group) * W;
        const uint8_t* last = group + 1 < groups ? codes + group_bytes : end;
        const vf scale = load(from.scales + at);
        if (from.minima != nullptr) {
            const vf minimum = load(from.minima + at);
            out = decode_run<TYPE>(codes, last, out, [&](vf x) { return fused(x, scale, minimum); });
        } else if (from.zeros == nullptr) {
            out = decode_run<TYPE>(codes, last, out, [&](vf x) { return x * scale; });
        } else {
            const vf shift = __builtin_convertvector(load_codes(from.zeros + at), vf) * scale;
            out = decode_run<TYPE>(codes, last, out, [&](vf x) { return fused(x, scale, -shift); });
        }
        codes = last;
    }
}

// The value of one weight.
template <WeightType TYPE>
float decode_one(const Codes& from, int64_t output, int64_t input) {
    constexpr int BITS = weight_bits(TYPE);
    const int64_t block = output / W, at = (block * from.groups() + input / from.group) * W + output % W;
    const CodePlace place(output % W, input, BITS);
    const int code = from.codes[block * from.block_bytes() + place.byte] >> place.shift & ((1 << BITS) - 1);
    const float zero = from.zeros == nullptr ? 0.0f : from.zeros[at];
    const float minimum = from.minima == nullptr ? 0.0f : from.minima[at];
    return (numbers<TYPE>(vi{} + code)[0] - zero) * from.scales[at] + minimum;
}
