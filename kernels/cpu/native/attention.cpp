#include "attention.h"

#include <algorithm>
#include <new>

#include "attention_decode.h"
#include "attention_prefill.h"
#include "embed.h"
#include "norm.h"
#include "passes.h"
#include "tiles.h"

namespace {

// Rows of up to this many queries for each KV head are processed token by token, as in decode; above, tiles are faster.
constexpr int64_t FEW_QUERIES = 8;

// Relative cost of one key, measured.
constexpr double DECODE_KEY = 35.0;     // for each HEADS query heads
constexpr double PREFILL_KEY = 220.0;   // for each panel
constexpr double TILED_KEY = 50.0;      // for each panel, by AMX

// Whether `next` is the token behind a row's last one, in the same sequence: a guess of it.
bool continues(const AttentionShape& shape, const Row& row, const Row& next) {
    const int64_t end = row.start + row.tokens;
    if (next.tokens != 1 || next.start != end) return false;
    return std::equal(row.blocks, row.blocks + divide_up(end, shape.block_size), next.blocks);
}

}  // namespace

void Worklist::plan(const AttentionShape& shape, const std::vector<Row>& rows) {
    merges.clear();
    int64_t next_part = 0;
    std::vector<std::pair<double, Item>> costed;
    const int64_t group = shape.group();
    const double key_cost = shape.kv_type != KV_FLOAT && tiles::used ? TILED_KEY : PREFILL_KEY;
    auto first_seen = [&](int64_t position) { return window ? std::max<int64_t>(0, position - window + 1) : 0; };

    // Items of all KV heads read memory in longer runs, but there must still be enough items for all threads.
    int64_t chunks = 0, shared = 0;
    for (size_t r = 0; r < rows.size(); r++) {
        int64_t& to = r > 0 && continues(shape, rows[r - 1], rows[r]) ? shared : chunks;
        to += rows[r].tokens * divide_up(rows[r].start + rows[r].tokens, CHUNK);
    }
    chunks += shared / queries_together(shape);
    const int32_t together = chunks >= 8 * shape.threads ? shape.kv_heads : 1;

    // Queries that see the same first key, up to `queries_together`: `query` of row `r` and those after it.
    auto add = [&](int32_t r, int64_t query, int64_t queries) {
        const int64_t position = rows[r].start + query, first = first_seen(position);
        const int64_t last = position + queries, most = divide_up(last - first, CHUNK);
        const int64_t merge = most > 1 ? int64_t(merges.size()) : -1;
        for (int64_t end = position + 1; end <= last && most > 1; end++) {
            const int64_t parts = divide_up(end - first, CHUNK);
            for (int64_t head = 0; head < shape.kv_heads; head++, next_part += parts) merges.push_back({next_part, parts});
        }
        for (int64_t part = 0; part < most; part++) {
            const int64_t begin = first + part * CHUNK, end = std::min(begin + CHUNK, last);
            const int64_t done = std::max<int64_t>(0, begin - position);  // queries that see none of these keys
            for (int32_t head = 0; head < shape.kv_heads; head += together) {
                const double cost = DECODE_KEY * (end - begin) * together * divide_up((queries - done) * group, HEADS);
                const int64_t to = merge < 0 ? -1 : merge + done * shape.kv_heads + head;
                costed.push_back({cost, {r, head, together, query + done, queries - done, begin, end, to, part, true}});
            }
        }
    };

    for (int32_t r = 0; r < int32_t(rows.size()); r++) {
        if (rows[r].tokens == 1 || rows[r].tokens * group <= FEW_QUERIES) {
            int64_t queries = rows[r].tokens;
            for (; r + 1 < int32_t(rows.size()) && continues(shape, rows[r], rows[r + 1]); r++) queries++;
            // The last row's block table has the keys of all.
            const int64_t end = rows[r].tokens;
            for (int64_t query = end - queries; query < end;) {
                int64_t count = std::min(queries_together(shape), end - query);
                if (first_seen(rows[r].start + query + count - 1) > 0) count = 1;
                add(r, query, count);
                query += count;
            }
            continue;
        }
        const Row& row = rows[r];
        for (int64_t query = 0; query < row.tokens; query += tile_tokens(shape)) {
            const int64_t queries = std::min(tile_tokens(shape), row.tokens - query);
            const int64_t first = first_seen(row.start + query), last = row.start + query + queries;
            for (int32_t head = 0; head < shape.kv_heads; head++) {
                const double cost = key_cost * (last - first) * divide_up(queries * group, PANEL);
                costed.push_back({cost, {r, head, 1, query, queries, first, last, -1, 0, false}});
            }
        }
    }

    // Longest processing time first: each item, most expensive first, goes to the thread with the least load.
    std::stable_sort(costed.begin(), costed.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    items.assign(shape.threads, {});
    std::vector<double> load(shape.threads);
    for (const auto& [cost, item] : costed) {
        const size_t least = std::min_element(load.begin(), load.end()) - load.begin();
        load[least] += cost;
        items[least].push_back(item);
    }

    parts.resize(next_part * Part::size(shape));
    pending = std::make_unique<std::atomic<int32_t>[]>(merges.size());
    for (size_t i = 0; i < merges.size(); i++) pending[i].store(int32_t(merges[i].parts), std::memory_order_relaxed);
}

// Places of the step's tokens, and its work lists.
static void find_places(AttentionStep& step) {
    const AttentionShape& shape = step.shape;
    step.places.clear();
    for (const Row& row : step.rows) {
        for (int64_t position = row.start; position < row.start + row.tokens; position++) {
            const int64_t token = row.token + position - row.start, block = row.blocks[position / shape.block_size];
            const int64_t angle = step.by_position ? position : token;
            step.places.push_back({block * shape.block_stride, position % shape.block_size, angle});
        }
    }
    for (Worklist& list : step.worklists) list.plan(shape, step.rows);
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
    step->blocks.assign(tables, tables + rows * width);
    step->rows.clear();
    int64_t token = 0;
    for (int64_t r = 0; r < rows; token += lengths[r++]) {
        step->rows.push_back({token, lengths[r], starts[r], step->blocks.data() + r * width});
    }
    find_places(*step);
    return true;
} catch (const std::bad_alloc&) {
    return false;
}

bool next_tokens(AttentionStep& step) try {
    for (size_t r = 0; r < step.rows.size(); r++) {
        Row& row = step.rows[r];
        row.start += row.tokens;
        row.token = r;
        row.tokens = 1;
    }
    find_places(step);
    return true;
} catch (const std::bad_alloc&) {
    return false;
}

void kvrelay_attention_rotate(
    AttentionStep* step, const float* cos, const float* sin, int64_t stride, bool by_position
) {
    step->rotation_stride = stride;
    step->by_position = by_position;
    step->cos = cos;
    step->sin = sin;
}

void kvrelay_rope_kv_write(const void* args, int thread, int threads) {
    const auto& a = *static_cast<const AttentionArgs*>(args);
    switch (a.step->shape.kv_type) {
        case KV_FLOAT: return write_float(a, thread, threads);
        case KV_BF16: return write_bf16(a, thread, threads);
        case KV_INT8: return write_int8(a, thread, threads);
    }
}

void kvrelay_attention(const void* args, int thread, int threads) {
    const auto& a = *static_cast<const AttentionArgs*>(args);
    switch (a.step->shape.kv_type) {
        case KV_FLOAT: return attend_float(a, thread, threads);
        case KV_BF16: return attend_bf16(a, thread, threads);
        case KV_INT8: return attend_int8(a, thread, threads);
    }
}

// Sizes of the structs that Python fills in; a test compares them with its own.
extern "C" int64_t kvrelay_args_bytes(int32_t which) {
    constexpr int64_t bytes[] = {sizeof(LinearArgs), sizeof(EmbedArgs), sizeof(SampleArgs), sizeof(AttentionArgs),
                                 sizeof(SampleRow), sizeof(PassArgs), sizeof(NormArgs)};
    return bytes[which];
}
