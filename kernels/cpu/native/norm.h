// Norms that no product can take over: layer norms, and norms of what a product or several heads have made.
#pragma once

#include <cstdint>

struct NormArgs {
    const int64_t* rows;
    const void* in;       // [rows, width]
    void* out;            // [rows, width], perhaps `in`
    const float* weight;  // [width]
    const float* bias;    // [width]; null: none
    const float* squares; // [rows] sum of squares of whole rows, of which these are a part; null: rows are whole
    int64_t in_stride;    // numbers from row to row
    int64_t out_stride;
    int64_t squares_stride;
    int64_t width;
    int64_t whole_width;  // numbers of a whole row
    float eps;
    int32_t centered;     // 1: a layer norm, which subtracts the mean first; 0: an RMS norm
    int32_t add;          // 1: out += norm; 0: out = norm
    int32_t bfloat16;     // 1: in and out are bfloat16; 0: float
};

extern "C" {
void kvrelay_norm(const void* args, int thread, int threads);
// out [rows] = sum of squares of each row, all of them float.
void kvrelay_squares(const void* args, int thread, int threads);
}
