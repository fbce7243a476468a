// A few consecutive query tokens against up to CHUNK of their keys, for all query heads that share a KV head: Q * G rows.
//
//     scores [Q G, keys] = query [Q G, D] . key [keys, D]          a vector is part of a key; H * keys_of(H) sums at a time
//     sums   [Q G, D]    = weights [Q G, keys] . value [keys, D]   a vector is part of a value; HEADS * DIMS sums at a time
//
// A row's numbers are added in the same order whatever the other rows are. A query's weights end at its own key, so what
// later tokens have never reaches it.
//
// Scores of keys in int8 are multiplied by the scales of the keys, and weights by those of the values.
//
// Limit: memory; 2 * keys * D numbers of the pool must be read.
#pragma once

#include <numeric>
#include <tuple>

#include "attention_lanes.h"
#include "attention_pages.h"

constexpr int64_t CHUNK = 128;
constexpr int HEADS = 4;
constexpr int DIMS = W == 16 ? 4 : 2;
constexpr int64_t SCORES = CHUNK + W;  // numbers from the scores of one row to those of the next

// Keys that are multiplied with H rows at once. The lanes of W sums are added together, so there should be as many sums.
constexpr int keys_of(int H) { return H == 3 || H * 4 > W ? 4 : W / H; }

// How many query tokens of a sequence an item has at most: so many that no product has less than HEADS rows.
inline int64_t queries_together(const AttentionShape& shape) { return HEADS / std::gcd(shape.group(), int64_t{HEADS}); }

// Writes KEYS columns of scores [H, SCORES]: query [H, D] . key, for KEYS keys.
template <int H, int KEYS, typename T>
inline void score(const float* query, const T* const (&key)[KEYS], int64_t dim, float* scores) {
    constexpr int SUMS = (H * KEYS + W - 1) / W * W;
    vf x[SUMS];
    for (int i = 0; i < SUMS; i++) x[i] = vf{};
    int64_t d = 0;
    for (; d + W <= dim; d += W) {
        vf loaded[KEYS];
        for (int i = 0; i < KEYS; i++) loaded[i] = load(key[i] + d);
        for (int h = 0; h < H; h++) {
            vf q = load(query + h * dim + d);
            for (int i = 0; i < KEYS; i++) x[h * KEYS + i] = fused(q, loaded[i], x[h * KEYS + i]);
        }
    }
    if (d < dim) {
        for (int h = 0; h < H; h++) {
            vf q = load(query + h * dim + d, dim - d);
            for (int i = 0; i < KEYS; i++) x[h * KEYS + i] = fused(q, load(key[i] + d, dim - d), x[h * KEYS + i]);
        }
    }
    alignas(64) float lanes[SUMS];
    for (int i = 0; i < SUMS; i += W) store(lanes + i, sums(x + i));
    for (int h = 0; h < H; h++) memcpy(scores + h * SCORES, lanes + h * KEYS, KEYS * sizeof(float));
}

// The same for all keys of a segment. Also overwrites up to keys_of(H) - 1 columns after them.
template <int H, typename T>
inline void score(const AttentionShape& shape, const float* query, const Segment<T>& segment, float* scores) {
    constexpr int KEYS = keys_of(H);
    const int64_t stride = shape.token_stride();
    const T* const last = segment.keys + (segment.count - 1) * stride;
    const T* keys[KEYS];
    for (int i = 0; i < KEYS; i++) keys[i] = segment.keys + i * stride;
    for (int64_t k = 0; k < segment.count; k += KEYS) {
        if (k + KEYS > segment.count) {
            for (int i = int(segment.count - k); i < KEYS; i++) keys[i] = last;
        }
        score<H, KEYS>(query, keys, shape.head_dim, scores + k);
        for (int i = 0; i < KEYS; i++) keys[i] += KEYS * stride;
    }
}

// Keys [first, first + count) of an item's. If `first` isn't 0, their products are added to sums of those before.
struct Range {
    int64_t first, count;
};

