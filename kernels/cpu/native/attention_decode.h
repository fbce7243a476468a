// One query token against up to CHUNK of its keys, for all query heads that share a KV head.
//
//     scores [G, keys] = query [G, D] . key [keys, D]          a vector is part of a key; HEADS * KEYS sums at a time
//     sums   [G, D]    = weights [G, keys] . value [keys, D]   a vector is part of a value; HEADS * DIMS sums at a time
//
// Scores of keys in int8 are multiplied by the scales of the keys, and weights by those of the values.
//
// Limit: memory; 2 * keys * D numbers of the pool must be read.
#pragma once

#include "attention_lanes.h"
#include "attention_pages.h"

constexpr int64_t CHUNK = 128;
constexpr int HEADS = 4;
constexpr int KEYS = 4;
constexpr int DIMS = W == 16 ? 4 : 2;
constexpr int64_t SCORES = CHUNK + W;  // numbers from the scores of one head to those of the next

// Writes KEYS columns of scores [H, SCORES]: query [H, D] . key, for KEYS keys.
template <int H, typename T>
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
            for (int i = 0; i < KEYS; i++) x[h * KEYS + i] += q * loaded[i];
        }
    }
    if (d < dim) {
        for (int h = 0; h < H; h++) {
            vf q = load(query + h * dim + d, dim - d);
            for (int i = 0; i < KEYS; i++) x[h * KEYS + i] += q * load(key[i] + d, dim - d);
        }
    }
    alignas(64) float lanes[SUMS];
    for (int i = 0; i < SUMS; i += W) store(lanes + i, sums(x + i));
    for (int h = 0; h < H; h++) memcpy(scores + h * SCORES, lanes + h * KEYS, KEYS * sizeof(float));
}

// The same for all keys of a segment. Also overwrites up to KEYS - 1 columns after them.
template <int H, typename T>
inline void score(const AttentionShape& shape, const float* query, const Segment<T>& segment, float* scores) {
    const int64_t stride = shape.token_stride();
    const T* first = segment.keys;
    int64_t k = 0;
    for (; k + KEYS <= segment.count; k += KEYS, first += KEYS * stride) {
        score<H>(query, {first, first + stride, first + 2 * stride, first + 3 * stride}, shape.head_dim, scores + k);
    }
    if (k < segment.count) {
        const T* last = segment.keys + (segment.count - 1) * stride;
        const T* second = std::min(first + stride, last);
        score<H>(query, {first, second, std::min(second + stride, last), last}, shape.head_dim, scores + k);
    }
}

