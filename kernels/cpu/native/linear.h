// Products with packed weights, and what is fused with them: the norm ahead, and bias, residual or gate behind.
//
// Activations are float32. Weights are float32 or bfloat16, packed into blocks of W outputs, each block one run:
//
//     [block][pair of inputs][output in block][input in pair]        bfloat16
//     [block][pair of inputs][input in pair][output in block]        float32
//
// so that one load brings W outputs for two inputs: what AVX512_BF16's dot product takes, and what a shift and a mask
// turn into two vectors of float32 where there is none; and 16 pairs of 16 outputs are a tile of AMX as it lies.
// Outputs are padded to whole blocks, inputs to whole tiles (bfloat16) or pairs.
#pragma once

#include <cstdint>

#include "tiles.h"

enum WeightType : int32_t { FLOAT32 = 0, BFLOAT16 = 1 };

enum Epilogue : int32_t {
    STORE = 0,     // out = y
    ADD = 1,       // out += y
    SILU_MUL = 2,  // out = silu(gate) * up: the first and the second half of y
};

struct LinearArgs {
    const int64_t* rows;     // the step's number of rows
    const void* weight;      // packed
    const float* bias;       // [outputs], padded to whole blocks; null: none
    const float* norm;       // [inputs] weights of an RMS norm of `in`; null: none
    const float* in;         // [rows, inputs]
    float* out;              // [rows, outputs], or half as wide with SILU_MUL
    float* scratch;          // kvrelay_linear_scratch(inputs) floats for each thread
    int64_t in_stride;       // floats from row to row
    int64_t out_stride;
    int64_t inputs;
    int64_t outputs;         // with SILU_MUL an even number of whole blocks
    float eps;
    WeightType type;
    Epilogue epilogue;
};

// Pairs of inputs of a block, with those that it is padded with.
inline int64_t packed_pairs(int64_t inputs, int32_t type) {
    const int64_t pairs = (inputs + 1) / 2;
    return type == BFLOAT16 ? (pairs + tiles::PAIRS - 1) / tiles::PAIRS * tiles::PAIRS : pairs;
}

extern "C" {
// Bytes of a packed weight [outputs, inputs].
int64_t kvrelay_packed_bytes(int64_t outputs, int64_t inputs, int32_t type);
// Packs `weight` [outputs, inputs], rows in a run, of the type that it is to have.
void kvrelay_pack(const void* weight, int64_t outputs, int64_t inputs, int32_t type, void* packed);
int64_t kvrelay_linear_scratch(int64_t inputs);
void kvrelay_linear(const void* args, int thread, int threads);
}
