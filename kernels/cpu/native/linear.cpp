#include "linear.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "simd.h"
#include "team.h"
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

// A tile is up to TALLEST rows by two blocks; its sums stay in registers. Of 32 these are 24, beside two weights and an
// input.
constexpr int TALLEST = W == 16 ? 12 : 6;

// Rows that are taken through all of a thread's blocks before the next ones: they stay in the second-level cache.
int64_t rows_at_once(int64_t inputs) { return std::max<int64_t>(TALLEST, (1 << 17) / inputs / TALLEST * TALLEST); }

// Rows lie so far apart that they don't fall into the same sets of the cache.
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

// M rows from `row` on, prepared at `a`, by blocks `b0` and `b1`. Each row's products are added in the same order whatever
// M is, so that what a row yields doesn't depend, to the last bit, on the rows beside it.
template <class T, int M>
void tile(const LinearArgs& args, const typename Input<T>::type* a, int64_t stride, int64_t row, int64_t b0, int64_t b1) {
    const int64_t pairs = (args.inputs + 1) / 2;
    const T* w0 = static_cast<const T*>(args.weight) + b0 * pairs * 2 * W;
    const T* w1 = static_cast<const T*>(args.weight) + b1 * pairs * 2 * W;
    vf sums[M][2];
    for (auto& sum : sums) sum[0] = sum[1] = vf{};
    for (int64_t pair = 0; pair < pairs; pair++) {
        // Ahead by some microseconds of reading, and across pages, where the CPU's own prefetcher stops.
        constexpr int AHEAD = 2048 / sizeof(T), LINE = 64 / sizeof(T);
        for (int line = 0; line < 2 * W; line += LINE) {
            __builtin_prefetch(w0 + AHEAD + line);
            __builtin_prefetch(w1 + AHEAD + line);
        }
        multiply<M>(sums, a, stride, w0, w1);
        a += 2;
        w0 += 2 * W;
        w1 += 2 * W;
    }
    for (int m = 0; m < M; m++) {
        vf y0 = sums[m][0], y1 = sums[m][1];
        if (args.bias != nullptr) {
            y0 += load(args.bias + b0 * W);
            y1 += load(args.bias + b1 * W);
        }
        float* out = args.out + (row + m) * args.out_stride;
        if (args.epilogue == SILU_MUL) {
            store(out + b0 * W, silu(y0) * y1);
        } else {
            const bool add = args.epilogue == ADD;
            write(out + b0 * W, y0, args.outputs - b0 * W, add);
            if (b1 != b0) write(out + b1 * W, y1, args.outputs - b1 * W, add);
        }
    }
}

template <class T>
using Tile = void (*)(const LinearArgs&, const typename Input<T>::type*, int64_t, int64_t, int64_t, int64_t);

template <class T, int... M>
constexpr void fill(Tile<T>* table, std::integer_sequence<int, M...>) {
    ((table[M] = tile<T, M + 1>), ...);
}

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
    if (inputs % 2) put(to + inputs, 0.0f);
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

template <class T>
void run(const LinearArgs& args, int thread, int threads) {
    using A = typename Input<T>::type;
    Tile<T> tiles[TALLEST];
    fill<T>(tiles, std::make_integer_sequence<int, TALLEST>());
    const int64_t rows = *args.rows;
    const bool gated = args.epilogue == SILU_MUL;
    // Pairs of blocks: two neighbours, or a gate and its up.
    const int64_t blocks = (args.outputs + W - 1) / W, pairs = gated ? blocks / 2 : (blocks + 1) / 2;
    const int groups = row_groups((rows + TALLEST - 1) / TALLEST, pairs, threads);
    const Share share(rows, thread % groups, groups), columns(pairs, thread / groups, threads / groups);
    const bool as_is = args.norm == nullptr && std::is_same_v<A, float> && args.inputs % 2 == 0;
    const int64_t most = rows_at_once(args.inputs), prepared_stride = padded(args.inputs);
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
        const int64_t tall = (count + TALLEST - 1) / TALLEST;
        for (int64_t pair = columns.begin; pair < columns.end; pair++) {
            int64_t b0 = gated ? pair : 2 * pair, b1 = gated ? pair + pairs : std::min(2 * pair + 1, blocks - 1);
            for (int64_t t = 0; t < tall; t++) {
                Share part(count, t, tall);
                tiles[part.end - part.begin - 1](args, in + part.begin * stride, stride, first + part.begin, b0, b1);
            }
        }
    }
}

template <class T>
void pack(const T* weight, int64_t outputs, int64_t inputs, T* packed) {
    const int64_t blocks = (outputs + W - 1) / W, pairs = (inputs + 1) / 2;
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
    return (outputs + W - 1) / W * W * ((inputs + 1) / 2 * 2) * (type == BFLOAT16 ? 2 : 4);
}

void kvrelay_pack(const void* weight, int64_t outputs, int64_t inputs, int32_t type, void* packed) {
    if (type == BFLOAT16) {
        pack(static_cast<const bf16*>(weight), outputs, inputs, static_cast<bf16*>(packed));
    } else {
        pack(static_cast<const float*>(weight), outputs, inputs, static_cast<float*>(packed));
    }
}

int64_t kvrelay_linear_scratch(int64_t inputs) { return rows_at_once(inputs) * padded(inputs); }

void kvrelay_linear(const void* raw, int thread, int threads) {
    const LinearArgs& args = *static_cast<const LinearArgs*>(raw);
    if (args.type == BFLOAT16) {
        run<bf16>(args, thread, threads);
    } else {
        run<float>(args, thread, threads);
    }
}
