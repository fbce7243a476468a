// The two products of prefill by AMX, for keys and values in bfloat16, or in int8 that is converted to it.
//
// These arrays of a tile have bfloat16 in another layout:
//
//     query    [panels, rows / 2, PANEL, 2]    pairs of dimensions
//     keys     [BLOCK, rows], rows padded to whole registers
//     values   [rows, BLOCK], transposed, because the product sums over keys
//     scores   weights as [BLOCK / 2, PANEL, 2], pairs of keys, each in place of the first of its two rows
#pragma once

#include <array>

#include "attention_prefill.h"
#include "tiles.h"

#ifdef KVRELAY_TILES

struct TileProducts {
    using Registers = tiles::Registers;

    template <typename T>
    static void take(
        const Tile& tile, const Segment<T>* segments, int64_t found, const AttentionShape& shape, int64_t count
    ) {
        const int64_t dim = shape.head_dim, stride = shape.token_stride();
        const int64_t width = round_up(dim, tiles::INPUTS), whole = round_up(count, tiles::INPUTS);
        bf16* keys = as_bf16(tile.keys);
        const T* values[BLOCK];
        [[maybe_unused]] float scales[BLOCK];
        int64_t at = 0;
        for (int64_t i = 0; i < found; i++) {
            const Segment<T>& segment = segments[i];
            for (int64_t k = 0; k < segment.count; k++, at++) {
                const T* key = segment.keys + k * stride;
                bf16* to = keys + at * width;
                if constexpr (scaled<T>) {
                    const float scale = number(segment.key_scales[k * shape.kv_heads]);
                    scales[at] = number(segment.value_scales[k * shape.kv_heads]);
                    int64_t d = 0;
                    for (; d + W <= dim; d += W) store(to + d, load(key + d) * scale);
                    for (; d < dim; d++) ::put(to + d, number(key[d]) * scale);
                } else {
                    memcpy(to, key, dim * sizeof(bf16));
                }
                std::fill_n(to + dim, width - dim, bf16{});
                values[at] = segment.values + k * stride;
            }
        }
        // Rows after the last key get a weight of 0, so they must not be NaN.
        std::fill_n(keys + count * width, (whole - count) * width, bf16{});
        for (int64_t k = 0; k < whole; k += W) {
            for (int64_t d = 0; d < dim; d += W) {
                vf x[W] = {};
                for (int64_t i = 0; i < W && k + i < count; i++) {
                    x[i] = d + W <= dim ? load(values[k + i] + d) : load(values[k + i] + d, dim - d);
                    if constexpr (scaled<T>) x[i] *= scales[k + i];
                }
                transpose(x);
                for (int64_t i = 0; i < W; i++) store(as_bf16(tile.values) + (d + i) * BLOCK + k, x[i]);
            }
        }
    }

    static void put_query(const Tile& tile, int64_t c, int64_t d, const vf* x) {
        float* to = query(tile, c / PANEL) + c % PANEL;
        for (int i = 0; i < W; i += 2) store(to + (d + i) / 2 * PANEL, pairs(x[i], x[i + 1]));
        // A register has more dimensions than a vector: clear the rest.
        if (d + W == tile.rows && tile.rows % tiles::INPUTS) {
            for (int i = 0; i < W; i += 2) store(to + (d + W + i) / 2 * PANEL, vf{});
        }
    }

    template <int N>
    static void score(const Tile& tile, int64_t panel, int64_t dim, int64_t count) {
        const int64_t width = round_up(dim, tiles::INPUTS);
        const float* queries = query(tile, panel);
        for (int64_t k = 0; k < count; k += tiles::ROWS) {
            clear<N>();
            for (int64_t d = 0; d < width; d += tiles::INPUTS) {
                _tile_loadd(3, as_bf16(tile.keys) + k * width + d, width * sizeof(bf16));
                multiply<N>(queries + d / 2 * PANEL, PANEL * sizeof(float));
            }
            put<N>(tile.scores + k * PANEL);
        }
    }

