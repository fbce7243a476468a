#include "linear.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "codes.h"
#include "simd.h"
#include "team.h"
#include "tiles.h"

namespace {

// Rows that are multiplied with all blocks of a thread before the next rows: they stay in the L2 cache.
template <class P>
int64_t rows_at_once(int64_t inputs) {
    return std::max<int64_t>(P::TALLEST, P::PREPARED / inputs / P::TALLEST * P::TALLEST);
}

// Numbers from one prepared row to the next: whole tiles of inputs, and one more cache line, so that rows don't begin in
// the same cache sets.
int64_t padded(int64_t inputs) { return round_up(inputs, 32) + 32; }

// Bytes of the pairs of blocks that are multiplied with all of these rows before the next pairs; they share the L2 cache
// with the rows. A row's outputs of one such panel are also adjacent; otherwise each cache line would be on another page.
constexpr int64_t PANEL_BYTES = 1 << 18;

// Pairs of blocks of a panel.
int64_t panel_pairs(int64_t inputs, int64_t number_bytes) {
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

// The type of inputs: bfloat16 if weights are and the CPU has the dot product, else float32.
#if defined(__AVX512BF16__)
template <class T>
using Input = T;
#else
template <class T>
using Input = float;
#endif

// Weights of input `i` of a pair, for W outputs.
inline vf weights(const float* w, int i) { return load(w + i * W); }
inline vf weights(const bf16* w, int i) {
    vu pairs;
    memcpy(&pairs, w, sizeof pairs);
    return (vf)(i == 0 ? pairs << 16 : pairs & 0xffff0000);
}

// Adds the products of one pair of inputs, for all rows of a tile.
template <int M, class T>
inline void multiply(vf (&sums)[M][2], const float* a, int64_t stride, const T* w0, const T* w1) {
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        vf b0 = weights(w0, i), b1 = weights(w1, i);
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) {
            vf x = splat(a[m * stride + i]);
            sums[m][0] += x * b0;
            sums[m][1] += x * b1;
        }
    }
}

#if defined(__AVX512BF16__)
template <int M>
inline void multiply(vf (&sums)[M][2], const bf16* a, int64_t stride, const bf16* w0, const bf16* w1) {
    __m512bh b0 = (__m512bh)_mm512_loadu_si512(w0), b1 = (__m512bh)_mm512_loadu_si512(w1);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
        int32_t pair;
        memcpy(&pair, a + m * stride, sizeof pair);
        __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
        sums[m][0] = (vf)_mm512_dpbf16_ps((__m512)sums[m][0], b0, x);
        sums[m][1] = (vf)_mm512_dpbf16_ps((__m512)sums[m][1], b1, x);
    }
}
#endif

inline vf silu(vf x) { return x / (exp(-x) + 1.0f); }

inline void write(float* out, vf y, int64_t count, bool add) {
    if (count >= W) {
        store(out, add ? load(out) + y : y);
        return;
    }
    for (int64_t i = 0; i < count; i++) out[i] = add ? out[i] + y[i] : y[i];
}

// Stores the products of `rows` rows, from `row` on, with blocks `b0` and `b1`.
inline void finish(const LinearArgs& args, int64_t row, int64_t rows, int64_t b0, int64_t b1, const float (*sums)[2][W]) {
    const vf bias0 = args.bias != nullptr ? load(args.bias + b0 * W) : vf{};
    const vf bias1 = args.bias != nullptr ? load(args.bias + b1 * W) : vf{};
    const int64_t stride = args.out_stride, left0 = args.outputs - b0 * W, left1 = b1 == b0 ? 0 : args.outputs - b1 * W;
    float *out0 = args.out + row * stride + b0 * W, *out1 = args.out + row * stride + b1 * W;
    if (args.epilogue == SILU_MUL) {
        for (int64_t m = 0; m < rows; m++, out0 += stride) {
            store(out0, silu(load(sums[m][0]) + bias0) * (load(sums[m][1]) + bias1));
        }
        return;
    }
    const bool add = args.epilogue == ADD;
    for (int64_t m = 0; m < rows; m++, out0 += stride, out1 += stride) {
        write(out0, load(sums[m][0]) + bias0, left0, add);
        if (left1 > 0) write(out1, load(sums[m][1]) + bias1, left1, add);
    }
}

// Products by vectors of T, for up to TALLEST rows and two blocks. The sums stay in registers: with AVX-512 24 of 32, next
// to two of weights and one of input.
template <class T>
struct Vectors {
    using A = Input<T>;
    static constexpr int TALLEST = W == 16 ? 12 : 6;
    static constexpr int64_t PREPARED = 1 << 17;  // numbers of the rows that are prepared at once

