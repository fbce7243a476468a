// A tile of query tokens against all keys that they see: attention in one pass (Dao et al., arXiv:2205.14135).
//
// The lanes of vectors are queries, one for each token and head of a group; PANEL queries are processed together. Scores,
// weights and sums have keys or dimensions as rows and queries as columns. So a softmax runs down a column without
// exchanges between lanes, and keys and values keep the layout of the pool, converted to float32:
//
//     scores [keys, PANEL] = key [keys, D] . query [D, PANEL]
//     sums   [D, PANEL]   += value^T [D, keys] . weights [keys, PANEL]
//
// Limit: arithmetic, 4 * queries * keys * D operations.
#pragma once

#include "attention_lanes.h"
#include "attention_pages.h"

constexpr int VECTORS = 3;
constexpr int64_t PANEL = VECTORS * W;
constexpr int ROWS = W == 16 ? 8 : 4;  // ROWS * VECTORS sums in registers
constexpr int64_t TILE = 4 * PANEL;    // approximate number of queries of a tile
constexpr int64_t BLOCK = 64;          // keys at a time; few enough that the data of a panel stay in the L1 and L2 caches
constexpr float UNSEEN = -1e30f;       // the largest score before the first key; finite, so that differences aren't NaN

// The arrays of a tile, in `workspace`, which is 64-byte aligned. P, the class that computes the two products, may use
// another layout for queries, keys and values.
struct Tile {
    int64_t rows;     // D, rounded up to whole vectors
    int64_t panels;
    float* query;     // [panels, rows, PANEL], scaled
    float* sums;      // [panels, rows, PANEL]
    float* largest;   // [panels, PANEL]
    float* weights;   // [panels, PANEL]
    float* keys;      // [BLOCK, rows]
    float* values;    // [BLOCK, rows]
    float* scores;    // [BLOCK, PANEL]
    int32_t* first;   // [panels, PANEL] positions of the first and the last key that each column sees
    int32_t* last;
    float cap = 0;    // of the scores; 0: none

    int64_t size = 0; // numbers of workspace that all arrays take

    Tile(const AttentionShape& shape, int64_t queries, float* workspace)
        : Tile(shape.head_dim, queries * shape.group(), workspace) {}

    Tile(int64_t dim, int64_t columns, float* workspace) {
        rows = round_up(dim, W);
        panels = divide_up(columns, PANEL);
        auto take = [&](int64_t count) {
            float* taken = workspace == nullptr ? nullptr : workspace + size;
            size += count;
            return taken;
        };
        query = take(panels * rows * PANEL);
        sums = take(panels * rows * PANEL);
        largest = take(panels * PANEL);
        weights = take(panels * PANEL);
        keys = take(BLOCK * rows);
        values = take(BLOCK * rows);
        scores = take(BLOCK * PANEL);
        first = reinterpret_cast<int32_t*>(take(panels * PANEL));
        last = reinterpret_cast<int32_t*>(take(panels * PANEL));
    }
};

// Query tokens of a tile: as many as fill TILE columns.
inline int64_t tile_tokens(const AttentionShape& shape) { return std::max<int64_t>(1, TILE / shape.group()); }

// c [ROWS, N] = a [ROWS, depth] . b [depth, N], plus c * scale [N] if `scale` isn't null. Number (i, k) of a is at
// i * row + k * column; rows of b and c are PANEL apart.
template <int N>
inline void multiply(
    const float* a, int64_t row, int64_t column, const float* b, int64_t depth, float* c, const vf* scale
) {
    vf x[ROWS][N] = {};
    if (scale != nullptr) {
        for (int i = 0; i < ROWS; i++) {
            for (int n = 0; n < N; n++) x[i][n] = load(c + i * PANEL + n * W) * scale[n];
        }
    }
    for (int64_t k = 0; k < depth; k++) {
        vf y[N];
        for (int n = 0; n < N; n++) y[n] = load(b + k * PANEL + n * W);
        for (int i = 0; i < ROWS; i++) {
            vf z = splat(a[i * row + k * column]);
            for (int n = 0; n < N; n++) x[i][n] = fused(z, y[n], x[i][n]);
        }
    }
    for (int i = 0; i < ROWS; i++) {
        for (int n = 0; n < N; n++) store(c + i * PANEL + n * W, x[i][n]);
    }
}

inline vi load(const int32_t* p) {
    vi x;
    memcpy(&x, p, sizeof x);
    return x;
}

