#include "latent.h"

#ifndef __clang__
#pragma GCC optimize("O3")
#endif

#include <algorithm>
#include <new>

#include "attention_layer.h"
#include "attention_tiles.h"

namespace {

constexpr int64_t KEYS = 256;           // of an item
constexpr int64_t COLUMNS = 2 * PANEL;  // of an item, at most
constexpr int64_t TOKENS = 4;           // that a product of heads multiplies with the same weights

// Numbers of a part: for each vector of columns sums [C], the largest score and the sum of weights.
int64_t part_size(const LatentShape& shape, int64_t columns) { return divide_up(columns, W) * (shape.latent + 2) * W; }

}  // namespace

void LatentStep::plan() {
    merges.clear();
    int64_t next_part = 0;
    std::vector<std::pair<int64_t, LatentItem>> costed;
    for (int32_t r = 0; r < int32_t(rows.size()); r++) {
        const Row& row = rows[r];
        if (row.tokens == 0) continue;
        const int64_t all = row.tokens * shape.heads;
        const int64_t each = round_up(divide_up(all, divide_up(all, COLUMNS)), W);
        for (int64_t column = 0; column < all; column += each) {
            const int64_t columns = std::min(each, all - column);
            const int64_t last = row.start + (column + columns - 1) / shape.heads + 1;
            const int64_t count = divide_up(last, KEYS);
            const int64_t merge = count > 1 ? int64_t(merges.size()) : -1;
            if (count > 1) {
                merges.push_back({next_part, count});
                next_part += count * part_size(shape, columns);
            }
            for (int64_t part = 0; part < count; part++) {
                const int64_t begin = part * KEYS, end = std::min(begin + KEYS, last);
                costed.push_back({(end - begin) * divide_up(columns, W), {r, column, columns, begin, end, merge, part}});
            }
        }
    }
    // Longest processing time first: each item, most expensive first, goes to the thread with the least load.
    std::stable_sort(costed.begin(), costed.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    items.assign(shape.threads, {});
    std::vector<int64_t> load(shape.threads);
    for (const auto& [cost, item] : costed) {
        const size_t least = std::min_element(load.begin(), load.end()) - load.begin();
        load[least] += cost;
        items[least].push_back(item);
    }
    if (next_part > int64_t(parts.size())) parts.resize(next_part);
    pending = std::make_unique<std::atomic<int32_t>[]>(merges.size());
    for (size_t i = 0; i < merges.size(); i++) pending[i].store(int32_t(merges[i].parts), std::memory_order_relaxed);
}

namespace {

// A token's numbers in the pools, and the scales of int8.
template <typename T>
struct Entry {
    const T* latent;
    const T* rotated;
    float latent_scale, rotated_scale;
};

// Scales of int8 follow the numbers of a block, one a slot.
template <typename T>
Entry<T> entry(const LatentArgs& args, int64_t block, int64_t slot) {
    const LatentShape& shape = args.step->shape;
    const T* latents = static_cast<const T*>(args.latent_pool) + block * shape.latent_stride;
    const T* rotated = static_cast<const T*>(args.rotated_pool) + block * shape.rotated_stride;
    Entry<T> found{latents + slot * shape.latent, rotated + slot * shape.rotated, 1.0f, 1.0f};
    if constexpr (scaled<T>) {
        const auto scale = [&](const T* plane, int64_t width) {
            return number(reinterpret_cast<const bf16*>(plane + shape.block_size * width)[slot]);
        };
        found.latent_scale = scale(latents, shape.latent);
        found.rotated_scale = scale(rotated, shape.rotated);
    }
    return found;
}

template <typename T, typename O>
void convert(const T* from, int64_t count, float scale, O* to) {
    int64_t d = 0;
    for (; d + W <= count; d += W) store(to + d, load(from + d) * scale);
    for (; d < count; d++) put(to + d, number(from[d]) * scale);
}

// Loads `count` keys from `begin` on into a tile, for either class of products.
template <typename T, typename P>
void take(const Tile& tile, const LatentArgs& args, const Row& row, int64_t begin, int64_t count) {
    const LatentShape& shape = args.step->shape;
    const auto at = [&](int64_t k) {
        const int64_t position = begin + k;
        return entry<T>(args, row.blocks[position / shape.block_size], position % shape.block_size);
    };
#ifdef KVRELAY_TILES
    if constexpr (std::is_same_v<P, TileProducts>) {
        const int64_t width = round_up(shape.dim(), tiles::INPUTS), whole = round_up(count, tiles::INPUTS);
        bf16 *keys = reinterpret_cast<bf16*>(tile.keys), *values = reinterpret_cast<bf16*>(tile.values);
        for (int64_t k = 0; k < count; k++) {
            const Entry<T> key = at(k);
            convert(key.latent, shape.latent, key.latent_scale, keys + k * width);
            convert(key.rotated, shape.rotated, key.rotated_scale, keys + k * width + shape.latent);
            std::fill_n(keys + k * width + shape.dim(), width - shape.dim(), bf16{});
        }
        // Rows after the last key get a weight of 0, so they must not be NaN.
        std::fill_n(keys + count * width, (whole - count) * width, bf16{});
        for (int64_t k = 0; k < whole; k += W) {
            for (int64_t d = 0; d < shape.latent; d += W) {
                vf x[W];
                for (int64_t i = 0; i < W; i++) x[i] = load(keys + (k + i) * width + d);
                transpose(x);
                for (int64_t i = 0; i < W; i++) store(values + (d + i) * BLOCK + k, x[i]);
            }
        }
        return;
    }
#endif
    for (int64_t k = 0; k < count; k++) {
        const Entry<T> key = at(k);
        float* to = tile.keys + k * tile.rows;
        convert(key.latent, shape.latent, key.latent_scale, to);
        convert(key.rotated, shape.rotated, key.rotated_scale, to + shape.latent);
        std::fill_n(to + shape.dim(), tile.rows - shape.dim(), 0.0f);
    }
    std::fill(tile.keys + count * tile.rows, tile.keys + round_up(count, ROWS) * tile.rows, 0.0f);
}

// Where an item's tile is in the parts of its merge, one vector of columns after the other.
template <typename Use>
void each_vector(const Tile& tile, const LatentShape& shape, int64_t columns, float* part, Use use) {
    for (int64_t c = 0; c < columns; c += W, part += (shape.latent + 2) * W) {
        use(c, tile.sums + c / PANEL * tile.rows * PANEL + c % PANEL, part, part + shape.latent * W);
    }
}

void put_part(const Tile& tile, const LatentShape& shape, int64_t columns, float* part) {
    each_vector(tile, shape, columns, part, [&](int64_t c, const float* sums, float* to, float* ends) {
        for (int64_t d = 0; d < shape.latent; d++) store(to + d * W, load(sums + d * PANEL));
        store(ends, load(tile.largest + c));
        store(ends + W, load(tile.weights + c));
    });
}

// Adds up all parts, in order, into a tile.
void combine(const Tile& tile, const LatentShape& shape, int64_t columns, float* parts, int64_t count) {
    const int64_t size = part_size(shape, columns);
    each_vector(tile, shape, columns, parts, [&](int64_t c, float* sums, float* from, float* ends) {
        vf largest = load(ends), weights = {};
        for (int64_t i = 1; i < count; i++) largest = larger(largest, load(ends + i * size));
        for (int64_t i = 0; i < count; i++) {
            const vf scale = exp2_nonpositive(load(ends + i * size) - largest);
            weights = fused(scale, load(ends + i * size + W), weights);
            for (int64_t d = 0; d < shape.latent; d++) {
                const vf before = i == 0 ? vf{} : load(sums + d * PANEL);
                store(sums + d * PANEL, fused(scale, load(from + i * size + d * W), before));
            }
        }
        store(tile.weights + c, weights);
    });
}

template <typename T, typename P>
void attend(const LatentArgs& args, int thread, int threads) {
    [[maybe_unused]] typename P::Registers registers;
    LatentStep& step = *args.step;
    const LatentShape& shape = step.shape;
    const int64_t dim = shape.dim(), heads = shape.heads;
    float* workspace = thread_workspace(Tile(dim, COLUMNS, nullptr).size);
    for (size_t share = thread; share < step.items.size(); share += threads) {
        for (const LatentItem& item : step.items[share]) {
            const Row& row = step.rows[item.row];
            Tile tile(dim, item.columns, workspace);
            if constexpr (std::is_same_v<P, VectorProducts>) tile.values = tile.keys;
            const int64_t first = row.token * heads + item.column;
            const Columns queries{const_cast<float*>(args.query) + first * dim, dim, 1, dim};
            take_queries<P>(tile, queries, item.columns, 1.44269504f * args.scale);  // weights are powers of 2
            const int64_t position = row.start + item.column / heads;
            begin_tile(tile, item.columns, heads, position, 0, item.column % heads);
            for (int64_t begin = item.key_first; begin < item.key_last; begin += BLOCK) {
                const int64_t count = std::min(BLOCK, item.key_last - begin);
                take<T, P>(tile, args, row, begin, count);
                attend_panels<P>(tile, item.columns, {dim, shape.latent}, begin, count);
            }
            if (item.merge >= 0) {
                const LatentMerge& merge = step.merges[item.merge];
                float* parts = step.parts.data() + merge.first;
                put_part(tile, shape, item.columns, parts + item.part * part_size(shape, item.columns));
                std::atomic<int32_t>& pending = step.pending[item.merge];
                if (pending.fetch_sub(1, std::memory_order_acq_rel) != 1) continue;
                pending.store(int32_t(merge.parts), std::memory_order_relaxed);
                combine(tile, shape, item.columns, parts, merge.parts);
            }
            put_sums(tile, {args.out + first * shape.latent, shape.latent, 1, shape.latent}, item.columns);
        }
    }
}

template <typename T>
void attend(const LatentArgs& args, int thread, int threads) {
#ifdef KVRELAY_TILES
    if constexpr (!std::is_same_v<T, float>) {
        if (tiles::used && args.step->shape.latent % W == 0) return attend<T, TileProducts>(args, thread, threads);
    }
#endif
    attend<T, VectorProducts>(args, thread, threads);
}

template <typename T>
void write(const LatentWriteArgs& args, int64_t token) {
    const LatentShape& shape = args.step->shape;
    const LatentPlace place = args.step->places[token];
    const auto put_row = [&](const float* from, int64_t width, void* pool, int64_t stride) {
        T* plane = static_cast<T*>(pool) + place.block * stride;
        T* to = plane + place.slot * width;
        if constexpr (scaled<T>) {
            reinterpret_cast<bf16*>(plane + shape.block_size * width)[place.slot] = quantize(from, width, to);
        } else {
            convert(from, width, 1.0f, to);
        }
    };
    put_row(args.latents + token * shape.latent, shape.latent, args.latent_pool, shape.latent_stride);
    put_row(args.rotated + token * shape.rotated, shape.rotated, args.rotated_pool, shape.rotated_stride);
}

// Outputs [n, n + N * W) of up to TOKENS tokens and one head; `part` of the last vector if that isn't 0.
template <typename T, int COUNT, int N>
void multiply(const HeadProductsArgs& args, int64_t token, int64_t head, int64_t n, int64_t part) {
    const T* weight = static_cast<const T*>(args.weight) + head * args.inputs * args.outputs + n;
    const float* in[COUNT];
    vf x[COUNT][N] = {};
    for (int i = 0; i < COUNT; i++) in[i] = args.in + (token + i) * args.in_token + head * args.in_head;
    for (int64_t k = 0; k < args.inputs; k++, weight += args.outputs) {
        vf y[N];
        for (int j = 0; j < N; j++) y[j] = part ? load(weight, part) : load(weight + j * W);
        for (int i = 0; i < COUNT; i++) {
            for (int j = 0; j < N; j++) x[i][j] = fused(splat(in[i][k]), y[j], x[i][j]);
        }
    }
    for (int i = 0; i < COUNT; i++) {
        float* to = args.out + (token + i) * args.out_token + head * args.out_head + n;
        for (int j = 0; j < N; j++) part ? store(to, x[i][j], part) : store(to + j * W, x[i][j]);
    }
}

template <typename T, int COUNT>
void multiply_width(const HeadProductsArgs& args, int64_t token, int64_t head, int64_t n, int64_t width) {
    int64_t end = n + width;
    for (; n + 4 * W <= end; n += 4 * W) multiply<T, COUNT, 4>(args, token, head, n, 0);
    for (; n + W <= end; n += W) multiply<T, COUNT, 1>(args, token, head, n, 0);
    if (n < end) multiply<T, COUNT, 1>(args, token, head, n, end - n);
}

template <typename T>
void multiply(const HeadProductsArgs& args, int thread, int threads) {
    constexpr int64_t WIDTH = 4 * W;
    const int64_t tokens = args.step->places.size();
    const int64_t pieces = divide_up(args.outputs, WIDTH);
    const Share share(args.step->shape.heads * pieces, thread, threads);
    for (int64_t i = share.begin; i < share.end; i++) {
        const int64_t head = i / pieces, n = i % pieces * WIDTH, width = std::min(WIDTH, args.outputs - n);
        int64_t token = 0;
        for (; token + TOKENS <= tokens; token += TOKENS) multiply_width<T, TOKENS>(args, token, head, n, width);
        for (; token < tokens; token++) multiply_width<T, 1>(args, token, head, n, width);
    }
}

}  // namespace

LatentStep* kvrelay_latent_new(const LatentShape* shape) {
    auto* step = new (std::nothrow) LatentStep();
    if (step != nullptr) step->shape = *shape;
    return step;
}

void kvrelay_latent_free(LatentStep* step) { delete step; }

bool kvrelay_latent_plan(
    LatentStep* step, int64_t rows, const int64_t* starts, const int64_t* lengths, const int64_t* tables, int64_t width
) try {
    const int64_t size = step->shape.block_size;
    step->blocks.assign(tables, tables + rows * width);
    step->rows.clear();
    step->places.clear();
    int64_t token = 0;
    for (int64_t r = 0; r < rows; token += lengths[r++]) {
        const int64_t* blocks = step->blocks.data() + r * width;
        step->rows.push_back({token, lengths[r], starts[r], blocks});
        for (int64_t position = starts[r]; position < starts[r] + lengths[r]; position++) {
            step->places.push_back({blocks[position / size], position % size});
        }
    }
    step->plan();
    return true;
} catch (const std::bad_alloc&) {
    return false;
}

void kvrelay_latent_write(const void* raw, int thread, int threads) {
    const auto& args = *static_cast<const LatentWriteArgs*>(raw);
    const Share share(int64_t(args.step->places.size()), thread, threads);
    for (int64_t token = share.begin; token < share.end; token++) {
        switch (args.step->shape.kv_type) {
            case KV_FLOAT: write<float>(args, token); break;
            case KV_BF16: write<bf16>(args, token); break;
            case KV_INT8: write<int8_t>(args, token); break;
        }
    }
}

void kvrelay_head_products(const void* raw, int thread, int threads) {
    const auto& args = *static_cast<const HeadProductsArgs*>(raw);
    if (args.bf16) {
        multiply<bf16>(args, thread, threads);
    } else {
        multiply<float>(args, thread, threads);
    }
}

void kvrelay_latent_attention(const void* raw, int thread, int threads) {
    const auto& args = *static_cast<const LatentArgs*>(raw);
    switch (args.step->shape.kv_type) {
        case KV_FLOAT: return attend<float>(args, thread, threads);
        case KV_BF16: return attend<bf16>(args, thread, threads);
        case KV_INT8: return attend<int8_t>(args, thread, threads);
    }
}

int64_t kvrelay_latent_args_bytes(int32_t which) {
    constexpr int64_t bytes[] = {sizeof(LatentShape), sizeof(LatentWriteArgs), sizeof(HeadProductsArgs), sizeof(LatentArgs)};
    return bytes[which];
}
