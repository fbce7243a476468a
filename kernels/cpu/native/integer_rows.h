// Rows of integers for `integers.h`, and what is done with their sums.
#pragma once

#include <limits>
#include <utility>

#include "codes.h"
#include "linear_run.h"

namespace {

constexpr int64_t STEP = 64;  // inputs of a tile of bytes
constexpr int64_t PREPARED_BYTES = 1 << 18;

inline int64_t whole_steps(int64_t inputs) { return round_up(inputs, STEP); }
inline int64_t groups_of(const LinearArgs& args) { return divide_up(args.inputs, args.group); }

// The largest integer of an input, so that no sum of a group passes 32 bits.
inline int64_t largest_input(const LinearArgs& args) {
    if (args.type == INT8_INT8) return 127;
    const int64_t weight = args.type == INT8 ? 128 : 16;
    const int64_t most = std::numeric_limits<int32_t>::max() / (weight * whole_steps(std::min(args.group, args.inputs)));
    return std::min<int64_t>(most, std::numeric_limits<int16_t>::max());
}

inline vi rounded(vf x) {
#ifdef __AVX512F__
    return (vi)_mm512_cvtps_epi32((__m512)x);
#else
    return (vi)_mm256_cvtps_epi32((__m256)x);
#endif
}

// Rounds the inputs of a row, normalized if there is a norm, to integers; `put(k, integers)` gets W of them at a time, the
// last ones 0. Returns the row's scale, which is NaN if an input isn't finite.
template <class Put>
float round_row(const LinearArgs& args, const float* from, Put put) {
    const int64_t inputs = args.inputs, whole = inputs / W * W;
    const auto at = [&](int64_t k) {
        vf x = {}, norm = splat(1.0f);
        if (k < whole) {
            x = load(from + k);
            if (args.norm != nullptr) norm = load(args.norm + k);
        } else {
            for (int64_t i = k; i < inputs; i++) {
                x[i - k] = from[i];
                if (args.norm != nullptr) norm[i - k] = args.norm[i];
            }
        }
        return std::pair{x, x * norm};
    };
    vf squares = {}, most = {}, odd = {};
    for (int64_t k = 0; k < inputs; k += W) {
        const auto [x, y] = at(k);
        squares += x * x;
        most = larger(larger(most, y), -y);
        odd += y - y;  // 0 for finite numbers
    }
    float largest = 0.0f;
    for (int i = 0; i < W; i++) largest = std::max(largest, most[i]);
    const float integers = (float)largest_input(args), factor = largest > 0.0f ? integers / largest : 0.0f;
    for (int64_t k = 0; k < whole_steps(inputs); k += W) {
        put(k, k < inputs ? rounded(at(k).second * factor) : vi{});
    }
    const float norm = args.norm == nullptr ? 1.0f : 1.0f / std::sqrt(sum(squares) / (float)inputs + args.eps);
    return sum(odd) == 0.0f ? largest / integers * norm : std::numeric_limits<float>::quiet_NaN();
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
