#include "linear.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

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

// The position of a call in this order: part `index` of `parts` of the rows, and the pairs of blocks of a panel.
struct Position {
    int64_t index, parts, panel;
};

// Weights that a product prefetches: `lines` cache lines of each of two blocks with every tile of inputs.
struct Prefetch {
    const bf16 *w0, *w1;
    int lines;
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

    // Multiplies `rows` rows, from `row` on, which are prepared at `a`, with blocks `b0` and `b1`.
    static void multiply(
        const LinearArgs& args, const A* a, int64_t stride, int64_t row, int64_t rows, int64_t b0, int64_t b1, Position
    ) {
        static constexpr auto tiles = []<int... M>(std::integer_sequence<int, M...>) {
            return std::array{tile<M + 1>...};
        }(std::make_integer_sequence<int, TALLEST>());
        tiles[rows - 1](args, a, stride, row, b0, b1);
    }

    // Part `index` of `count` rows, which are divided into as few parts as possible.
    static Share part(int64_t count, int64_t index) { return Share(count, index, divide_up(count, TALLEST)); }

private:
    // A row's products are added in the same order for every M, so its result doesn't depend, to the last bit, on the
    // other rows.
    template <int M>
    static void tile(const LinearArgs& args, const A* a, int64_t stride, int64_t row, int64_t b0, int64_t b1) {
        const int64_t pairs = divide_up(args.inputs, 2), block = packed_pairs(args.inputs, args.type) * 2 * W;
        const T* w0 = static_cast<const T*>(args.weight) + b0 * block;
        const T* w1 = static_cast<const T*>(args.weight) + b1 * block;
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
        finish(args, row, M, b0, b1, found);
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
        const LinearArgs& args, const A* a, int64_t stride, int64_t row, int64_t rows, int64_t b0, int64_t b1, Position at
    ) {
        // A single part prefetches its own weights, two tiles ahead. Of several parts, each prefetches its share of the
        // weights of the next panel.
        const int64_t block = packed_pairs(args.inputs, BFLOAT16) * 2 * W;
        const bf16* w0 = static_cast<const bf16*>(args.weight) + b0 * block;
        const bf16* w1 = static_cast<const bf16*>(args.weight) + b1 * block;
        Prefetch next{w0 + 2 * TILE, w1 + 2 * TILE, LINES};
        if (at.parts > 1) {
            next.lines = int(divide_up(LINES, at.parts));
            const int64_t panel = at.panel * block * (args.epilogue == SILU_MUL ? 1 : 2);
            const int64_t done = block / TILE * at.index * next.lines * LINE;
            next.w0 = w0 + panel + done;
            next.w1 = w1 + panel + done;
        }
        if (rows > tiles::ROWS) {
            tile<2>(args, a, stride, row, rows, b0, b1, next);
        } else {
            tile<1>(args, a, stride, row, rows, b0, b1, next);
        }
    }

    static Share part(int64_t count, int64_t index) {
        Share all(count, 0, 1);
        all.begin = index * TALLEST;
        all.end = std::min(count, all.begin + TALLEST);
        return all;
    }

private:
    static constexpr int TILE = tiles::ROWS * tiles::INPUTS, LINE = 32, LINES = TILE / LINE;

    template <int M>
    static void tile(
        const LinearArgs& args, const A* a, int64_t stride, int64_t row, int64_t rows, int64_t b0, int64_t b1, Prefetch next
    ) {
        const int64_t steps = packed_pairs(args.inputs, BFLOAT16) / tiles::PAIRS;
        const bf16* w0 = static_cast<const bf16*>(args.weight) + b0 * steps * TILE;
        const bf16* w1 = static_cast<const bf16*>(args.weight) + b1 * steps * TILE;
        _tile_zero(0);
        _tile_zero(1);
        if constexpr (M == 2) {
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int64_t step = 0; step < steps; step++, a += tiles::INPUTS, w0 += TILE, w1 += TILE) {
            for (int line = 0; line < next.lines; line++, next.w0 += LINE, next.w1 += LINE) {
                __builtin_prefetch(next.w0, 0, 2);
                __builtin_prefetch(next.w1, 0, 2);
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
        finish(args, row, rows, b0, b1, sums);
    }
};
#endif

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

template <class P>
void run(const LinearArgs& args, int thread, int threads) {
    using A = typename P::A;
    [[maybe_unused]] P products;
    const int64_t rows = *args.rows;
    const bool gated = args.epilogue == SILU_MUL;
    // Pairs of blocks: two neighbours, or a block of the gate and the same one of up.
    const int64_t blocks = divide_up(args.outputs, W), pairs = divide_up(blocks, 2);
    const int groups = row_groups(divide_up(rows, P::TALLEST), pairs, threads);
    const Share share(rows, thread % groups, groups), columns(pairs, thread / groups, threads / groups);
    const bool as_is = args.norm == nullptr && std::is_same_v<A, float> && args.inputs % 2 == 0;
    const int64_t most = rows_at_once<P>(args.inputs), prepared_stride = padded(args.inputs);
    const int64_t panel = std::max<int64_t>(1, PANEL_BYTES / (2 * W * args.inputs * (args.type == BFLOAT16 ? 2 : 4)));
    A* prepared = reinterpret_cast<A*>(args.workspace + thread * kvrelay_linear_workspace(args.inputs));
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
        const int64_t parts = divide_up(count, P::TALLEST);
        for (int64_t begin = columns.begin; begin < columns.end; begin += panel) {
            const int64_t end = std::min(begin + panel, columns.end);
            for (int64_t index = 0; index < parts; index++) {
                const Share part = P::part(count, index);
                const A* a = in + part.begin * stride;
                const int64_t row = first + part.begin, height = part.end - part.begin;
                for (int64_t pair = begin; pair < end; pair++) {
                    const int64_t b0 = gated ? pair : 2 * pair;
                    const int64_t b1 = gated ? pair + pairs : std::min(2 * pair + 1, blocks - 1);
                    P::multiply(args, a, stride, row, height, b0, b1, {index, parts, panel});
                }
            }
        }
    }
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

}  // namespace

int64_t kvrelay_packed_bytes(int64_t outputs, int64_t inputs, int32_t type) {
    return round_up(outputs, W) * packed_pairs(inputs, type) * 2 * (type == BFLOAT16 ? 2 : 4);
}

void kvrelay_pack(const void* weight, int64_t outputs, int64_t inputs, int32_t type, void* packed) {
    if (type == BFLOAT16) {
        pack(static_cast<const bf16*>(weight), outputs, inputs, static_cast<bf16*>(packed));
    } else {
        pack(static_cast<const float*>(weight), outputs, inputs, static_cast<float*>(packed));
    }
}

int64_t kvrelay_linear_workspace(int64_t inputs) {
    int64_t floats = rows_at_once<Vectors<float>>(inputs) * padded(inputs);
#ifdef KVRELAY_TILES
    floats = std::max(floats, rows_at_once<Tiles>(inputs) * padded(inputs) / 2);
#endif
    return floats;
}

void kvrelay_linear(const void* raw, int thread, int threads) {
    const LinearArgs& args = *static_cast<const LinearArgs*>(raw);
    if (args.type == FLOAT32) {
        run<Vectors<float>>(args, thread, threads);
#ifdef KVRELAY_TILES
    } else if (tiles::used) {
        run<Tiles>(args, thread, threads);
#endif
    } else {
        run<Vectors<bf16>>(args, thread, threads);
    }
}
