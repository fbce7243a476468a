// Kernels that work on single rows: embedding of tokens, and argmax of logits.
#pragma once

#include <cstdint>

#include "linear.h"

struct EmbedArgs {
    const int64_t* rows;
    const int64_t* const* tokens;  // points to the pointer to the step's tokens [rows]
    const void* weight;            // [vocabulary, width]
    const float* scales;           // of the weights of 4 or 8 bits, which are packed; see codes.h
    const uint8_t* zeros;
    float* out;                    // [rows, width]
    int64_t out_stride;
    int64_t width;
    int64_t group;
    WeightType type;
    int32_t packed;                // 0: `weight` is contiguous; 1: packed as in linear.h
};

struct ArgmaxArgs {
    const int64_t* rows;
    const float* in;  // [rows, width]
    int64_t in_stride;
    int64_t width;
    int64_t* tokens;  // [rows] index of the largest number, the first of equal ones; NaN counts as larger than all
    float* largest;   // [rows] that number
};

extern "C" {
void kvrelay_embed(const void* args, int thread, int threads);
void kvrelay_argmax(const void* args, int thread, int threads);
}
