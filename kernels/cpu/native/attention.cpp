// The micro-kernels are loops of constant bounds over vectors that must end up in registers: GCC unrolls those at -O3
// only, and without it prefill is four times slower.
#ifndef __clang__
#pragma GCC optimize("O3")
#endif

#include "attention.h"

#include <algorithm>
#include <cstdlib>
#include <new>

#include "attention_decode.h"
#include "attention_prefill.h"
#include "attention_tiles.h"
#include "team.h"
#include "tiles.h"

namespace {

// Rows of up to so many queries a KV head go one token at a time, as in decode; with more, tiles are faster.
constexpr int64_t FEW_QUERIES = 8;

// Costs of items, in about the same unit: keys times what one takes.
constexpr double DECODE_KEY = 35.0;     // for each HEADS query heads
constexpr double PREFILL_KEY = 220.0;   // for each panel
constexpr double TILED_KEY = 50.0;      // the same by AMX

// Memory of a thread, kept and grown.
float* scratch(int64_t count) {
    struct Room {
        float* at = nullptr;
        int64_t size = 0;
        ~Room() { free(at); }
    };
    static thread_local Room room;
    if (count > room.size) {
        free(room.at);
        room.at = static_cast<float*>(aligned_alloc(64, round_up(count * int64_t{sizeof(float)}, 64)));
        if (room.at == nullptr) abort();
        room.size = count;
    }
    return room.at;
}

template <typename T>
void write(const AttentionArgs& args, int64_t token, int64_t head) {
    const AttentionStep& step = *args.step;
    const AttentionShape& shape = step.shape;
    const int64_t dim = shape.head_dim, half = dim / 2;
    float* x = args.qkv + token * args.qkv_stride + head * dim;
    const int64_t key = head - shape.heads;  // KV heads' keys, then their values
    if (key < shape.kv_heads) {
        if (args.norm != nullptr) {
            float lanes[W] = {};
            for (int64_t d = 0; d < dim; d++) lanes[d % W] += x[d] * x[d];
            const float scale = 1.0f / __builtin_sqrtf(sum(load(lanes)) / dim + args.eps);
            const float* weight = args.norm + head * dim;
            for (int64_t d = 0; d < dim; d++) x[d] *= scale * weight[d];
        }
        const float *cos = step.cos + token * dim, *sin = step.sin + token * dim;
        for (int64_t d = 0; d < half; d++) {
            const float first = x[d], second = x[d + half];
            x[d] = first * cos[d] + second * sin[d];
            x[d + half] = second * cos[d + half] + first * sin[d + half];
        }
    }
    if (key < 0) return;
    const bool value = key >= shape.kv_heads;
    T* to = static_cast<T*>(args.pool) + step.slots[token] + (value ? shape.page() : 0) +
            (value ? key - shape.kv_heads : key) * dim;
    int64_t d = 0;
    for (; d + W <= dim; d += W) store(to + d, load(x + d));
    for (; d < dim; d++) put(to + d, x[d]);
}

template <typename T>
void write_all(const AttentionArgs& args, int thread, int threads) {
    const AttentionStep& step = *args.step;
    const int64_t heads = step.shape.heads + 2 * step.shape.kv_heads;
    Share share(int64_t(step.slots.size()) * heads, thread, threads);
    for (int64_t i = share.begin; i < share.end; i++) write<T>(args, i / heads, i % heads);
}

template <typename T, typename P>
void attend_all(const AttentionArgs& args, int thread, int threads) {
    [[maybe_unused]] typename P::Registers registers;
    const AttentionShape& shape = args.step->shape;
    Worklist& list = args.step->worklists[args.worklist];
    float* room = scratch(std::max(Tile(shape, tile_tokens(shape), nullptr).size, decode_scratch(shape)));
    for (size_t mine = thread; mine < list.items.size(); mine += threads) {
        const std::vector<Item>& items = list.items[mine];
        for (size_t i = 0; i < items.size(); i++) {
            if (items[i].decode) {
                decode<T>(args, list, items[i], i + 1 < items.size() ? &items[i + 1] : nullptr, room);
            } else {
                prefill<T, P>(args, list, items[i], room);
            }
        }
    }
}

}  // namespace

