// What works on single rows: looking tokens up, and finding the largest logit.
#pragma once

#include <cstdint>

#include "linear.h"

struct EmbedArgs {
    const int64_t* rows;
    const int64_t* const* tokens;  // points at the step's tokens [rows]
    const void* weight;            // [vocabulary, width]
    float* out;                    // [rows, width]
    int64_t out_stride;
    int64_t width;
    WeightType type;
    int32_t packed;                // 0: rows of `weight` lie in a run; else it is as linear.h packs it
};

struct ArgmaxArgs {
    const int64_t* rows;
    const float* in;  // [rows, width]
    int64_t in_stride;
    int64_t width;
    int64_t* tokens;  // [rows] where the largest is, the first of equals; a NaN counts as largest
    float* largest;   // [rows] what is there
};

extern "C" {
void kvrelay_embed(const void* args, int thread, int threads);
void kvrelay_argmax(const void* args, int thread, int threads);
}
