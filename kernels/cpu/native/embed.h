// Embedding of tokens, or of those of a part of the vocabulary; the others become zeros.
#pragma once

#include <cstdint>

#include "linear.h"

struct EmbedArgs {
    const int64_t* rows;
    const int64_t* const* tokens;  // points to the pointer to the step's tokens [rows]
    const void* weight;            // [count, width] of tokens from `first` on
    const float* scales;           // of the weights of 4 or 8 bits, which are packed; see codes.h
    const uint8_t* zeros;
    const float* minima;
    float* out;                    // [rows, width]
    int64_t out_stride;
    int64_t width;
    int64_t group;
    int64_t first;
    int64_t count;
    WeightType type;
    float scale;                   // of all embeddings
    int32_t packed;                // 0: `weight` is contiguous; 1: packed as in linear.h
};

extern "C" {
void kvrelay_embed(const void* args, int thread, int threads);
}