// Replaces a panel's scores of `count` keys, from position `begin` on, by weights; updates its largest scores and sums of
// weights. `all`: every column sees all of these keys. Writes scale [N], the factor for the sums of earlier keys.
template <int N>
inline void soften(const Tile& tile, int64_t panel, int64_t begin, int64_t count, bool all, vf* scale) {
    float* scores = tile.scores;
    if (tile.cap > 0) {
        for (int64_t k = 0; k < count; k++) {
            for (int n = 0; n < N; n++) {
                float* at = scores + k * PANEL + n * W;
                store(at, capped(load(at), tile.cap, 1.0f / tile.cap));
            }
        }
    }
    float* largest = tile.largest + panel * PANEL;
    float* weights = tile.weights + panel * PANEL;
    vf most[N], before[N], total[N];
    for (int n = 0; n < N; n++) most[n] = before[n] = load(largest + n * W);
    if (!all) {
        vi first[N], last[N];
        for (int n = 0; n < N; n++) {
            first[n] = load(tile.first + panel * PANEL + n * W);
            last[n] = load(tile.last + panel * PANEL + n * W);
        }
        for (int64_t k = 0; k < count; k++) {
            const vi position = vi{} + int32_t(begin + k);
            for (int n = 0; n < N; n++) {
                float* at = scores + k * PANEL + n * W;
                vf score = (position >= first[n]) & (position <= last[n]) ? load(at) : splat(-__builtin_inff());
                store(at, score);
                most[n] = larger(most[n], score);
            }
        }
    } else {
        for (int64_t k = 0; k < count; k++) {
            for (int n = 0; n < N; n++) most[n] = larger(most[n], load(scores + k * PANEL + n * W));
        }
    }
    for (int n = 0; n < N; n++) {
        scale[n] = exp2_nonpositive(before[n] - most[n]);
        total[n] = load(weights + n * W) * scale[n];
        store(largest + n * W, most[n]);
    }
    for (int64_t k = 0; k < count; k++) {
        for (int n = 0; n < N; n++) {
            float* at = scores + k * PANEL + n * W;
            vf weight = exp2_nonpositive(load(at) - most[n]);
            store(at, weight);
            total[n] += weight;
        }
    }
    for (int n = 0; n < N; n++) store(weights + n * W, total[n]);
}

// Numbers of a key and of a value.
struct Dims {
    int64_t key, value;
};

// One panel of N vectors against the `count` keys, from position `begin` on, that P::take has loaded.
template <typename P, int N>
inline void attend(const Tile& tile, int64_t panel, Dims dims, int64_t begin, int64_t count, bool all) {
    P::template score<N>(tile, panel, dims.key, count);
    vf scale[N];
    soften<N>(tile, panel, begin, count, all, scale);
    P::template add<N>(tile, panel, dims.value, count, scale);
}

// All panels of a tile, whose queries are `columns`, against `count` keys from position `begin` on.
template <typename P>
inline void attend_panels(const Tile& tile, int64_t columns, Dims dims, int64_t begin, int64_t count) {
    for (int64_t panel = 0; panel < tile.panels; panel++) {
        const int64_t head = panel * PANEL, tail = head + PANEL - 1;
        if (begin > tile.last[tail] || begin + count <= tile.first[head]) continue;
        const int64_t seen = std::min(count, tile.last[tail] + 1 - begin);
        const bool all = begin + seen - 1 <= tile.last[head] && begin >= tile.first[tail];
        const int64_t vectors = divide_up(std::min(PANEL, columns - head), W);
        if (vectors == VECTORS) {
            attend<P, VECTORS>(tile, panel, dims, begin, seen, all);
        } else if (vectors == 2) {
            attend<P, 2>(tile, panel, dims, begin, seen, all);
        } else {
            attend<P, 1>(tile, panel, dims, begin, seen, all);
        }
    }
}

// Clears the sums, and sets the keys that each column sees: column c is token (skipped + c) / G of those from position
// `first` on.
inline void begin_tile(
    const Tile& tile, int64_t columns, int64_t group, int64_t first, int64_t window, int64_t skipped = 0
) {
    std::fill_n(tile.sums, tile.panels * tile.rows * PANEL, 0.0f);
    std::fill_n(tile.largest, tile.panels * PANEL, UNSEEN);
    std::fill_n(tile.weights, tile.panels * PANEL, 0.0f);
    // Columns after the last query see the same keys as it.
    for (int64_t c = 0; c < tile.panels * PANEL; c++) {
        const int64_t position = first + (skipped + std::min(c, columns - 1)) / group;
        tile.last[c] = int32_t(position);
        tile.first[c] = window ? int32_t(std::max<int64_t>(0, position - window + 1)) : 0;
    }
}

// Copies keys or values into `to` [count, rows], multiplied by their scales if they have any, with zeros beyond `dim`.
template <typename T>
inline void copy(
    const T* from, const bf16* scales, const AttentionShape& shape, int64_t count, float* to, int64_t rows
) {
    const int64_t dim = shape.head_dim;
    for (int64_t k = 0; k < count; k++, from += shape.token_stride(), to += rows) {
        const float scale = scaled<T> ? number(scales[k * shape.kv_heads]) : 1.0f;
        int64_t d = 0;
        for (; d + W <= dim; d += W) store(to + d, load(from + d) * scale);
        if (d < dim) store(to + d, load(from + d, dim - d) * scale);
    }
}

struct VectorProducts {
    struct Registers {};