    template <int N>
    static void add(const Tile& tile, int64_t panel, int64_t dim, int64_t count, const vf* scale) {
        const int64_t whole = round_up(count, tiles::INPUTS);
        float* scores = tile.scores;
        for (int64_t k = 0; k < whole; k += 2, scores += 2 * PANEL) {
            for (int n = 0; n < N; n++) {
                const vf first = k < count ? load(scores + n * W) : vf{};
                const vf second = k + 1 < count ? load(scores + PANEL + n * W) : vf{};
                store(scores + n * W, pairs(first, second));
            }
        }
        float* sums = tile.sums + panel * tile.rows * PANEL;
        // After the first keys, the largest score rarely changes.
        bool changed = false;
        for (int n = 0; n < N; n++) changed |= _mm512_cmp_ps_mask((__m512)scale[n], _mm512_set1_ps(1.0f), _CMP_NEQ_UQ);
        for (int64_t i = 0; changed && i < tile.rows; i++) {
            float* row = sums + i * PANEL;
            for (int n = 0; n < N; n++) store(row + n * W, load(row + n * W) * scale[n]);
        }
        for (int64_t d = 0; d < dim; d += tiles::ROWS, sums += tiles::ROWS * PANEL) {
            get<N>(sums);
            for (int64_t k = 0; k < whole; k += tiles::INPUTS) {
                _tile_loadd(3, as_bf16(tile.values) + d * BLOCK + k, BLOCK * sizeof(bf16));
                multiply<N>(tile.scores + k * PANEL, 2 * PANEL * sizeof(float));
            }
            put<N>(sums);
        }
    }

private:
    static bf16* as_bf16(float* array) { return reinterpret_cast<bf16*>(array); }

    // Rows of pairs take half of the array, which leaves space for the second half of the last register.
    static float* query(const Tile& tile, int64_t panel) { return tile.query + panel * tile.rows * PANEL; }

    // Lane i is a[i] and b[i] as bfloat16, a[i] first.
    static vf pairs(vf a, vf b) {
        alignas(64) static constexpr auto order = []() {
            std::array<int16_t, 2 * W> words{};
            for (int i = 0; i < 2 * W; i++) words[i] = i / 2 + i % 2 * W;
            return words;
        }();
        const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
        return (vf)_mm512_permutexvar_epi16(_mm512_load_si512(order.data()), halves);
    }

    // Registers 0 to N - 1 have the sums of N vectors of columns, 3 the left operand, 4 to 3 + N the right operand.
    template <int N>
    static void clear() {
        _tile_zero(0);
        if constexpr (N > 1) _tile_zero(1);
        if constexpr (N > 2) _tile_zero(2);
    }

    template <int N>
    static void get(const float* from) {
        _tile_loadd(0, from, PANEL * sizeof(float));
        if constexpr (N > 1) _tile_loadd(1, from + W, PANEL * sizeof(float));
        if constexpr (N > 2) _tile_loadd(2, from + 2 * W, PANEL * sizeof(float));
    }

    template <int N>
    static void put(float* to) {
        _tile_stored(0, to, PANEL * sizeof(float));
        if constexpr (N > 1) _tile_stored(1, to + W, PANEL * sizeof(float));
        if constexpr (N > 2) _tile_stored(2, to + 2 * W, PANEL * sizeof(float));
    }

    template <int N>
    static void multiply(const float* right, int64_t stride) {
        _tile_loadd(4, right, stride);
        _tile_dpbf16ps(0, 3, 4);
        if constexpr (N > 1) {
            _tile_loadd(5, right + W, stride);
            _tile_dpbf16ps(1, 3, 5);
        }
        if constexpr (N > 2) {
            _tile_loadd(6, right + 2 * W, stride);
            _tile_dpbf16ps(2, 3, 6);
        }
    }
};

#endif