// N vectors, from dimension `d` on, of sums [H, D] = weights [H, keys] . values [keys, D]. If `part` isn't 0, it is one
// vector of `part` < W numbers.
template <int H, int N, typename T>
inline void weigh(
    const AttentionShape& shape, const float* weights, const Segment<T>* segments, int64_t count, int64_t d,
    int64_t part, float* sums, Prefetcher& prefetcher
) {
    const int64_t stride = shape.token_stride();
    vf x[H][N];
    for (int h = 0; h < H; h++) {
        for (int n = 0; n < N; n++) x[h][n] = vf{};
    }
    for (const Segment<T>* segment = segments; segment < segments + count; segment++) {
        const T* value = segment->values + d;
        prefetcher.fetch();
        for (const T* end = value + segment->count * stride; value < end; value += stride, weights++) {
            vf loaded[N];
            for (int n = 0; n < N; n++) loaded[n] = part ? load(value, part) : load(value + n * W);
            for (int h = 0; h < H; h++) {
                for (int n = 0; n < N; n++) x[h][n] += weights[h * SCORES] * loaded[n];
            }
        }
    }
    for (int h = 0; h < H; h++) {
        float* to = sums + h * shape.head_dim + d;
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
    const AttentionShape& shape, const float* weights, const Segment<T>* segments, int64_t count, float* sums,
    Prefetcher& prefetcher
) {
    const int64_t dim = shape.head_dim;
    int64_t d = 0;
    for (; d + DIMS * W <= dim; d += DIMS * W) weigh<H, DIMS>(shape, weights, segments, count, d, 0, sums, prefetcher);
    for (; d + W <= dim; d += W) weigh<H, 1>(shape, weights, segments, count, d, 0, sums, prefetcher);
    if (d < dim) weigh<H, 1>(shape, weights, segments, count, d, dim - d, sums, prefetcher);
}

// Calls use<H>(head) for H <= HEADS heads of a group at a time, from `head` on.
template <typename Use>
inline void each_heads(int64_t group, Use use) {
    int64_t head = 0;
    for (; head + HEADS <= group; head += HEADS) use.template operator()<HEADS>(head);
    switch (group - head) {
        case 3: use.template operator()<3>(head); break;
        case 2: use.template operator()<2>(head); break;
        case 1: use.template operator()<1>(head); break;
    }
}

// out [G, D] from the parts of all keys, combined in order.
inline void combine(const AttentionShape& shape, float* parts, int64_t count, float* out) {
    for (int64_t g = 0; g < shape.group(); g++) {
        float largest = -__builtin_inff(), weights = 0;
        for (int64_t i = 0; i < count; i++) {
            largest = std::max(largest, Part(shape, parts + i * Part::size(shape)).largest[g]);
        }
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
    return int64_t{shape.heads} * (shape.head_dim + SCORES) + Part::size(shape);
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
    const int64_t token = args.step->rows[item.row].token + item.query, first = item.head * group * dim;
    float* query = workspace;
    float* scores = query + item.heads * group * dim;
    float* own_part = scores + item.heads * group * SCORES;
    const float scale = 1.44269504f / __builtin_sqrtf(float(dim));  // weights are powers of 2
    for (int64_t i = 0; i < item.heads * group * dim; i++) {
        query[i] = args.qkv[token * args.qkv_stride + first + i] * scale;
    }
    ItemKeys<T> found(args, item);
    const int64_t visits = item.heads * divide_up(group, HEADS) * found.count;
    const T* rows[CHUNK];
    Prefetcher prefetcher;

    const int64_t keys = item.key_last - item.key_first;
    [[maybe_unused]] float scales[CHUNK] = {};
    prefetcher.begin(rows, found.list(true, stride, rows), item.heads * dim, visits);
    for (int64_t head = 0; head < item.heads; head++) {
        each_heads(group, [&]<int H>(int64_t member) {
            const int64_t row = head * group + member;
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
            scale_columns(scores + head * group * SCORES, group, scales, keys);
        }
    }

    int64_t rows_ahead = 0;
    if (next != nullptr && next->decode) rows_ahead = ItemKeys<T>(args, *next).list(false, stride, rows);
    prefetcher.begin(rows, rows_ahead, item.heads * dim, visits * divide_up(dim, DIMS * W));
    for (int64_t head = 0; head < item.heads; head++) {
        const int64_t merge = item.merge + head;
        float* parts = item.merge < 0 ? own_part : list.part(shape, list.merges[merge].first);
        const Part part(shape, item.merge < 0 ? parts : parts + item.part * Part::size(shape));
        for (int64_t member = 0; member < group; member++) {
            float* of_member = scores + (head * group + member) * SCORES;
            auto [largest, weights] = soften(of_member, keys);
            part.largest[member] = largest;
            part.weights[member] = weights;
        }
        if constexpr (scaled<T>) {
            found.scales(true, head, shape.kv_heads, scales);
            scale_columns(scores + head * group * SCORES, group, scales, keys);
        }
        each_heads(group, [&]<int H>(int64_t member) {
            const float* weights = scores + (head * group + member) * SCORES;
            weigh<H>(shape, weights, found.segments, found.count, part.sums + member * dim, prefetcher);
        });
        float* out = args.out + token * args.out_stride + first + head * group * dim;
        if (item.merge < 0) {
            combine(shape, parts, 1, out);
        } else if (list.pending[merge].fetch_sub(1, std::memory_order_acq_rel) == 1) {
            list.pending[merge].store(int32_t(list.merges[merge].parts), std::memory_order_relaxed);
            combine(shape, parts, list.merges[merge].parts, out);
        }
        for (int64_t i = 0; i < found.count; i++) found.segments[i].values += dim;
    }
}
