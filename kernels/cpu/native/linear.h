// Products with packed weights, fused with the norm of their input, and with the bias, residual or gate of their output.
//
// Activations are float32. Weights are float32 or bfloat16, packed into blocks of W outputs, each block contiguous:
//
//     [block][pair of inputs][output in block][input in pair]        bfloat16
//     [block][pair of inputs][input in pair][output in block]        float32
//
// One load of bfloat16 has W outputs for two inputs. That is the operand of AVX512_BF16's dot product; without it, a shift
// and a mask make two vectors of float32. 16 pairs of inputs for 16 outputs are one tile of AMX. Outputs are padded to
// whole blocks, inputs to whole tiles (bfloat16) or pairs. Weights of 4 or 8 bits (codes.h) are decoded to bfloat16, block
// by block: into the L1 cache for the few rows of a decode step, or a panel at a time into the L2 cache for many.
#pragma once

#include <cstdint>

#include "simd.h"
#include "team.h"
#include "tiles.h"

// INT8_INT8 are weights of INT8 that are multiplied with inputs rounded to int8.
enum WeightType : int32_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, INT4 = 3, FLOAT8 = 4, FLOAT4 = 5, INT8_INT8 = 6 };

constexpr int weight_bits(int32_t type) {
    return type == FLOAT32 ? 32 : type == BFLOAT16 ? 16 : type == INT8 || type == FLOAT8 || type == INT8_INT8 ? 8 : 4;
}

enum Epilogue : int32_t {
    STORE = 0,     // out = y
    ADD = 1,       // out += y
    SILU_MUL = 2,  // out = silu(gate) * up: the first and the second half of y
    GELU_MUL = 3,  // out = gelu(gate) * up
    GELU = 4,      // out = gelu(y)
    CLAMPED_GATE = 5,  // out = (up + 1) * gate * sigmoid(alpha * gate), gate at most `limit`, up between -limit and limit
    RELU_SQUARED = 6,  // out = max(y, 0)^2
};

inline bool is_gated(Epilogue epilogue) {
    return epilogue == SILU_MUL || epilogue == GELU_MUL || epilogue == CLAMPED_GATE;
}

struct LinearArgs {
    const int64_t* rows;     // number of rows of the step
    const void* weight;      // packed
    const float* scales;     // of the weights of 4 or 8 bits; see codes.h
    const uint8_t* zeros;
    const float* minima;
    const float* bias;       // [outputs], padded to whole blocks; null: none
    const float* norm;       // [inputs] weights of an RMS norm of `in`; null: none
    const float* in;         // [rows, inputs]
    const int32_t* sources;  // [rows] row of `in` of each; null: they are in order
    float* out;              // [rows, outputs], or half as wide with a gate
    float* workspace;        // kvrelay_linear_workspace(inputs, type) floats for each thread
    int64_t in_stride;       // floats from row to row
    int64_t out_stride;
    int64_t inputs;
    int64_t outputs;         // with a gate an even number of whole blocks
    int64_t group;           // inputs that share a scale
    float eps;
    float limit;             // of CLAMPED_GATE
    float alpha;
    WeightType type;
    Epilogue epilogue;
};

// What one thread computes of a product of `rows` rows.
struct Portion {
    int64_t rows;
    int thread, threads;
    const Share* pairs = nullptr;  // of blocks, for all rows; null: rows and pairs are divided over the threads
};

// A product, without `LinearArgs::rows`.
void multiply_linear(const LinearArgs& args, const Portion& portion);

// Whether the weights' scales, one for each output, are applied to products and not to weights.
inline bool scaled_last(const LinearArgs& args) {
    return weight_bits(args.type) <= 8 && args.group >= args.inputs && args.zeros == nullptr && args.minima == nullptr;
}

// Pairs of inputs of a block, padding included.
inline int64_t packed_pairs(int64_t inputs, int32_t type) {
    if (type == FLOAT32) return divide_up(inputs, 2);
    return round_up(divide_up(inputs, 2), type == BFLOAT16 ? tiles::PAIRS : 2 * tiles::PAIRS);
}

// Offset within a block of the weight of output n and input k.
template <class T>
inline int64_t packed_offset(int64_t n, int64_t k) {
    return k / 2 * 2 * W + (sizeof(T) == 2 ? n * 2 + k % 2 : k % 2 * W + n);
}

extern "C" {
// Outputs of a block.
int32_t kvrelay_block_outputs();
// Bytes of a packed weight [outputs, inputs].
int64_t kvrelay_packed_bytes(int64_t outputs, int64_t inputs, int32_t type);
// Packs a contiguous `weight` [outputs, inputs] of this type; weights of 4 bits come as one code in each byte.
void kvrelay_pack(const void* weight, int64_t outputs, int64_t inputs, int32_t type, void* packed);
int64_t kvrelay_linear_workspace(int64_t inputs, int32_t type);
void kvrelay_linear(const void* args, int thread, int threads);
}