    // Loads the `count` keys of these segments and their values.
    template <typename T>
    static void take(
        const Tile& tile, const Segment<T>* segments, int64_t found, const AttentionShape& shape, int64_t count
    ) {
        int64_t at = 0;
        for (int64_t i = 0; i < found; at += segments[i++].count) {
            const auto& [keys, values, held, key_scales, value_scales] = segments[i];
            copy(keys, key_scales, shape, held, tile.keys + at * tile.rows, tile.rows);
            copy(values, value_scales, shape, held, tile.values + at * tile.rows, tile.rows);
        }
        std::fill(tile.keys + count * tile.rows, tile.keys + round_up(count, ROWS) * tile.rows, 0.0f);
    }

    // Writes dimensions [d, d + W) of queries [c, c + W).
    static void put_query(const Tile& tile, int64_t c, int64_t d, const vf* x) {
        float* to = tile.query + c / PANEL * tile.rows * PANEL + c % PANEL;
        for (int i = 0; i < W; i++) store(to + (d + i) * PANEL, x[i]);
    }

    template <int N>
    static void score(const Tile& tile, int64_t panel, int64_t dim, int64_t count) {
        const float* query = tile.query + panel * tile.rows * PANEL;
        for (int64_t k = 0; k < count; k += ROWS) {
            multiply<N>(tile.keys + k * tile.rows, tile.rows, 1, query, dim, tile.scores + k * PANEL, nullptr);
        }
    }

    template <int N>
    static void add(const Tile& tile, int64_t panel, int64_t dim, int64_t count, const vf* scale) {
        float* sums = tile.sums + panel * tile.rows * PANEL;
        for (int64_t d = 0; d < dim; d += ROWS) {
            multiply<N>(tile.values + d, 1, tile.rows, tile.scores, count, sums + d * PANEL, scale);
        }
    }
};

// Addresses of the columns of a tile in queries or out: column c is token c / G of the tile, head c % G of the group.
struct Columns {
    float* first;
    int64_t stride, group, dim;

    float* operator()(int64_t column) const { return first + column / group * stride + column % group * dim; }
};

// Loads `count` columns into tile.query.
template <typename P>
inline void take_queries(const Tile& tile, Columns from, int64_t count, float scale) {
    for (int64_t c = 0; c < tile.panels * PANEL; c += W) {
        for (int64_t d = 0; d < tile.rows; d += W) {
            vf x[W] = {};
            for (int i = 0; i < W && c + i < count; i++) {
                const float* query = from(c + i) + d;
                x[i] = (d + W <= from.dim ? load(query) : load(query, from.dim - d)) * scale;
            }
            transpose(x);
            P::put_query(tile, c, d, x);
        }
    }
}

// Stores tile.sums, divided by the weights, to `count` columns.
inline void put_sums(const Tile& tile, Columns to, int64_t count) {
    for (int64_t c = 0; c < count; c += W) {
        const float* from = tile.sums + c / PANEL * tile.rows * PANEL + c % PANEL;
        const vf share = 1.0f / load(tile.weights + c);
        for (int64_t d = 0; d < to.dim; d += W) {
            vf x[W];
            for (int i = 0; i < W; i++) x[i] = load(from + (d + i) * PANEL) * share;
            transpose(x);
            for (int i = 0; i < W && c + i < count; i++) {
                float* out = to(c + i) + d;
                if (d + W <= to.dim) {
                    store(out, x[i]);
                } else {
                    store(out, x[i], to.dim - d);
                }
            }
        }
    }
}

template <typename T, typename P>
inline void prefill(const AttentionArgs& args, const Worklist& list, const Item& item, float* workspace) {
    const AttentionShape& shape = args.step->shape;
    const Row& row = args.step->rows[item.row];
    const int64_t group = shape.group(), dim = shape.head_dim, columns = item.queries * group;
    const int64_t token = row.token + item.query, offset = item.head * group * dim;
    Tile tile(shape, item.queries, workspace);
    tile.cap = args.cap();
    const Columns queries{args.qkv + token * args.qkv_stride + offset, args.qkv_stride, group, dim};
    take_queries<P>(tile, queries, columns, 1.44269504f / __builtin_sqrtf(float(dim)));  // weights are powers of 2
    begin_tile(tile, columns, group, row.start + item.query, list.window);
    if (args.sinks != nullptr) {
        // A sink is as a key before all others, without a value.
        for (int64_t c = 0; c < columns; c++) {
            tile.largest[c] = args.sink(item.head * group + c % group);
            tile.weights[c] = 1.0f;
        }
    }
    Segment<T> segments[BLOCK];
    for (int64_t begin = item.key_first; begin < item.key_last; begin += BLOCK) {
        const int64_t count = std::min(BLOCK, item.key_last - begin), end = begin + count;
        const int64_t found =
            find(shape, static_cast<const T*>(args.pool), row.blocks, item.head, begin, end, segments);
        P::take(tile, segments, found, shape, count);
        attend_panels<P>(tile, columns, {dim, dim}, begin, count);
    }
    put_sums(tile, {args.out + token * args.out_stride + offset, args.out_stride, group, dim}, columns);
}
