// The frame of all products (linear.h): rows are prepared, weights are opened, panel by panel, and multiplied.
//
// A product P has
//     A, TALLEST, PREPARED    the type of its inputs, the most rows of a part, and the numbers that are prepared at once
//     stride, prepare         of a prepared row
//     prepared_floats         of the workspace
//     part, multiply          the parts of rows, and the product of one with two blocks
// and Weights have
//     panel, open, pair       the pairs of blocks that are opened at once; one of them
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <type_traits>
#include <utility>

#include "linear.h"
#include "simd.h"
#include "team.h"

// Unnamed, as in the other headers of products: two builds in one process must not share a template.
namespace {

// Rows that are multiplied with all blocks of a thread before the next rows: they stay in the L2 cache.
template <class P>
int64_t rows_at_once(int64_t inputs) {
    return std::max<int64_t>(P::TALLEST, P::PREPARED / inputs / P::TALLEST * P::TALLEST);
}

// Numbers from one prepared row to the next: whole tiles of inputs, and one more cache line, so that rows don't begin in
// the same cache sets.
inline int64_t padded(int64_t inputs) { return round_up(inputs, 32) + 32; }

// Bytes of the pairs of blocks that are multiplied with all of these rows before the next pairs; they share the L2 cache
// with the rows. A row's outputs of one such panel are also adjacent; otherwise each cache line would be on another page.
constexpr int64_t PANEL_BYTES = 1 << 18;

// Pairs of blocks of a panel.
inline int64_t panel_pairs(int64_t inputs, int64_t number_bytes) {
    return std::max<int64_t>(1, PANEL_BYTES / (2 * W * inputs * number_bytes));
}

// What a product prefetches: `lines` cache lines of each of two blocks with every tile of inputs.
struct Prefetch {
    const char *at0, *at1;
    int lines;
};

constexpr int64_t LINE = 64;

// The position of a product: part `index` of `parts` of the rows, with panels of `panel` pairs.
struct Position {
    int64_t index, parts, panel;
};

// Two blocks that are multiplied together: their numbers, their weights as products read them, and what to prefetch
// meanwhile.
template <class T>
struct Pair {
    int64_t b0, b1;
    const T *w0, *w1;
    Prefetch next;
};

inline vf silu(vf x) { return x / (exp(-x) + 1.0f); }

// The approximation by tanh: 0.5 x (1 + tanh(u)) = x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3).
inline vf gelu(vf x) { return x / (exp(x * (-1.59576912f - 0.0713548162f * x * x)) + 1.0f); }

// gpt-oss's gate: (up + 1) gate sigmoid(alpha gate), of clamped numbers.
inline vf clamped_gate(const LinearArgs& args, vf gate, vf up) {
    const vf most = splat(args.limit);
    gate = gate > most ? most : gate;
    up = up > most ? most : up < -most ? -most : up;
    return (up + 1.0f) * gate / (exp(-args.alpha * gate) + 1.0f);
}

inline vf gated(const LinearArgs& args, vf gate, vf up) {
    if (args.epilogue == CLAMPED_GATE) return clamped_gate(args, gate, up);
    return (args.epilogue == SILU_MUL ? silu(gate) : gelu(gate)) * up;
}

inline vf activated(const LinearArgs& args, vf y) {
    if (args.epilogue == GELU) return gelu(y);
    const vf positive = y > 0.0f ? y : y * 0.0f;  // NaN stays NaN
    return positive * positive;
}

inline void write(float* out, vf y, int64_t count, bool add) {
    if (count >= W) {
        store(out, add ? load(out) + y : y);
        return;
    }
    for (int64_t i = 0; i < count; i++) out[i] = add ? out[i] + y[i] : y[i];
}

// Stores the products of `rows` rows, from `row` on, with blocks `b0` and `b1`: `sums(m, i)` of row m with block i.
template <class Sums>
inline void finish(const LinearArgs& args, int64_t row, int64_t rows, int64_t b0, int64_t b1, Sums sums) {
    const vf bias0 = args.bias != nullptr ? load(args.bias + b0 * W) : vf{};
    const vf bias1 = args.bias != nullptr ? load(args.bias + b1 * W) : vf{};
    const bool scaled = scaled_last(args);
    const vf scale0 = scaled ? load(args.scales + b0 * W) : splat(1.0f);
    const vf scale1 = scaled ? load(args.scales + b1 * W) : splat(1.0f);
    const int64_t stride = args.out_stride, left0 = args.outputs - b0 * W, left1 = b1 == b0 ? 0 : args.outputs - b1 * W;
    float *out0 = args.out + row * stride + b0 * W, *out1 = args.out + row * stride + b1 * W;
    if (is_gated(args.epilogue)) {
        for (int64_t m = 0; m < rows; m++, out0 += stride) {
            const vf gate = fused(sums(m, 0), scale0, bias0);
            store(out0, gated(args, gate, fused(sums(m, 1), scale1, bias1)));
        }
        return;
    }
    if (args.epilogue == GELU || args.epilogue == RELU_SQUARED) {
        for (int64_t m = 0; m < rows; m++, out0 += stride, out1 += stride) {
            write(out0, activated(args, fused(sums(m, 0), scale0, bias0)), left0, false);
            if (left1 > 0) write(out1, activated(args, fused(sums(m, 1), scale1, bias1)), left1, false);
        }
        return;
    }
    const bool add = args.epilogue == ADD;
    for (int64_t m = 0; m < rows; m++, out0 += stride, out1 += stride) {
        write(out0, fused(sums(m, 0), scale0, bias0), left0, add);
        if (left1 > 0) write(out1, fused(sums(m, 1), scale1, bias1), left1, add);
    }
}

// Sums that are in memory.
inline auto stored(const float (*sums)[2][W]) {
    return [sums](int64_t m, int i) { return load(sums[m][i]); };
}

// Products by vectors: `P::tile<M>` multiplies M rows, up to P::TALLEST.
template <class P>
struct ByVectors {
    // Multiplies `rows` rows, from `row` on, which are prepared at `a`, with two blocks.
    template <class A, class T>
    static void multiply(
        const LinearArgs& args, const A* a, int64_t stride, int64_t row, int64_t rows, const Pair<T>& blocks
    ) {
        static constexpr auto tiles = []<int... M>(std::integer_sequence<int, M...>) {
            return std::array{P::template tile<M + 1>...};
        }(std::make_integer_sequence<int, P::TALLEST>());
        tiles[rows - 1](args, a, stride, row, blocks);
    }

