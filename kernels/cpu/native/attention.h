// Causal attention over paged KV; `kernels/reference.py` has the formulas.
//
// A step has one work list for each distinct window of the model's layers. Every layer then runs two kernels:
//
//     kvrelay_rope_kv_write   norm and rotation of queries and keys; writes keys and values into the pool
//     kvrelay_attention       the items of its work list
//
// An item of the list is one of
//
//     decode    a few consecutive query tokens of a sequence, mostly one, against up to CHUNK keys. Limit: memory. Each key
//               and value is read once for all queries and heads that share it. A long context is several items; the
//               last one to finish combines their results.
//     prefill   a tile of query tokens against all keys that they see. Limit: arithmetic.
//
// Chunks begin at fixed keys, so a row's result doesn't depend on the other rows of the step or the number of threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

#include "simd.h"

enum KVType : int32_t { KV_FLOAT = 0, KV_BF16 = 1, KV_INT8 = 2 };

struct AttentionShape {
    int32_t heads, kv_heads, head_dim, block_size;
    int64_t block_stride;  // numbers from one block of the pool to the next
    int64_t plane_stride;  // numbers from a layer's keys in a block to its values
    KVType kv_type;        // of the pool
    int32_t threads;

    int64_t group() const { return heads / kv_heads; }
    int64_t token_stride() const { return int64_t{kv_heads} * head_dim; }

    // Scales of int8 follow the numbers of the plane: bfloat16 [slot, Hkv].
    template <typename P>
    auto scales(P* plane) const {
        using Scale = std::conditional_t<std::is_const_v<P>, const bf16, bf16>;
        return reinterpret_cast<Scale*>(plane + block_size * token_stride());
    }
};

// Where a token's keys are, in every layer.
struct Place {
    int64_t block;  // offset of its block in a layer's pool, in numbers
    int64_t slot;
    int64_t angle;  // index of its rotation
};

struct Row {
    int64_t token;          // index of its first token in the step
    int64_t tokens;         // in this step
    int64_t start;          // tokens of the sequence before this step
    const int64_t* blocks;  // block table
};

struct Item {
    int32_t row;
    int32_t head, heads;    // KV heads [head, head + heads)
    int64_t query, queries; // tokens [query, query + queries) of the row; below 0: of rows before it, in the same sequence
    int64_t key_first, key_last;  // keys [key_first, key_last), as far as a query sees them
    int64_t merge;          // index into `merges` of its first query and head; -1: the item has all keys of its queries
    int64_t part;           // its index among the parts of the merge
    bool decode;
};

// A query token and KV head whose keys are spread over several items.
struct Merge {
    int64_t first, parts;   // parts [first, first + parts) of the work list
};

struct Worklist {
    int64_t window;         // keys that a query sees, itself included; 0 for all
    std::vector<std::vector<Item>> items;  // for each thread
    std::vector<Merge> merges;
    std::unique_ptr<std::atomic<int32_t>[]> pending;  // for each merge: parts that aren't done
    std::vector<float> parts;  // see `Part`

    void plan(const AttentionShape& shape, const std::vector<Row>& rows);
    float* part(const AttentionShape& shape, int64_t index) {
        return parts.data() + index * shape.group() * (shape.head_dim + 2);
    }
};

struct AttentionStep {
    AttentionShape shape;
    std::vector<Worklist> worklists;
    std::vector<Row> rows;
    std::vector<int64_t> blocks;  // the rows' block tables
    std::vector<Place> places;    // of each token
    bool by_position = false;     // whether rotations are those of positions, or of the step's tokens
    // [R, positions or T, D], as `reference.rope` takes them, for each kind of rotation; null rotates nothing
    const float* cos = nullptr;
    const float* sin = nullptr;
    int64_t rotation_stride = 0;  // numbers from one kind to the next
};

struct AttentionArgs {
    AttentionStep* step;
    float* qkv;             // [T, (H + 2 Hkv) * D]: queries, keys, values
    float* out;             // [T, H * D]
    void* pool;             // this layer's keys in block 0; its values follow them
    const float* norm;      // [H + Hkv, D], or null
    const float* sinks;     // [H] scores that take a share of each query's attention for nothing, or null
    int64_t qkv_stride;     // numbers from one token to the next
    int64_t out_stride;
    float eps;
    float softcap;          // scores are c tanh(score / c); 0: they aren't capped
    int32_t worklist;       // index into the step's work lists
    int64_t rotation;       // the layer's kind of rotation

    // Powers of 2 take the place of those of e, so scores, caps and sinks are multiplied by this.
    static constexpr float LOG2_E = 1.44269504f;
    float cap() const { return softcap * LOG2_E; }
    float sink(int64_t head) const { return sinks == nullptr ? -__builtin_inff() : sinks[head] * LOG2_E; }
};

// Makes a step that computes one token more of each row, behind those of `step`. The block tables have room for them, and
// there are rotations for their positions. False if there is no memory.
bool next_tokens(AttentionStep& step);

// Both kernels, for each type of the pool.
void write_float(const AttentionArgs& args, int thread, int threads);
void write_bf16(const AttentionArgs& args, int thread, int threads);
void attend_float(const AttentionArgs& args, int thread, int threads);
void attend_bf16(const AttentionArgs& args, int thread, int threads);
void write_int8(const AttentionArgs& args, int thread, int threads);
void attend_int8(const AttentionArgs& args, int thread, int threads);

extern "C" {
// `windows`: the distinct windows of the layers. Null if there is no memory.
AttentionStep* kvrelay_attention_new(const AttentionShape* shape, const int64_t* windows, int64_t count);
void kvrelay_attention_free(AttentionStep* step);

// Begins a step of `rows` rows; starts and lengths [rows], tables [rows, width]. Copies its arguments. False if there is
// no memory.
bool kvrelay_attention_plan(
    AttentionStep* step, int64_t rows, const int64_t* starts, const int64_t* lengths, const int64_t* tables,
    int64_t width
);
// Sets rotations: `by_position` of every later step, else of the step that was planned last.
void kvrelay_attention_rotate(
    AttentionStep* step, const float* cos, const float* sin, int64_t stride, bool by_position
);

void kvrelay_rope_kv_write(const void* args, int thread, int threads);
void kvrelay_attention(const void* args, int thread, int threads);
}
