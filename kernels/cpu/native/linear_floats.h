// Products of float32 and bfloat16, by vectors or by AMX.
#pragma once

#include "linear_run.h"
#include "tiles.h"

namespace {

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
            sums[m][0] = fused(x, b0, sums[m][0]);
            sums[m][1] = fused(x, b1, sums[m][1]);
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

// Products by vectors of T, for up to TALLEST rows and two blocks. The sums stay in registers: with AVX-512 24 of 32, next
// to two of weights and one of input.
template <class T>
struct Vectors : ByVectors<Vectors<T>> {
    using A = Input<T>;
    static constexpr int TALLEST = W == 16 ? 12 : 6;
    static constexpr int64_t PREPARED = 1 << 17;  // numbers of the rows that are prepared at once

    static int64_t stride(const LinearArgs& args) { return padded(args.inputs); }
    static int64_t prepared_floats(int64_t inputs) {
        return round_up(rows_at_once<Vectors>(inputs) * padded(inputs) * sizeof(A) / sizeof(float), LINE / sizeof(float));
    }
    static void prepare(const LinearArgs& args, const float* from, A* to) { ::prepare(args, from, to); }

    // A row's products are added in the same order for every M, so its result doesn't depend, to the last bit, on the
    // other rows.
    template <int M>
    static void tile(const LinearArgs& args, const A* a, int64_t stride, int64_t row, const Pair<T>& blocks) {
        const int64_t pairs = divide_up(args.inputs, 2);
        const T *w0 = blocks.w0, *w1 = blocks.w1;
        vf sums[M][2];
        for (auto& sum : sums) sum[0] = sum[1] = vf{};
        const float* out = args.out + row * args.out_stride;
        const int64_t columns[2] = {blocks.b0 * W, is_gated(args.epilogue) ? blocks.b0 * W : blocks.b1 * W};
        for (int64_t pair = 0; pair < pairs; pair++) {
            // The lines of the results come into the cache meanwhile, one by one: a store would wait for each of them.
            if (pair < 2 * M) __builtin_prefetch(out + pair / 2 * args.out_stride + columns[pair % 2], 1);
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
        finish(args, row, M, blocks.b0, blocks.b1, stored(found));
    }
};

#ifdef KVRELAY_TILES
// Products by AMX: four tiles of sums at a time, of two tiles of rows and two blocks, so that each load is used twice.
// Fewer rows use the same instructions with partly idle tiles. That costs nothing, because a decode step waits for the
// weights, and a row's result doesn't depend, to the last bit, on the other rows.
struct Tiles : ByTiles<Tiles> {
    using A = bf16;
    static constexpr int TALLEST = 2 * tiles::ROWS;
    static constexpr int64_t PREPARED = 1 << 19;

    static int64_t stride(const LinearArgs& args) { return padded(args.inputs); }
    static int64_t prepared_floats(int64_t inputs) {
        return round_up(rows_at_once<Tiles>(inputs) * padded(inputs) * sizeof(A) / sizeof(float), LINE / sizeof(float));
    }
    static void prepare(const LinearArgs& args, const float* from, A* to) { ::prepare(args, from, to); }

    static void multiply(
        const LinearArgs& args, const A* a, int64_t stride, int64_t row, int64_t rows, const Pair<bf16>& blocks
    ) {
        if (rows > tiles::ROWS) {
            tile<2>(args, a, stride, row, rows, blocks);
        } else {
            tile<1>(args, a, stride, row, rows, blocks);
        }
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
        finish(args, row, rows, blocks.b0, blocks.b1, stored(sums));
    }
};
#endif

}  // namespace