// N vectors, from dimension `d` on, of sums [H, D] = weights [H, keys] . values [keys, D]. If `part` isn't 0, it is one
// vector of `part` < W numbers.
template <int H, int N, typename T>
inline void weigh(
    const AttentionShape& shape, const float* weights, const Segment<T>* segment, Range keys, int64_t d, int64_t part,
    float* sums, Prefetcher& prefetcher
) {
    const int64_t stride = shape.token_stride(), dim = shape.head_dim;
    vf x[H][N];
    for (int h = 0; h < H; h++) {
        for (int n = 0; n < N; n++) {
            const float* from = sums + h * dim + d + n * W;
            x[h][n] = keys.first == 0 ? vf{} : part ? load(from, part) : load(from);
        }
    }
    int64_t skipped = keys.first;
    weights += skipped;
    for (; skipped >= segment->count; segment++) skipped -= segment->count;
    for (int64_t left = keys.count; left > 0; segment++, skipped = 0) {
        const int64_t count = std::min(segment->count - skipped, left);
        const T* value = segment->values + skipped * stride + d;
        left -= count;
        prefetcher.fetch();
        for (const T* end = value + count * stride; value < end; value += stride, weights++) {
            vf loaded[N];
            for (int n = 0; n < N; n++) loaded[n] = part ? load(value, part) : load(value + n * W);
            for (int h = 0; h < H; h++) {
                for (int n = 0; n < N; n++) x[h][n] = fused(splat(weights[h * SCORES]), loaded[n], x[h][n]);
            }
        }
    }
    for (int h = 0; h < H; h++) {
        float* to = sums + h * dim + d;
        if (part) {
            store(to, x[h][0], part);
        } else {
            for (int n = 0; n < N; n++) store(to + n * W, x[h][n]);
        }
    }
}

// Replaces the scores [SCORES] of `count` keys by their weights relative to the largest score. Returns the largest score
// and the sum of the weights.
inline std::pair<float, float> soften(float* scores, int64_t count) {
    for (int i = 0; i < W; i++) scores[count + i] = -__builtin_inff();
    vf most = load(scores);
    for (int64_t k = W; k < count; k += W) most = larger(most, load(scores + k));
    const float largest = reduce(most, larger);
    vf total = {};
    for (int64_t k = 0; k < count; k += W) {
        vf weight = exp2_nonpositive(load(scores + k) - largest);
        store(scores + k, weight);
        total += weight;
    }
    return {largest, reduce(total, [](vf a, vf b) { return a + b; })};
}

// The result for a part of the keys: weighted sums of values, largest scores, and sums of weights of each query head.
struct Part {
    float* sums;     // [G, D]
    float* largest;  // [G]
    float* weights;  // [G]

    static int64_t size(const AttentionShape& shape) { return shape.group() * (shape.head_dim + 2); }

    Part(const AttentionShape& shape, float* memory)
        : sums(memory), largest(memory + shape.group() * shape.head_dim), weights(largest + shape.group()) {}
};

// `weigh` for all dimensions.
template <int H, typename T>
inline void weigh(
    const AttentionShape& shape, const float* weights, const Segment<T>* segments, Range keys, float* sums,
    Prefetcher& prefetcher
) {
    const int64_t dim = shape.head_dim;
    int64_t d = 0;
    for (; d + DIMS * W <= dim; d += DIMS * W) weigh<H, DIMS>(shape, weights, segments, keys, d, 0, sums, prefetcher);
    if constexpr (DIMS > 2) {
        for (; d + 2 * W <= dim; d += 2 * W) weigh<H, 2>(shape, weights, segments, keys, d, 0, sums, prefetcher);
    }
    for (; d + W <= dim; d += W) weigh<H, 1>(shape, weights, segments, keys, d, 0, sums, prefetcher);
    if (d < dim) weigh<H, 1>(shape, weights, segments, keys, d, dim - d, sums, prefetcher);
}

// Calls use<H>(row) for H <= HEADS of `count` rows at a time, from `row` on.
template <typename Use>
inline void each_rows(int64_t count, Use use) {
    int64_t row = 0;
    for (; row + HEADS <= count; row += HEADS) use.template operator()<HEADS>(row);
    switch (count - row) {
        case 3: use.template operator()<3>(row); break;
        case 2: use.template operator()<2>(row); break;
        case 1: use.template operator()<1>(row); break;
    }
}

