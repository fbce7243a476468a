// Products of 8 by 8 bits, added in fours, by VNNI and by AMX; see `integers.h`.
#pragma once

#include "integer_rows.h"
#include "tiles.h"

namespace {

#ifdef KVRELAY_BYTES
// Adds the products of W times four bytes, of which those of `x` have no sign.
inline vi dot_bytes(vi sums, vi x, vi weights) {
#ifdef __AVX512F__
    return (vi)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)x, (__m512i)weights);
#else
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)x, (__m256i)weights);
#endif
}

// Products of bytes by vectors. Inputs are 128 larger than they should be, because the instruction takes no sign;
// what that adds is taken from the sums.
struct Bytes : ByVectors<Bytes> {
    using A = uint8_t;
    static constexpr int TALLEST = W == 16 ? 12 : 4;
    static constexpr int64_t PREPARED = PREPARED_BYTES;

    static int64_t stride(const LinearArgs& args) { return whole_steps(args.inputs) + LINE; }
    static int64_t prepared_floats(int64_t inputs) { return rows_at_once<Bytes>(inputs) * (whole_steps(inputs) + LINE) / 4; }

    static void prepare(const LinearArgs& args, const float* from, A* to) {
        const float scale = round_row(args, from, [&](int64_t k, vi x) {
            narrow(to + k, x + 128);
        });
        memcpy(to + whole_steps(args.inputs), &scale, sizeof scale);
    }

    template <int M>
    static void tile(const LinearArgs& args, const A* a, int64_t stride, int64_t row, const Pair<uint8_t>& blocks) {
        const int64_t weights = whole_steps(args.inputs) * W;
        vi sums[M][2] = {}, added[2] = {};
        const vi offset = vi{} + (int32_t)0x80808080;
        for (int64_t at = 0; at < weights; at += 4 * W) {
            vi v0, v1;
            memcpy(&v0, blocks.w0 + at, sizeof v0);
            memcpy(&v1, blocks.w1 + at, sizeof v1);
            __builtin_prefetch(blocks.w0 + at + 2048);
            __builtin_prefetch(blocks.w1 + at + 2048);
            added[0] = dot_bytes(added[0], offset, v0);
            added[1] = dot_bytes(added[1], offset, v1);
#pragma GCC unroll 16
            for (int m = 0; m < M; m++) {
                int32_t four;
                memcpy(&four, a + m * stride + at / W, sizeof four);
                sums[m][0] = dot_bytes(sums[m][0], vi{} + four, v0);
                sums[m][1] = dot_bytes(sums[m][1], vi{} + four, v1);
            }
        }
        alignas(64) float found[M][2][W];
        for (int m = 0; m < M; m++) {
            float scale;
            memcpy(&scale, a + m * stride + whole_steps(args.inputs), sizeof scale);
            store(found[m][0], __builtin_convertvector(sums[m][0] - added[0], vf) * scale);
            store(found[m][1], __builtin_convertvector(sums[m][1] - added[1], vf) * scale);
        }
        finish(args, row, M, blocks.b0, blocks.b1, stored(found));
    }
};
#endif

#ifdef KVRELAY_BYTE_TILES
// Products by AMX. WIDE: inputs of 16 bits, 256 * high + low. A prepared row has the high bytes, the low ones, its scale.
template <bool WIDE>
struct ByteTiles : ByTiles<ByteTiles<WIDE>> {
    using A = int8_t;
    static constexpr int TALLEST = 2 * tiles::ROWS;
    static constexpr int64_t PREPARED = 1 << 19;

    static int64_t stride(const LinearArgs& args) { return stride_of(args.inputs); }
    static int64_t prepared_floats(int64_t inputs) { return rows_at_once<ByteTiles>(inputs) * stride_of(inputs) / 4; }

    static void prepare(const LinearArgs& args, const float* from, A* to) {
        A* low = to + whole_steps(args.inputs);
        const float scale = round_row(args, from, [&](int64_t k, vi x) {
            narrow((uint8_t*)to + k, WIDE ? x >> 8 : x);
            if (WIDE) narrow((uint8_t*)low + k, x);
        });
        memcpy(to + scale_at(args.inputs), &scale, sizeof scale);
    }

    static void multiply(
        const LinearArgs& args, const A* a, int64_t stride, int64_t row, int64_t rows, const Pair<uint8_t>& blocks
    ) {
        if (!WIDE && rows <= tiles::ROWS) return tile<1>(args, a, stride, row, rows, blocks);
        if (WIDE && rows > tiles::ROWS) return twice(args, a, stride, row, rows, blocks);
        tile<2>(args, a, stride, row, rows, blocks);
    }

private:
    static int64_t scale_at(int64_t inputs) { return whole_steps(inputs) * (WIDE ? 2 : 1); }
    static int64_t stride_of(int64_t inputs) { return scale_at(inputs) + LINE; }