    // Multiplies `rows` rows, from `row` on, which are prepared at `a`, with two blocks.
    static void multiply(
        const LinearArgs& args, const A* a, int64_t stride, int64_t row, int64_t rows, const Pair<T>& blocks
    ) {
        static constexpr auto tiles = []<int... M>(std::integer_sequence<int, M...>) {
            return std::array{tile<M + 1>...};
        }(std::make_integer_sequence<int, TALLEST>());
        tiles[rows - 1](args, a, stride, row, blocks);
    }

    // Part `index` of `count` rows, which are divided into as few parts as possible.
    static Share part(int64_t count, int64_t index) { return Share(count, index, divide_up(count, TALLEST)); }

private:
    // A row's products are added in the same order for every M, so its result doesn't depend, to the last bit, on the
    // other rows.
    template <int M>
    static void tile(const LinearArgs& args, const A* a, int64_t stride, int64_t row, const Pair<T>& blocks) {
        const int64_t pairs = divide_up(args.inputs, 2);
        const T *w0 = blocks.w0, *w1 = blocks.w1;
        vf sums[M][2];
        for (auto& sum : sums) sum[0] = sum[1] = vf{};
        for (int64_t pair = 0; pair < pairs; pair++) {
            // 2 KiB ahead, also across pages, where the CPU's own prefetcher stops.
            constexpr int DISTANCE = 2048 / sizeof(T), LINE = 64 / sizeof(T);
            for (int line = 0; line < 2 * W; line += LINE) {
                __builtin_prefetch(w0 + DISTANCE + line);
                __builtin_prefetch(w1 + DISTANCE + line);
            }
            ::multiply<M>(sums, a, stride, w0, w1);
            a += 2;
            w0 += 2 * W;
            w1 += 2 * W;
        }
        alignas(64) float found[M][2][W];
        for (int m = 0; m < M; m++) {
            store(found[m][0], sums[m][0]);
            store(found[m][1], sums[m][1]);
        }
        finish(args, row, M, blocks.b0, blocks.b1, found);
    }
};

#ifdef KVRELAY_TILES
// Products by AMX: four tiles of sums at a time, of two tiles of rows and two blocks, so that each load is used twice.
// Fewer rows use the same instructions with partly idle tiles. That costs nothing, because a decode step waits for the
// weights, and a row's result doesn't depend, to the last bit, on the other rows.
struct Tiles {
    using A = bf16;
    static constexpr int TALLEST = 2 * tiles::ROWS;
    static constexpr int64_t PREPARED = 1 << 19;

    tiles::Registers registers;

    static void multiply(
        const LinearArgs& args, const A* a, int64_t stride, int64_t row, int64_t rows, const Pair<bf16>& blocks
    ) {
        if (rows > tiles::ROWS) {
            tile<2>(args, a, stride, row, rows, blocks);
        } else {
            tile<1>(args, a, stride, row, rows, blocks);
        }
    }

    static Share part(int64_t count, int64_t index) {
        Share all(count, 0, 1);
        all.begin = index * TALLEST;
        all.end = std::min(count, all.begin + TALLEST);
        return all;
    }

private:
    static constexpr int TILE = tiles::ROWS * tiles::INPUTS;