// out [G, D] from the parts of all keys, combined in order; `head` is the first query head.
inline void combine(const AttentionArgs& args, int64_t head, float* parts, int64_t count, float* out) {
    const AttentionShape& shape = args.step->shape;
    for (int64_t g = 0; g < shape.group(); g++) {
        const float sink = args.sink(head + g);
        float largest = sink;
        for (int64_t i = 0; i < count; i++) {
            largest = std::max(largest, Part(shape, parts + i * Part::size(shape)).largest[g]);
        }
        float weights = args.sinks == nullptr ? 0.0f : exp2_nonpositive(splat(sink - largest))[0];
        float* to = out + g * shape.head_dim;
        std::fill_n(to, shape.head_dim, 0.0f);
        for (int64_t i = 0; i < count; i++) {
            Part part(shape, parts + i * Part::size(shape));
            float scale = exp2_nonpositive(splat(part.largest[g] - largest))[0];
            weights += scale * part.weights[g];
            for (int64_t d = 0; d < shape.head_dim; d++) to[d] += scale * part.sums[g * shape.head_dim + d];
        }
        for (int64_t d = 0; d < shape.head_dim; d++) to[d] /= weights;
    }
}

// Numbers of workspace that an item needs.
inline int64_t decode_workspace(const AttentionShape& shape) {
    const int64_t rows = queries_together(shape) * shape.group();
    return shape.kv_heads * rows * (shape.head_dim + SCORES) + rows * (shape.head_dim + 2) + Part::size(shape);
}

// Addresses of an item's keys and values.
template <typename T>
struct ItemKeys {
    Segment<T> segments[CHUNK];
    int64_t count;

    ItemKeys(const AttentionArgs& args, const Item& item) {
        const int64_t* blocks = args.step->rows[item.row].blocks;
        const T* pool = static_cast<const T*>(args.pool);
        count = find(args.step->shape, pool, blocks, item.head, item.key_first, item.key_last, segments);
    }

    // Writes the scales of all keys, or of all values, of KV head `item.head + head` to `to` [CHUNK].
    void scales(bool values, int64_t head, int64_t stride, float* to) const {
        for (int64_t i = 0; i < count; i++) {
            const bf16* from = (values ? segments[i].value_scales : segments[i].key_scales) + head;
            for (int64_t k = 0; k < segments[i].count; k++, from += stride) *to++ = number(*from);
        }
    }

    // Writes the addresses of all keys, or of all values, to `rows`; returns their number.
    int64_t list(bool values, int64_t stride, const T** rows) const {
        int64_t listed = 0;
        for (int64_t i = 0; i < count; i++) {
            const T* row = values ? segments[i].values : segments[i].keys;
            for (int64_t k = 0; k < segments[i].count; k++, row += stride) rows[listed++] = row;
        }
        return listed;
    }
};

// Multiplies each row of x [rows, SCORES] by `scales`, for the first `count` columns; may overwrite up to W - 1 more.
inline void scale_columns(float* x, int64_t rows, const float* scales, int64_t count) {
    for (int64_t i = 0; i < rows; i++, x += SCORES) {
        for (int64_t k = 0; k < count; k += W) store(x + k, load(x + k) * load(scales + k));
    }
}