    // Tiles 4 and 5 are two tiles of rows, or the high and the low bytes of one.
    template <int M>
    static void tile(
        const LinearArgs& args, const A* a, int64_t stride, int64_t row, int64_t rows, const Pair<uint8_t>& blocks
    ) {
        const int64_t inputs = whole_steps(args.inputs);
        const uint8_t *w0 = blocks.w0, *w1 = blocks.w1;
        const A* second = WIDE ? a + inputs : a + tiles::ROWS * stride;
        _tile_zero(0);
        _tile_zero(1);
        if constexpr (M == 2) {
            _tile_zero(2);
            _tile_zero(3);
        }
        Prefetch next = blocks.next;
        for (int64_t k = 0; k < inputs; k += STEP, w0 += STEP * W, w1 += STEP * W) {
            for (int line = 0; line < next.lines; line++, next.at0 += LINE, next.at1 += LINE) {
                __builtin_prefetch(next.at0, 0, 2);
                __builtin_prefetch(next.at1, 0, 2);
            }
            _tile_loadd(6, w0, 64);
            _tile_loadd(7, w1, 64);
            _tile_loadd(4, a + k, stride);
            _tile_dpbssd(0, 4, 6);
            _tile_dpbssd(1, 4, 7);
            if constexpr (M == 2) {
                _tile_loadd(5, second + k, stride);
                if constexpr (WIDE) {
                    _tile_dpbusd(2, 5, 6);
                    _tile_dpbusd(3, 5, 7);
                } else {
                    _tile_dpbssd(2, 5, 6);
                    _tile_dpbssd(3, 5, 7);
                }
            }
        }
        alignas(64) int32_t sums[M][tiles::ROWS][2][W];
        if constexpr (M == 2) {
            store_sums(sums);
        } else {
            _tile_stored(0, sums[0][0][0], sizeof sums[0][0]);
            _tile_stored(1, sums[0][0][1], sizeof sums[0][0]);
        }
        const A* scales = a + scale_at(args.inputs);
        finish(args, row, rows, blocks.b0, blocks.b1, [&](int64_t m, int i) {
            float scale;
            vi high, low;
            memcpy(&scale, scales + m * stride, sizeof scale);
            memcpy(&high, sums[m / tiles::ROWS][m % tiles::ROWS][i], sizeof high);
            if constexpr (!WIDE) return __builtin_convertvector(high, vf) * scale;
            memcpy(&low, sums[1][m][i], sizeof low);
            return joined_bytes(high, low) * scale;
        });
    }

    // Two tiles of rows by all high bytes and then by all low ones, in four tiles of sums. Weights are read from
    // memory in the first pass only, so what the next pair needs is prefetched in both: the tiles hide half of its reading.
    static void twice(
        const LinearArgs& args, const A* a, int64_t stride, int64_t row, int64_t rows, const Pair<uint8_t>& blocks
    ) {
        const int64_t inputs = whole_steps(args.inputs), block = inputs * W;
        // From a block to that of the next pair: pairs are neighbours, or a block of the gate and one of up.
        const int64_t ahead = blocks.w1 == blocks.w0 + block ? 2 * block : block;
        const uint8_t *next0 = blocks.w0 + ahead, *next1 = blocks.w1 + ahead;
        alignas(64) int32_t sums[2][2][tiles::ROWS][2][W];
        for (int low = 0; low < 2; low++) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            const A *first = a + low * inputs, *second = first + tiles::ROWS * stride;
            const uint8_t *w0 = blocks.w0, *w1 = blocks.w1;
            for (int64_t k = 0; k < inputs; k += STEP, w0 += STEP * W, w1 += STEP * W) {
                for (int line = 0; line < STEP * W / LINE / 2; line++, next0 += LINE, next1 += LINE) {
                    __builtin_prefetch(next0, 0, 2);
                    __builtin_prefetch(next1, 0, 2);
                }
                _tile_loadd(6, w0, 64);
                _tile_loadd(7, w1, 64);
                _tile_loadd(4, first + k, stride);
                _tile_loadd(5, second + k, stride);
                if (low) {
                    _tile_dpbusd(0, 4, 6);
                    _tile_dpbusd(1, 4, 7);
                    _tile_dpbusd(2, 5, 6);
                    _tile_dpbusd(3, 5, 7);
                } else {
                    _tile_dpbssd(0, 4, 6);
                    _tile_dpbssd(1, 4, 7);
                    _tile_dpbssd(2, 5, 6);
                    _tile_dpbssd(3, 5, 7);
                }
            }
            store_sums(sums[low]);
        }
        const A* scales = a + scale_at(args.inputs);
        finish(args, row, rows, blocks.b0, blocks.b1, [&](int64_t m, int i) {
            float scale;
            vi high, low;
            memcpy(&scale, scales + m * stride, sizeof scale);
            memcpy(&high, sums[0][m / tiles::ROWS][m % tiles::ROWS][i], sizeof high);
            memcpy(&low, sums[1][m / tiles::ROWS][m % tiles::ROWS][i], sizeof low);
            return joined_bytes(high, low) * scale;
        });
    }

    // The integers 256 high + low, rounded once, from sums of up to 65,536 products.
    static vf joined_bytes(vi high, vi low) {
        const vi carried = high + (low >> 8);
        return joined(carried >> 8, (carried & 255) << 8 | (low & 255));
    }

    // The four tiles of sums.
    static void store_sums(int32_t (&sums)[2][tiles::ROWS][2][W]) {
        _tile_stored(0, sums[0][0][0], sizeof sums[0][0]);
        _tile_stored(1, sums[0][0][1], sizeof sums[0][0]);
        _tile_stored(2, sums[1][0][0], sizeof sums[0][0]);
        _tile_stored(3, sums[1][0][1], sizeof sums[0][0]);
    }
};
#endif

}  // namespace