    // Part `index` of `count` rows, which are divided into as few parts as possible.
    static Share part(int64_t count, int64_t index) { return Share(count, index, divide_up(count, P::TALLEST)); }
};

#ifdef KVRELAY_TILES
// Products by AMX.
template <class P>
struct ByTiles {
    tiles::Registers registers;

    // Part `index` of `count` rows: whole tiles, but for the last one.
    static Share part(int64_t count, int64_t index) {
        Share all(count, 0, 1);
        all.begin = index * P::TALLEST;
        all.end = std::min(count, all.begin + P::TALLEST);
        return all;
    }
};
#endif

// The pairs of blocks of a product: two neighbours, or a block of the gate and the same one of up.
struct Order {
    bool gated;
    int64_t blocks, pairs, steps;  // steps: tiles of inputs of a block

    explicit Order(const LinearArgs& args)
        : gated(is_gated(args.epilogue)), blocks(divide_up(args.outputs, W)), pairs(divide_up(blocks, 2)),
          steps(divide_up(args.inputs, tiles::INPUTS)) {}

    int64_t first(int64_t pair) const { return gated ? pair : 2 * pair; }
    int64_t second(int64_t pair) const { return gated ? pair + pairs : std::min(2 * pair + 1, blocks - 1); }

    // In `steps` steps, part `index` of `parts` prefetches its share of the panel of `panel` pairs after this one.
    Prefetch next_panel(const char* at0, const char* at1, int64_t block_bytes, int64_t steps, Position at) const {
        const int64_t lines = divide_up(divide_up(block_bytes / steps, LINE), at.parts);
        const int64_t ahead = at.panel * block_bytes * (gated ? 1 : 2) + steps * at.index * lines * LINE;
        return {at0 + ahead, at1 + ahead, int(lines)};
    }
};

// Copies row `from`, normalized if there is a norm, in the type and with the padding that the products read.
template <class A>
void prepare(const LinearArgs& args, const float* from, A* to) {
    const int64_t inputs = args.inputs, whole = inputs / W * W;
    float scale = 1.0f;
    if (args.norm != nullptr) {
        vf squares[2] = {};
        for (int64_t i = 0; i < whole; i += W) {
            vf x = load(from + i);
            squares[i / W % 2] = fused(x, x, squares[i / W % 2]);
        }
        float total = sum(squares[0] + squares[1]);
        for (int64_t i = whole; i < inputs; i++) total += from[i] * from[i];
        scale = 1.0f / std::sqrt(total / (float)inputs + args.eps);
        for (int64_t i = 0; i < whole; i += W) store(to + i, load(from + i) * scale * load(args.norm + i));
        for (int64_t i = whole; i < inputs; i++) put(to + i, from[i] * scale * args.norm[i]);
    } else {
        for (int64_t i = 0; i < whole; i += W) store(to + i, load(from + i));
        for (int64_t i = whole; i < inputs; i++) put(to + i, from[i]);
    }
    // The padding is multiplied with weights of 0, so it must not be NaN.
    for (int64_t i = inputs; i < round_up(inputs, 32); i++) put(to + i, 0.0f);
}

// Divides threads into a grid of row groups and column groups, so that the largest share is as small as possible. At equal
// shares fewer row groups are better, because each row group reads all weights.
inline int row_groups(int64_t tiles, int64_t blocks, int threads) {
    int best = 1;
    int64_t least = INT64_MAX;
    for (int groups = 1; groups <= threads; groups++) {
        if (threads % groups) continue;
        int64_t columns = threads / groups;
        int64_t share = divide_up(tiles, groups) * divide_up(blocks, columns);
        if (share < least) {
            least = share;
            best = groups;
        }
    }
    return best;
}

template <class P, class Weights>
void run(const LinearArgs& args, const Portion& portion) {
    using A = typename P::A;
    [[maybe_unused]] P products;
    const Order order(args);
    const int64_t rows = portion.rows, most = rows_at_once<P>(args.inputs), prepared_stride = P::stride(args);
    const int thread = portion.thread, threads = portion.threads;
    const int groups = portion.pairs != nullptr ? 1 : row_groups(divide_up(rows, P::TALLEST), order.pairs, threads);
    const Share share(rows, thread % groups, groups);
    const Share columns = portion.pairs != nullptr ? *portion.pairs : Share(order.pairs, thread / groups, threads / groups);
    const bool as_is =
        args.norm == nullptr && args.sources == nullptr && std::is_same_v<A, float> && args.inputs % 2 == 0;
    float* workspace = args.workspace + thread * kvrelay_linear_workspace(args.inputs, args.type);
    A* prepared = reinterpret_cast<A*>(workspace);
    Weights weights(args, order, workspace + P::prepared_floats(args.inputs));
    for (int64_t first = share.begin; first < share.end; first += most) {
        const int64_t count = std::min(most, share.end - first);
        const A* in = prepared;
        int64_t stride = prepared_stride;
        if (as_is) {
            in = reinterpret_cast<const A*>(args.in + first * args.in_stride);
            stride = args.in_stride;
        } else {
            for (int64_t i = 0; i < count; i++) {
                const int64_t source = args.sources == nullptr ? first + i : args.sources[first + i];
                P::prepare(args, args.in + source * args.in_stride, prepared + i * stride);
            }
        }
        const int64_t parts = divide_up(count, P::TALLEST), panel = weights.panel(parts);
        for (int64_t begin = columns.begin; begin < columns.end; begin += panel) {
            const int64_t end = std::min(begin + panel, columns.end);
            weights.open(begin, end);
            for (int64_t index = 0; index < parts; index++) {
                const Share part = P::part(count, index);
                const A* a = in + part.begin * stride;
                const int64_t row = first + part.begin, height = part.end - part.begin;
                for (int64_t pair = begin; pair < end; pair++) {
                    P::multiply(args, a, stride, row, height, weights.pair(pair, {index, parts, panel}));
                }
            }
        }
    }
}

}  // namespace