// `next`: this thread's next item, whose keys are prefetched during this one, or null.
template <typename T>
inline void decode(const AttentionArgs& args, Worklist& list, const Item& item, const Item* next, float* workspace) {
    const AttentionShape& shape = args.step->shape;
    const int64_t group = shape.group(), dim = shape.head_dim, stride = shape.token_stride();
    const int64_t count = item.queries * group;  // rows of each KV head
    const Row& row_of = args.step->rows[item.row];
    const int64_t token = row_of.token + item.query, first = item.head * group * dim;
    float* query = workspace;
    float* scores = query + item.heads * count * dim;
    float* sums = scores + item.heads * count * SCORES;
    float* largest = sums + count * dim;
    float* totals = largest + count;
    float* own_part = totals + count;
    const float scale = 1.44269504f / __builtin_sqrtf(float(dim));  // weights are powers of 2
    for (int64_t head = 0; head < item.heads; head++) {
        for (int64_t q = 0; q < item.queries; q++) {
            const float* from = args.qkv + (token + q) * args.qkv_stride + first + head * group * dim;
            float* to = query + (head * count + q * group) * dim;
            for (int64_t i = 0; i < group * dim; i++) to[i] = from[i] * scale;
        }
    }
    ItemKeys<T> found(args, item);
    const int64_t visits = item.heads * divide_up(count, HEADS) * found.count;
    const T* rows[CHUNK];
    Prefetcher prefetcher;

    const int64_t keys = item.key_last - item.key_first;
    // Of the first query; each later one sees one key more, up to `keys`.
    const int64_t seen = std::min(keys, row_of.start + item.query + 1 - item.key_first);
    auto sees = [&](int64_t row) { return std::min(keys, seen + row / group); };
    [[maybe_unused]] float scales[CHUNK] = {};
    prefetcher.begin(rows, found.list(true, stride, rows), item.heads * dim, visits);
    for (int64_t head = 0; head < item.heads; head++) {
        each_rows(count, [&]<int H>(int64_t first_row) {
            const int64_t row = head * count + first_row;
            float* to = scores + row * SCORES;
            for (int64_t i = 0; i < found.count; to += found.segments[i++].count) {
                prefetcher.fetch();
                Segment<T> segment = found.segments[i];
                segment.keys += head * dim;
                score<H>(shape, query + row * dim, segment, to);
            }
        });
        if constexpr (scaled<T>) {
            found.scales(false, head, shape.kv_heads, scales);
            scale_columns(scores + head * count * SCORES, count, scales, keys);
        }
    }

    int64_t rows_ahead = 0;
    if (next != nullptr && next->decode) rows_ahead = ItemKeys<T>(args, *next).list(false, stride, rows);
    prefetcher.begin(rows, rows_ahead, item.heads * dim, visits * divide_up(dim, DIMS * W));
    for (int64_t head = 0; head < item.heads; head++) {
        float* weights = scores + head * count * SCORES;
        if (args.softcap > 0) {
            const float cap = args.cap();
            for (int64_t row = 0; row < count; row++) {
                float* to = weights + row * SCORES;
                for (int64_t k = 0; k < sees(row); k += W) store(to + k, capped(load(to + k), cap, 1.0f / cap));
            }
        }
        for (int64_t row = 0; row < count; row++) {
            std::tie(largest[row], totals[row]) = soften(weights + row * SCORES, sees(row));
        }
        if constexpr (scaled<T>) {
            found.scales(true, head, shape.kv_heads, scales);
            scale_columns(weights, count, scales, keys);
        }
        each_rows(count, [&]<int H>(int64_t row) {
            weigh<H>(shape, weights + row * SCORES, found.segments, {0, seen}, sums + row * dim, prefetcher);
        });
        for (int64_t row = group; row < count; row++) {
            if (sees(row) == seen) continue;
            weigh<1>(shape, weights + row * SCORES, found.segments, {seen, sees(row) - seen}, sums + row * dim, prefetcher);
        }
        for (int64_t q = 0; q < item.queries; q++) {
            const int64_t merge = item.merge + q * shape.kv_heads + head;
            float* parts = item.merge < 0 ? own_part : list.part(shape, list.merges[merge].first);
            const Part part(shape, item.merge < 0 ? parts : parts + item.part * Part::size(shape));
            memcpy(part.sums, sums + q * group * dim, group * dim * sizeof(float));
            memcpy(part.largest, largest + q * group, group * sizeof(float));
            memcpy(part.weights, totals + q * group, group * sizeof(float));
            float* out = args.out + (token + q) * args.out_stride + first + head * group * dim;
            if (item.merge < 0) {
                combine(args, (item.head + head) * group, parts, 1, out);
            } else if (list.pending[merge].fetch_sub(1, std::memory_order_acq_rel) == 1) {
                list.pending[merge].store(int32_t(list.merges[merge].parts), std::memory_order_relaxed);
                combine(args, (item.head + head) * group, parts, list.merges[merge].parts, out);
            }
        }
        for (int64_t i = 0; i < found.count; i++) found.segments[i].values += dim;
    }
}