void Worklist::plan(const AttentionShape& shape, const std::vector<Row>& rows) {
    merges.clear();
    int64_t next_part = 0;
    std::vector<std::pair<double, Item>> made;
    const int64_t group = shape.group();
    const double key_cost = shape.kv_bf16 && tiles::used ? TILED_KEY : PREFILL_KEY;
    auto first_seen = [&](int64_t position) { return window ? std::max<int64_t>(0, position - window + 1) : 0; };

    // Fewer, larger items read memory in longer runs; they must still be enough to go round.
    int64_t chunks = 0;
    for (const Row& row : rows) chunks += row.tokens * ((row.start + row.tokens + CHUNK - 1) / CHUNK);
    const int32_t together = chunks >= 8 * shape.threads ? shape.kv_heads : 1;

    for (int32_t r = 0; r < int32_t(rows.size()); r++) {
        const Row& row = rows[r];
        if (row.tokens == 1 || row.tokens * group <= FEW_QUERIES) {
            for (int64_t query = 0; query < row.tokens; query++) {
                const int64_t last = row.start + query + 1, first = first_seen(last - 1);
                const int64_t parts = (last - first + CHUNK - 1) / CHUNK;
                const int64_t merge = parts > 1 ? int64_t(merges.size()) : -1;
                for (int64_t head = 0; head < shape.kv_heads && parts > 1; head++, next_part += parts) {
                    merges.push_back({next_part, parts});
                }
                for (int64_t part = 0; part < parts; part++) {
                    const int64_t begin = first + part * CHUNK, end = std::min(begin + CHUNK, last);
                    for (int32_t head = 0; head < shape.kv_heads; head += together) {
                        const double cost = DECODE_KEY * (end - begin) * together * ((group + HEADS - 1) / HEADS);
                        made.push_back(
                            {cost, {r, head, together, query, 1, begin, end, merge < 0 ? -1 : merge + head, part, true}}
                        );
                    }
                }
            }
            continue;
        }
        for (int64_t query = 0; query < row.tokens; query += tile_tokens(shape)) {
            const int64_t queries = std::min(tile_tokens(shape), row.tokens - query);
            const int64_t first = first_seen(row.start + query), last = row.start + query + queries;
            for (int32_t head = 0; head < shape.kv_heads; head++) {
                const double cost = key_cost * (last - first) * ((queries * group + PANEL - 1) / PANEL);
                made.push_back({cost, {r, head, 1, query, queries, first, last, -1, 0, false}});
            }
        }
    }

    // The most expensive first, each to whoever has least.
    std::stable_sort(made.begin(), made.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    items.resize(shape.threads);
    for (auto& mine : items) mine.clear();
    std::vector<double> load(shape.threads);
    for (const auto& [cost, item] : made) {
        const size_t least = std::min_element(load.begin(), load.end()) - load.begin();
        load[least] += cost;
        items[least].push_back(item);
    }

    parts.resize(next_part * Part::size(shape));
    pending = std::make_unique<std::atomic<int32_t>[]>(merges.size());
    for (size_t i = 0; i < merges.size(); i++) pending[i].store(int32_t(merges[i].parts), std::memory_order_relaxed);
}

AttentionStep* kvrelay_attention_new(const AttentionShape* shape, const int64_t* windows, int64_t count) try {
    auto step = std::make_unique<AttentionStep>();
    step->shape = *shape;
    step->worklists.resize(count);
    for (int64_t i = 0; i < count; i++) step->worklists[i].window = windows[i];
    return step.release();
} catch (const std::bad_alloc&) {
    return nullptr;
}

void kvrelay_attention_free(AttentionStep* step) { delete step; }

bool kvrelay_attention_plan(
    AttentionStep* step, int64_t rows, const int64_t* starts, const int64_t* lengths, const int64_t* tables,
    int64_t width
) try {
    const AttentionShape& shape = step->shape;
    step->blocks.assign(tables, tables + rows * width);
    step->rows.clear();
    step->slots.clear();
    int64_t token = 0;
    for (int64_t r = 0; r < rows; token += lengths[r++]) {
        const int64_t* blocks = step->blocks.data() + r * width;
        step->rows.push_back({token, lengths[r], starts[r], blocks});
        for (int64_t position = starts[r]; position < starts[r] + lengths[r]; position++) {
            const int64_t slot = position % shape.block_size;
            step->slots.push_back(blocks[position / shape.block_size] * shape.block_stride + slot * shape.token_stride());
        }
    }
    for (Worklist& list : step->worklists) list.plan(shape, step->rows);
    return true;
} catch (const std::bad_alloc&) {
    return false;
}

void kvrelay_attention_rotate(AttentionStep* step, const float* cos, const float* sin) {
    step->cos = cos;
    step->sin = sin;
}

void kvrelay_rope_kv_write(const void* args, int thread, int threads) {
    const auto& a = *static_cast<const AttentionArgs*>(args);
    a.step->shape.kv_bf16 ? write_all<bf16>(a, thread, threads) : write_all<float>(a, thread, threads);
}

void kvrelay_attention(const void* args, int thread, int threads) {
    const auto& a = *static_cast<const AttentionArgs*>(args);
    if (!a.step->shape.kv_bf16) {
        attend_all<float, VectorProducts>(a, thread, threads);
#ifdef KVRELAY_TILES
    } else if (tiles::used) {
        attend_all<bf16, TileProducts>(a, thread, threads);
#endif
    } else {
        attend_all<bf16, VectorProducts>(a, thread, threads);
    }
}
