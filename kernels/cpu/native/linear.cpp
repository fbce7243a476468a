#include "linear.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "simd.h"
#include "team.h"
#include "tiles.h"
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

// Rows that are taken through all of a thread's blocks before the next ones: they stay in the second-level cache.
int64_t rows_at_once(int64_t inputs, int64_t tallest) {
    return std::max(tallest, (1 << 17) / inputs / tallest * tallest);
}

// Rows lie so far apart that they don't fall into the same sets of the cache; there is room for whole tiles of inputs.
int64_t padded(int64_t inputs) { return (inputs + 15) / 16 * 16 + 16; }

// What a weight is multiplied with: bfloat16 where the CPU has the dot product, else float32.
template <class T>
struct Input {
    using type = float;
};
#if defined(__AVX512BF16__)
template <>
struct Input<bf16> {
    using type = bf16;
};
#endif

// Adds the products of one pair of inputs, for all rows of a tile.
template <int M>
inline void multiply(vf (&sums)[M][2], const float* a, int64_t stride, const float* w0, const float* w1) {
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        vf b0 = load(w0 + i * W), b1 = load(w1 + i * W);
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
#else
template <int M>
inline void multiply(vf (&sums)[M][2], const float* a, int64_t stride, const bf16* w0, const bf16* w1) {
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        vu p0, p1;
        memcpy(&p0, w0, sizeof p0);
        memcpy(&p1, w1, sizeof p1);
        vf b0 = (vf)(i == 0 ? p0 << 16 : p0 & 0xffff0000), b1 = (vf)(i == 0 ? p1 << 16 : p1 & 0xffff0000);
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) {
            vf x = splat(a[m * stride + i]);
            sums[m][0] += x * b0;
            sums[m][1] += x * b1;
        }
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

// Puts a row's products with blocks `b0` and `b1` where they belong.
inline void finish(const LinearArgs& args, int64_t row, int64_t b0, int64_t b1, vf y0, vf y1) {
    if (args.bias != nullptr) {
        y0 += load(args.bias + b0 * W);
        y1 += load(args.bias + b1 * W);
    }
    float* out = args.out + row * args.out_stride;
    if (args.epilogue == SILU_MUL) {
        store(out + b0 * W, silu(y0) * y1);
        return;
    }
    const bool add = args.epilogue == ADD;
    write(out + b0 * W, y0, args.outputs - b0 * W, add);
    if (b1 != b0) write(out + b1 * W, y1, args.outputs - b1 * W, add);
}

// Products by vectors of T: up to TALLEST rows by two blocks, whose sums stay in registers. Of 32 these are 24, beside two
// weights and an input.
template <class T>
struct Vectors {
    using A = typename Input<T>::type;
    static constexpr int TALLEST = W == 16 ? 12 : 6;

    // `rows` of them from `row` on, prepared at `a`, by blocks `b0` and `b1`.
    static void multiply(
        const LinearArgs& args, const A* a, int64_t stride, int64_t row, int64_t rows, int64_t b0, int64_t b1, bool
    ) {
        static constexpr auto tiles = []<int... M>(std::integer_sequence<int, M...>) {
            return std::array{tile<M + 1>...};
        }(std::make_integer_sequence<int, TALLEST>());
        tiles[rows - 1](args, a, stride, row, b0, b1);
    }

    // A part of `count` rows, one of the least number that has to be.
    static Share part(int64_t count, int64_t index) { return Share(count, index, (count + TALLEST - 1) / TALLEST); }

private:
    // Each row's products are added in the same order whatever M is, so that what a row yields doesn't depend, to the
    // last bit, on the rows beside it.
    template <int M>
    static void tile(const LinearArgs& args, const A* a, int64_t stride, int64_t row, int64_t b0, int64_t b1) {
        const int64_t pairs = (args.inputs + 1) / 2, block = packed_pairs(args.inputs, args.type) * 2 * W;
        const T* w0 = static_cast<const T*>(args.weight) + b0 * block;
        const T* w1 = static_cast<const T*>(args.weight) + b1 * block;
        vf sums[M][2];
        for (auto& sum : sums) sum[0] = sum[1] = vf{};
        for (int64_t pair = 0; pair < pairs; pair++) {
            // Ahead by some microseconds of reading, and across pages, where the CPU's own prefetcher stops.
            constexpr int AHEAD = 2048 / sizeof(T), LINE = 64 / sizeof(T);
            for (int line = 0; line < 2 * W; line += LINE) {
                __builtin_prefetch(w0 + AHEAD + line);
                __builtin_prefetch(w1 + AHEAD + line);
            }
            ::multiply<M>(sums, a, stride, w0, w1);
            a += 2;
            w0 += 2 * W;
            w1 += 2 * W;
        }
        for (int m = 0; m < M; m++) finish(args, row + m, b0, b1, sums[m][0], sums[m][1]);
    }
};

#ifdef KVRELAY_TILES
// Products by AMX: four tiles of sums at a time, of two tiles of rows and two blocks, so that what is loaded is used twice.
// Fewer rows take the same instructions, with tiles that are partly idle: a decode step waits for the weights anyway, and
// what a row yields doesn't depend, to the last bit, on the rows beside it.
struct Tiles {
    using A = bf16;
    static constexpr int TALLEST = 2 * tiles::ROWS;

    tiles::Registers registers;

    // `fetch`: the weights aren't in a cache yet.
    static void multiply(
        const LinearArgs& args, const A* a, int64_t stride, int64_t row, int64_t rows, int64_t b0, int64_t b1, bool fetch
    ) {
        if (rows > tiles::ROWS) {
            tile<2>(args, a, stride, row, rows, b0, b1, fetch);
        } else {
            tile<1>(args, a, stride, row, rows, b0, b1, fetch);
        }
    }

    static Share part(int64_t count, int64_t index) {
        Share all(count, 0, 1);
        all.begin = index * TALLEST;
        all.end = std::min(count, all.begin + TALLEST);
        return all;
    }

private:
    template <int M>
    static void tile(
        const LinearArgs& args, const A* a, int64_t stride, int64_t row, int64_t rows, int64_t b0, int64_t b1, bool fetch
    ) {
        constexpr int TILE = tiles::ROWS * tiles::INPUTS;
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
            if (fetch) {
                constexpr int AHEAD = 2 * TILE, LINE = 32;
                for (int line = 0; line < TILE; line += LINE) {
                    __builtin_prefetch(w0 + AHEAD + line);
                    __builtin_prefetch(w1 + AHEAD + line);
                }
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
        for (int64_t m = 0; m < rows; m++) finish(args, row + m, b0, b1, load(sums[m][0]), load(sums[m][1]));
    }
};
#endif

// Row `from`, normed if that is asked for, as the tiles read it.
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
    // What lies behind is multiplied with zeros, and so mustn't be NaN.
    for (int64_t i = inputs; i < (inputs + 31) / 32 * 32; i++) put(to + i, 0.0f);
}

// Threads as a grid of row groups by column groups, so that the fullest share is as small as it gets. At equal shares
// fewer row groups: each of them reads the weights anew.
int row_groups(int64_t tiles, int64_t blocks, int threads) {
    int best = 1;
    int64_t least = INT64_MAX;
    for (int groups = 1; groups <= threads; groups++) {
        if (threads % groups) continue;
        int64_t columns = threads / groups;
        int64_t share = ((tiles + groups - 1) / groups) * ((blocks + columns - 1) / columns);
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
    // Pairs of blocks: two neighbours, or a gate and its up.
    const int64_t blocks = (args.outputs + W - 1) / W, pairs = gated ? blocks / 2 : (blocks + 1) / 2;
    const int groups = row_groups((rows + P::TALLEST - 1) / P::TALLEST, pairs, threads);
    const Share share(rows, thread % groups, groups), columns(pairs, thread / groups, threads / groups);
    const bool as_is = args.norm == nullptr && std::is_same_v<A, float> && args.inputs % 2 == 0;
    const int64_t most = rows_at_once(args.inputs, P::TALLEST), prepared_stride = padded(args.inputs);
    A* prepared = reinterpret_cast<A*>(args.scratch + thread * kvrelay_linear_scratch(args.inputs));
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
        const int64_t parts = (count + P::TALLEST - 1) / P::TALLEST;
        for (int64_t pair = columns.begin; pair < columns.end; pair++) {
            int64_t b0 = gated ? pair : 2 * pair, b1 = gated ? pair + pairs : std::min(2 * pair + 1, blocks - 1);
            for (int64_t index = 0; index < parts; index++) {
                const Share part = P::part(count, index);
                const int64_t height = part.end - part.begin;
                P::multiply(args, in + part.begin * stride, stride, first + part.begin, height, b0, b1, index == 0);
            }
        }
    }
}

template <class T>
void pack(const T* weight, int64_t outputs, int64_t inputs, T* packed) {
    const int64_t blocks = (outputs + W - 1) / W, pairs = packed_pairs(inputs, sizeof(T) == 2 ? BFLOAT16 : FLOAT32);
    for (int64_t block = 0; block < blocks; block++) {
        for (int64_t n = 0; n < W; n++) {
            const int64_t output = block * W + n;
            for (int64_t k = 0; k < 2 * pairs; k++) {
                T value = output < outputs && k < inputs ? weight[output * inputs + k] : T{};
                T* pair = packed + (block * pairs + k / 2) * 2 * W;
                pair[sizeof(T) == 2 ? n * 2 + k % 2 : k % 2 * W + n] = value;
            }
        }
    }
}

}  // namespace

int64_t kvrelay_packed_bytes(int64_t outputs, int64_t inputs, int32_t type) {
    return (outputs + W - 1) / W * W * packed_pairs(inputs, type) * 2 * (type == BFLOAT16 ? 2 : 4);
}

void kvrelay_pack(const void* weight, int64_t outputs, int64_t inputs, int32_t type, void* packed) {
    if (type == BFLOAT16) {
        pack(static_cast<const bf16*>(weight), outputs, inputs, static_cast<bf16*>(packed));
    } else {
        pack(static_cast<const float*>(weight), outputs, inputs, static_cast<float*>(packed));
    }
}

int64_t kvrelay_linear_scratch(int64_t inputs) {
    int64_t floats = rows_at_once(inputs, Vectors<float>::TALLEST) * padded(inputs);
#ifdef KVRELAY_TILES
    floats = std::max(floats, rows_at_once(inputs, Tiles::TALLEST) * padded(inputs) / 2);
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
