// Attention over latents in a paged pool (multi-head latent attention, DeepSeek-V2, arXiv:2405.04434, section 2.1).
//
// A token keeps a latent of C numbers and a rotated key of R numbers, which all H heads share. The weights that make a
// head's keys and values of a latent are absorbed into its query and its result:
//
//     absorbed[h]  = query[h] . weight_k[h]                                          kvrelay_head_products
//     scores[h, j] = absorbed[h] . latent[j] + rotated query[h] . rotated key[j]     kvrelay_latent_attention
//     sums[h]      = softmax(scores[h]) . latent
//     out[h]       = sums[h] . weight_v[h]                                           kvrelay_head_products
//
// So one track is read for all heads. Columns of a tile (`attention_prefill.h`) are the heads of a token, and of those
// behind it. A long context is several items, the last of which to finish combines their results.
//
// Limit: memory, (C + R) numbers a key; from about 16 heads on arithmetic, 2 * (2 C + R) operations for a key and head.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "attention.h"

struct LatentShape {
    int32_t heads, latent, rotated, block_size;  // latent, rotated: C and R
    int64_t latent_stride, rotated_stride;       // numbers from one block of each pool to the next
    KVType kv_type;                              // of both pools
    int32_t threads;

    int64_t dim() const { return int64_t{latent} + rotated; }
};

// Where a token's numbers are: a block, and a slot in it.
struct LatentPlace {
    int64_t block, slot;
};

// Columns [column, column + columns) of a row against keys [key_first, key_last).
struct LatentItem {
    int32_t row;
    int64_t column, columns;
    int64_t key_first, key_last;
    int64_t merge;  // index into `merges`; -1: the item has all keys of its columns
    int64_t part;   // its index among the parts of the merge
};

// Columns whose keys are spread over several items.
struct LatentMerge {
    int64_t first;  // offset of its first part
    int64_t parts;
};

struct LatentStep {
    LatentShape shape;
    std::vector<Row> rows;
    std::vector<int64_t> blocks;         // the rows' block tables
    std::vector<LatentPlace> places;     // of each token
    std::vector<std::vector<LatentItem>> items;  // for each thread
    std::vector<LatentMerge> merges;
    std::unique_ptr<std::atomic<int32_t>[]> pending;  // for each merge: parts that aren't done
    std::vector<float> parts;

    void plan();
};

struct LatentWriteArgs {
    LatentStep* step;
    const float* latents;  // [T, C]
    const float* rotated;  // [T, R]
    void* latent_pool;     // this layer's latents in block 0
    void* rotated_pool;
};

// out[t, h] [N] = in[t, h] [K] . weight[h] [K, N] of the step's tokens.
struct HeadProductsArgs {
    LatentStep* step;
    const float* in;
    const void* weight;    // [H, K, N]
    float* out;
    int64_t in_token, in_head;    // numbers from one token, and one head, to the next
    int64_t out_token, out_head;
    int64_t inputs, outputs;      // K and N
    int64_t bf16;                 // 1: the weight is bfloat16; 0: float32
};

struct LatentArgs {
    LatentStep* step;
    const float* query;    // [T, H, C + R]
    float* out;            // [T, H, C]
    const void* latent_pool;
    const void* rotated_pool;
    float scale;           // of the scores
};

extern "C" {
// Null if there is no memory.
LatentStep* kvrelay_latent_new(const LatentShape* shape);
void kvrelay_latent_free(LatentStep* step);
// Begins a step of `rows` rows; starts and lengths [rows], tables [rows, width]. Copies its arguments. False if there is
// no memory.
bool kvrelay_latent_plan(
    LatentStep* step, int64_t rows, const int64_t* starts, const int64_t* lengths, const int64_t* tables, int64_t width
);
void kvrelay_latent_write(const void* args, int thread, int threads);
void kvrelay_head_products(const void* args, int thread, int threads);
void kvrelay_latent_attention(const void* args, int thread, int threads);
int64_t kvrelay_latent_args_bytes(int32_t which);
}
