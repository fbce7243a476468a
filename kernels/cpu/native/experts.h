// A layer of experts: each row is computed by the few experts that a router chooses for it, and their results are added up.
//
//     route     scores of all experts -> the chosen ones of each row, and their shares
//     sort      pairs of a row and one of its experts, in the order of the experts
//     grouped   products of each expert's pairs with its own weights, first gate and up, then down
//     combine   sum over a row's experts of share * result
//
// Only the weights of experts that a row has chosen are read, each of them once and by one thread, but for those of an
// expert at the border between two threads' work, whose blocks both share.
#pragma once

#include <cstdint>

#include "linear.h"

enum Scoring : int32_t {
    SOFTMAX = 0,         // over all experts
    SIGMOID = 1,
    SOFTMAX_CHOSEN = 2,  // over the chosen experts
};

struct RouteArgs {
    const int64_t* rows;
    const float* logits;   // [rows, experts]
    const float* bias;     // [experts] what is added to scores to choose, and isn't in shares; null: none
    int32_t* chosen;       // [rows, top]
    float* shares;         // [rows, top]
    float* workspace;      // [threads, 2 * experts + groups]
    int64_t logits_stride;
    int64_t experts;
    int64_t top;
    int64_t groups;        // of consecutive experts, of equal size; 1: none
    int64_t top_groups;    // from which experts are chosen
    int64_t group_best;    // scores of a group, the largest ones, whose sum is the group's
    float scale;           // of shares
    float least;           // is added to the sum that shares are divided by
    Scoring scoring;
    int32_t normalized;    // 1: shares are divided by their sum
};

struct SortArgs {
    const int64_t* rows;
    const int32_t* chosen;  // [rows, top]; numbers of no expert, or of one that isn't here, name none
    const int32_t* slots;   // [phases, all] number of each expert here, for row r in phase r % phases; -1: it isn't here.
                            // null: that in `chosen`
    int32_t* begins;        // [experts + 1] first pair of each expert, in their order
    int32_t* sources;       // [rows * top] row of each pair, in that order
    int32_t* places;        // [rows * top] number of each pair, in the order of rows; -1 without an expert
    int64_t* load;          // [experts] pairs of each expert, which are added; null: none
    int64_t experts;
    int64_t top;
    int64_t all;            // experts that `chosen` may name
    int64_t phases;
};

struct GroupedArgs {
    LinearArgs linear;      // of the first expert; `rows` isn't read, and `sources` are those of all pairs, or null
    const int32_t* begins;  // [experts + 1]
    int64_t experts;
    int64_t weight_bytes;   // from one expert to the next
    int64_t scales;         // numbers of scales, zeros or minima from one expert to the next
    int64_t biases;
};

struct CombineArgs {
    const int64_t* rows;
    const int32_t* places;  // [rows, top]
    const float* shares;    // [rows, top]
    const float* parts;     // [rows * top, width]
    float* out;             // [rows, width]
    int64_t parts_stride;
    int64_t out_stride;
    int64_t width;
    int64_t top;
    int32_t add;            // 1: out += sum; 0: out = sum
};

extern "C" {
void kvrelay_route(const void* args, int thread, int threads);
void kvrelay_sort_pairs(const void* args, int thread, int threads);
void kvrelay_grouped(const void* args, int thread, int threads);
void kvrelay_combine(const void* args, int thread, int threads);
}