    template <int M>
    static void tile(
        const LinearArgs& args, const A* a, int64_t stride, int64_t row, int64_t rows, const Pair<bf16>& blocks
    ) {
        const int64_t steps = packed_pairs(args.inputs, BFLOAT16) / tiles::PAIRS;
        const bf16 *w0 = blocks.w0, *w1 = blocks.w1;
        Prefetch next = blocks.next;
        _tile_zero(0);
        _tile_zero(1);
        if constexpr (M == 2) {
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int64_t step = 0; step < steps; step++, a += tiles::INPUTS, w0 += TILE, w1 += TILE) {
            for (int line = 0; line < next.lines; line++, next.at0 += LINE, next.at1 += LINE) {
                __builtin_prefetch(next.at0, 0, 2);
                __builtin_prefetch(next.at1, 0, 2);
            }
            _tile_loadd(6, w0, 64);
            _tile_loadd(7, w1, 64);
            _tile_loadd(4, a, 2 * stride);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if constexpr (M == 2) {
                _tile_loadd(5, a + tiles::ROWS * stride, 2 * stride);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        alignas(64) float sums[M * tiles::ROWS][2][W];
        _tile_stored(0, sums[0][0], sizeof sums[0]);
        _tile_stored(1, sums[0][1], sizeof sums[0]);
        if constexpr (M == 2) {
            _tile_stored(2, sums[tiles::ROWS][0], sizeof sums[0]);
            _tile_stored(3, sums[tiles::ROWS][1], sizeof sums[0]);
        }
        finish(args, row, rows, blocks.b0, blocks.b1, sums);
    }
};
#endif

// The pairs of blocks of a product: two neighbours, or a block of the gate and the same one of up.
struct Order {
    bool gated;
    int64_t blocks, pairs, steps;  // steps: tiles of inputs of a block

    explicit Order(const LinearArgs& args)
        : gated(args.epilogue == SILU_MUL), blocks(divide_up(args.outputs, W)), pairs(divide_up(blocks, 2)),
          steps(divide_up(args.inputs, tiles::INPUTS)) {}

    int64_t first(int64_t pair) const { return gated ? pair : 2 * pair; }
    int64_t second(int64_t pair) const { return gated ? pair + pairs : std::min(2 * pair + 1, blocks - 1); }

    // Part `index` of `parts` prefetches its share of the panel of `panel` pairs after this one.
    Prefetch next_panel(const char* at0, const char* at1, int64_t block_bytes, Position at) const {
        const int64_t lines = divide_up(divide_up(block_bytes / steps, LINE), at.parts);
        const int64_t ahead = at.panel * block_bytes * (gated ? 1 : 2) + steps * at.index * lines * LINE;
        return {at0 + ahead, at1 + ahead, int(lines)};
    }
};

// Weights that are multiplied as they are packed.
template <class T>
class Dense {
public:
    using Number = T;

    Dense(const LinearArgs& args, const Order& order, bf16*)
        : order_(order), weights_(static_cast<const T*>(args.weight)),
          block_(packed_pairs(args.inputs, args.type) * 2 * W), most_(panel_pairs(args.inputs, sizeof(T))) {}

    // Pairs of a panel, if the rows are taken in so many parts.
    int64_t panel(int64_t) const { return most_; }

    void open(int64_t, int64_t) {}

    // A single part prefetches its own weights, two tiles ahead.
    Pair<T> pair(int64_t pair, Position at) const {
        const int64_t b0 = order_.first(pair), b1 = order_.second(pair);
        const T *w0 = weights_ + b0 * block_, *w1 = weights_ + b1 * block_;
        const char *at0 = reinterpret_cast<const char*>(w0), *at1 = reinterpret_cast<const char*>(w1);
        const int64_t bytes = block_ * int64_t{sizeof(T)}, tile = bytes / order_.steps;
        if (at.parts > 1) return {b0, b1, w0, w1, order_.next_panel(at0, at1, bytes, at)};
        return {b0, b1, w0, w1, {at0 + 2 * tile, at1 + 2 * tile, int(tile / LINE)}};
    }

private:
    Order order_;
    const T* weights_;
    int64_t block_, most_;
};

// Weights that are decoded into `panel` first.
template <WeightType TYPE>
class Coded {
public:
    using Number = bf16;

    Coded(const LinearArgs& args, const Order& order, bf16* panel)
        : order_(order), codes_{static_cast<const uint8_t*>(args.weight), args.scales, args.zeros, args.inputs, args.group, TYPE},
          block_(packed_pairs(args.inputs, TYPE) * 2 * W), most_(panel_pairs(args.inputs, sizeof(bf16))), panel_(panel) {}

    // With one part nothing is multiplied twice, so a pair is enough, and stays in the L1 cache.
    int64_t panel(int64_t parts) const { return parts == 1 ? 1 : most_; }

    void open(int64_t begin, int64_t end) {
        begin_ = begin;
        for (int64_t pair = begin; pair < end; pair++) {
            decode<TYPE>(codes_, order_.first(pair), decoded(pair, 0));
            decode<TYPE>(codes_, order_.second(pair), decoded(pair, 1));
        }
    }

    Pair<bf16> pair(int64_t pair, Position at) const {
        const int64_t b0 = order_.first(pair), b1 = order_.second(pair), bytes = codes_.block_bytes();
        const char* codes = reinterpret_cast<const char*>(codes_.codes);
        const Prefetch next = order_.next_panel(codes + b0 * bytes, codes + b1 * bytes, bytes, at);
        return {b0, b1, decoded(pair, 0), decoded(pair, 1), next};
    }

private:
    bf16* decoded(int64_t pair, int which) const { return panel_ + ((pair - begin_) * 2 + which) * block_; }

    Order order_;
    Codes codes_;
    int64_t block_, most_, begin_ = 0;
    bf16* panel_;
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
            squares[i / W % 2] += x * x;
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
int row_groups(int64_t tiles, int64_t blocks, int threads) {
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

// Floats for the rows that are prepared at once, of any type, and for a panel.
int64_t prepared_floats(int64_t inputs) {
    int64_t floats = rows_at_once<Vectors<float>>(inputs) * padded(inputs);
#ifdef KVRELAY_TILES
    floats = std::max(floats, rows_at_once<Tiles>(inputs) * padded(inputs) / 2);
#endif
    return round_up(floats, LINE / sizeof(float));
}

template <class P, class Weights>
void run(const LinearArgs& args, int thread, int threads) {
    using A = typename P::A;
    [[maybe_unused]] P products;
    const Order order(args);
    const int64_t rows = *args.rows, most = rows_at_once<P>(args.inputs), prepared_stride = padded(args.inputs);
    const int groups = row_groups(divide_up(rows, P::TALLEST), order.pairs, threads);
    const Share share(rows, thread % groups, groups), columns(order.pairs, thread / groups, threads / groups);
    const bool as_is = args.norm == nullptr && std::is_same_v<A, float> && args.inputs % 2 == 0;
    float* workspace = args.workspace + thread * kvrelay_linear_workspace(args.inputs, args.type);
    A* prepared = reinterpret_cast<A*>(workspace);
    Weights weights(args, order, reinterpret_cast<bf16*>(workspace + prepared_floats(args.inputs)));
    for (int64_t first = share.begin; first < share.end; first += most) {
        const int64_t count = std::min(most, share.end - first);
        const A* in = prepared;
        int64_t stride = prepared_stride;
        if (as_is) {
            in = reinterpret_cast<const A*>(args.in + first * args.in_stride);
            stride = args.in_stride;
        } else {
            for (int64_t i = 0; i < count; i++) {
                prepare(args, args.in + (first + i) * args.in_stride, prepared + i * stride);
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

template <class Weights>
void run_bf16(const LinearArgs& args, int thread, int threads) {
#ifdef KVRELAY_TILES
    if (tiles::used) return run<Tiles, Weights>(args, thread, threads);
#endif
    run<Vectors<bf16>, Weights>(args, thread, threads);
}

template <class T>
void pack(const T* weight, int64_t outputs, int64_t inputs, T* packed) {
    const int64_t padded_inputs = 2 * packed_pairs(inputs, sizeof(T) == 2 ? BFLOAT16 : FLOAT32);
    for (int64_t output = 0; output < round_up(outputs, W); output++) {
        T* block = packed + output / W * W * padded_inputs;
        for (int64_t k = 0; k < padded_inputs; k++) {
            block[packed_offset<T>(output % W, k)] = output < outputs && k < inputs ? weight[output * inputs + k] : T{};
        }
    }
}

void pack_codes(const uint8_t* codes, int64_t outputs, int64_t inputs, int bits, uint8_t* packed) {
    const int64_t padded_inputs = 2 * packed_pairs(inputs, INT8);
    memset(packed, 0, round_up(outputs, W) * padded_inputs * bits / 8);
    for (int64_t output = 0; output < outputs; output++) {
        uint8_t* block = packed + output / W * W * padded_inputs * bits / 8;
        for (int64_t k = 0; k < inputs; k++) {
            const uint8_t code = codes[output * inputs + k];
            const int64_t offset = packed_offset<bf16>(output % W, k), vector = offset / (2 * W);
            if (bits == 8) {
                block[offset] = code;
            } else {
                block[vector / 2 * 2 * W + offset % (2 * W)] |= (code & 15) << (vector % 2 * 4);
            }
        }
    }
}

}  // namespace

int32_t kvrelay_block_outputs() { return W; }

int64_t kvrelay_packed_bytes(int64_t outputs, int64_t inputs, int32_t type) {
    return round_up(outputs, W) * packed_pairs(inputs, type) * 2 * weight_bits(type) / 8;
}

void kvrelay_pack(const void* weight, int64_t outputs, int64_t inputs, int32_t type, void* packed) {
    if (type == FLOAT32) {
        pack(static_cast<const float*>(weight), outputs, inputs, static_cast<float*>(packed));
    } else if (type == BFLOAT16) {
        pack(static_cast<const bf16*>(weight), outputs, inputs, static_cast<bf16*>(packed));
    } else {
        pack_codes(static_cast<const uint8_t*>(weight), outputs, inputs, weight_bits(type), static_cast<uint8_t*>(packed));
    }
}

int64_t kvrelay_linear_workspace(int64_t inputs, int32_t type) {
    const int64_t floats = prepared_floats(inputs);
    if (weight_bits(type) > 8) return floats;
    return floats + panel_pairs(inputs, sizeof(bf16)) * 2 * packed_pairs(inputs, type) * 2 * W / 2;
}

void kvrelay_linear(const void* raw, int thread, int threads) {
    const LinearArgs& args = *static_cast<const LinearArgs*>(raw);
    switch (args.type) {
        case FLOAT32: return run<Vectors<float>, Dense<float>>(args, thread, threads);
        case BFLOAT16: return run_bf16<Dense<bf16>>(args, thread, threads);
        case INT8: return run_bf16<Coded<INT8>>(args, thread, threads);
        case INT4: return run_bf16<Coded<INT4>>(args, thread, threads);
        case FLOAT8: return run_bf16<Coded<FLOAT8>>(args, thread, threads);
        case FLOAT4: return run_bf16<Coded<FLOAT4>>(args, thread, threads);
    }
}
