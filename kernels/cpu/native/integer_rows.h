// Rows of integers for `integers.h`, and what is done with their sums.
#pragma once

#include <limits>
#include <utility>

#include "codes.h"
#include "linear_run.h"

namespace {

constexpr int64_t STEP = 64;  // inputs of a tile of bytes
constexpr int64_t SMALLEST_GROUP = 16;
constexpr int64_t PREPARED_BYTES = 1 << 18;

inline int64_t whole_steps(int64_t inputs) { return round_up(inputs, STEP); }
inline int64_t groups_of(const LinearArgs& args) { return divide_up(args.inputs, args.group); }

// Products of 16 by 8 bits of so many inputs fit into 32 bits.
constexpr int64_t SECTION = 512;
static_assert(SECTION * 128 * 32767 <= std::numeric_limits<int32_t>::max());

// The largest integer of an input.
inline int64_t largest_input(const LinearArgs& args) { return args.type == INT8_INT8 ? 127 : 32767; }

// The integers 65536 high + low, rounded once; both parts are below 2^24, and so exact as numbers.
inline vf joined(vi high, vi low) {
    return fused(__builtin_convertvector(high, vf), splat(65536.0f), __builtin_convertvector(low, vf));
}

inline vi rounded(vf x) {
#ifdef __AVX512F__
    return (vi)_mm512_cvtps_epi32((__m512)x);
#else
    return (vi)_mm256_cvtps_epi32((__m256)x);
#endif
}

// Stores the low 16, or 8, bits of W integers.
inline void narrow(int16_t* to, vi x) {
#ifdef __AVX512F__
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16((__m512i)x));
#else
    const __m128i low = _mm256_castsi256_si128((__m256i)x), high = _mm256_extracti128_si256((__m256i)x, 1);
    _mm_storeu_si128((__m128i*)to, _mm_packs_epi32(low, high));
#endif
}
inline void narrow(uint8_t* to, vi x) {
#ifdef __AVX512F__
    _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)x));
#else
    const __m256i bytes = (__m256i)(x & 255);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
    _mm_storel_epi64((__m128i*)to, _mm_packus_epi16(words, words));
#endif
}

// Rounds the inputs of a row, normalized if there is a norm, to integers; `put(k, integers)` gets W of them at a time, the
// last ones 0. Returns the row's scale, which is NaN if an input isn't finite.
template <class Put>
float round_row(const LinearArgs& args, const float* from, Put put) {
    const int64_t inputs = args.inputs, whole = inputs / W * W;
    // The last inputs apart: a vector that is filled one by one lives in memory, and so would all others of a loop.
    alignas(64) float last[W] = {}, last_norm[W] = {};
    for (int64_t k = whole; k < inputs; k++) {
        last[k - whole] = from[k];
        last_norm[k - whole] = args.norm != nullptr ? args.norm[k] : 1.0f;
    }
    const auto each = [&](auto use) {
        for (int64_t k = 0; k < whole; k += W) use(k, load(from + k), args.norm != nullptr ? load(args.norm + k) : splat(1.0f));
        if (whole < inputs) use(whole, load(last), load(last_norm));
    };
    // As integers, magnitudes are in the order of the numbers, and all that aren't finite come after those.
    vf squares = {};
    vi most = {};
    each([&](int64_t, vf x, vf norm) {
        squares = fused(x, x, squares);
        const vi magnitude = (vi)(x * norm) & 0x7fffffff;
        most = magnitude > most ? magnitude : most;
    });
    int32_t bits = 0;
    for (int i = 0; i < W; i++) bits = std::max(bits, most[i]);
    if (bits >= 0x7f800000) {
        for (int64_t k = 0; k < whole_steps(inputs); k += W) put(k, vi{});
        return std::numeric_limits<float>::quiet_NaN();
    }
    float largest;
    memcpy(&largest, &bits, sizeof largest);
    const float integers = (float)largest_input(args), factor = largest > 0.0f ? integers / largest : 0.0f;
    each([&](int64_t k, vf x, vf norm) { put(k, rounded(x * norm * factor)); });
    for (int64_t k = round_up(inputs, W); k < whole_steps(inputs); k += W) put(k, vi{});
    const float norm = args.norm == nullptr ? 1.0f : 1.0f / std::sqrt(sum(squares) / (float)inputs + args.eps);
    return largest / integers * norm;
}

// Bytes from the codes of a pair of blocks, of neighbours or of a block of the gate and one of up, to those of a later pair,
// at least 8 KiB away. They are prefetched meanwhile, into the L2 cache: into the L1 cache, which has few requests under
// way, all of a step takes up to a third longer.
inline int64_t later_pair(const Pair<uint8_t>& blocks, int64_t block_bytes) {
    return round_up(1 << 13, blocks.b1 == blocks.b0 + 1 ? 2 * block_bytes : block_bytes);
}

// Codes that are multiplied as they are packed.
class Packed {
public:
    Packed(const LinearArgs& args, const Order& order, float*)
        : order_(order), codes_(static_cast<const uint8_t*>(args.weight)),
          block_(packed_pairs(args.inputs, args.type) * 2 * W * weight_bits(args.type) / 8),
          most_(std::max<int64_t>(1, PANEL_BYTES / (2 * block_))), steps_(whole_steps(args.inputs) / STEP) {}

    int64_t panel(int64_t) const { return most_; }
    void open(int64_t, int64_t) {}

    Pair<uint8_t> pair(int64_t pair, Position at) const {
        const int64_t b0 = order_.first(pair), b1 = order_.second(pair);
        const uint8_t *w0 = codes_ + b0 * block_, *w1 = codes_ + b1 * block_;
        const char *at0 = reinterpret_cast<const char*>(w0), *at1 = reinterpret_cast<const char*>(w1);
        if (at.parts > 1) return {b0, b1, w0, w1, order_.next_panel(at0, at1, block_, steps_, at)};
        return {b0, b1, w0, w1, {at0 + 2 * tile_, at1 + 2 * tile_, int(tile_ / LINE)}};
    }

private:
    Order order_;
    const uint8_t* codes_;
    int64_t block_, most_;
    int64_t steps_, tile_ = STEP * W;  // bytes of int8 for the inputs of a tile
};

}  // namespace
