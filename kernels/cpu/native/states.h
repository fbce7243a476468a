// Layers that keep a state: short causal convolutions, Mamba-2 (SSD), Gated DeltaNet, RWKV-4.
//
// A step has ragged rows of tokens, each with a slot of state, which a kernel reads and overwrites:
//
//     firsts   0       3   4           8           tokens of row r are firsts[r] .. firsts[r + 1]
//     tokens   a a a | b | c c c c                 its state is at state + slots[r] * slot_bytes
//     starts   0     | 9 | 16                      a row that starts at 0 has no state yet: what its slot holds isn't read
//     origins                                      the slot from which a row's state is read, mostly its own
//
// Each thread takes the rows in order, so a row's origin may be the slot of one before: the states behind each of some
// guessed tokens are all kept.
//
// Rows of one token take the recurrent form. Longer ones take the chunk-wise parallel form: CHUNK tokens at a time, as
// products of small matrices, with the state passed from chunk to chunk.
#pragma once

#include <cstdint>

#include "simd.h"

constexpr int64_t CHUNK = 64;

struct StateRows {
    const int64_t* rows;    // [1] number of rows
    const int64_t* firsts;  // [rows + 1]
    const int64_t* starts;  // [rows]
    const int64_t* slots;   // [rows]
    const int64_t* origins; // [rows]
    uint8_t* state;         // of slot 0
    int64_t slot_bytes;     // from slot to slot
};

// The state that a row begins with, and the one that it leaves.
template <class T>
inline const T* origin_of(const StateRows& of, int64_t row) {
    return reinterpret_cast<const T*>(of.state + of.origins[row] * of.slot_bytes);
}
template <class T>
inline T* state_of(const StateRows& of, int64_t row) {
    return reinterpret_cast<T*>(of.state + of.slots[row] * of.slot_bytes);
}

// Copies numbers [begin, end) of the state that a row begins with to its slot, unless that is where they are.
template <class T>
inline void begin_state(const StateRows& of, int64_t row, int64_t begin, int64_t end) {
    if (of.origins[row] == of.slots[row] || of.starts[row] == 0) return;
    memcpy(state_of<T>(of, row) + begin, origin_of<T>(of, row) + begin, (end - begin) * sizeof(T));
}

// With gates, each token has [3, channels] numbers b, c and x: the convolution's inputs are b * x, and out = c * y.
struct ConvArgs {
    StateRows of;            // state: float or bfloat16 [width, channels], the last inputs, oldest first
    void* in;                // [tokens, channels]; with gates, where b * x is put
    void* out;               // [tokens, channels], another one than `in`
    const float* weight;     // [width, channels]
    const float* bias;       // [channels]; null: none
    const float* gates;      // [tokens, 3, channels]; null: none
    int64_t in_stride;       // numbers from token to token
    int64_t out_stride;
    int64_t gates_stride;
    int64_t channels;
    int64_t width;           // taps of the convolution
    int32_t silu;            // 1: out = silu(y)
    int32_t bfloat16;        // 1: in, state and, without gates, out are bfloat16; 0: float
};

// Mamba-2: S = exp(dt A) S + B (dt x)', y = C' S + D x, for each head, with dt = clamp(softplus(dt + dt_bias)).
struct SsdArgs {
    StateRows of;            // state: float [heads, size, dim]
    const void* x;           // [tokens, heads, dim]
    const void* b;           // [tokens, groups, size]
    const void* c;           // [tokens, groups, size]
    const void* dt;          // [tokens, heads]
    float* out;              // [tokens, heads, dim]
    const float* a;          // [heads]
    const float* d;          // [heads]; null: none
    const float* dt_bias;    // [heads]; null: none
    float* workspace;        // kvrelay_ssd_workspace(dim, size) floats for each thread
    int64_t x_stride;        // numbers from token to token
    int64_t b_stride;
    int64_t c_stride;
    int64_t dt_stride;
    int64_t out_stride;
    int64_t heads;
    int64_t groups;
    int64_t dim;
    int64_t size;
    float dt_least;
    float dt_most;
    int32_t softplus;        // 1: dt passes softplus
    int32_t bfloat16;        // 1: x, b, c and dt are bfloat16; 0: float
};

// Gated DeltaNet: S = exp(g) S, S = S + k (beta (v - S' k))', o = S' q / sqrt(key dim), for each head.
struct DeltaArgs {
    StateRows of;            // state: float [heads, key dim, dim]
    const void* q;           // [tokens, key heads, key dim]
    const void* k;           // [tokens, key heads, key dim]
    const void* v;           // [tokens, heads, dim]
    const float* g;          // [tokens, heads] logarithms of decays; with `channels` [tokens, heads, key dim]
    const void* beta;        // [tokens, heads]
    void* out;               // [tokens, heads, dim]
    float* workspace;        // kvrelay_delta_workspace(dim, key dim) floats for each thread
    int64_t q_stride;        // numbers from token to token
    int64_t k_stride;
    int64_t v_stride;
    int64_t g_stride;
    int64_t beta_stride;
    int64_t out_stride;
    int64_t heads;
    int64_t key_heads;       // each serves heads / key_heads consecutive heads
    int64_t dim;
    int64_t key_dim;
    int32_t normalized;      // 1: q and k are scaled to length 1 first
    int32_t channels;        // 1: each row of the state, a channel of the key, has a decay of its own (Kimi Delta Attention)
    int32_t bfloat16;        // 1: q, k, v, beta and out are bfloat16; 0: float
};

// RWKV-4: y = (num + exp(first + k) v) / (den + exp(first + k)), then num = exp(decay) num + exp(k) v and den alike; all
// relative to exp(most), which keeps the exponents small.
struct WkvArgs {
    StateRows of;            // state: float [3, channels] num, den, most
    const void* k;           // [tokens, channels]
    const void* v;           // [tokens, channels]
    void* out;               // [tokens, channels]
    const float* decay;      // [channels] below 0
    const float* first;      // [channels]
    int64_t k_stride;        // numbers from token to token
    int64_t v_stride;
    int64_t out_stride;
    int64_t channels;
    int32_t bfloat16;        // 1: k, v and out are bfloat16; 0: float
};

extern "C" {
void kvrelay_conv(const void* args, int thread, int threads);
int64_t kvrelay_ssd_workspace(int64_t dim, int64_t size);
void kvrelay_ssd(const void* args, int thread, int threads);
int64_t kvrelay_delta_workspace(int64_t dim, int64_t key_dim);
void kvrelay_delta(const void* args, int thread, int threads);
void kvrelay_wkv(const void* args, int thread, int threads);
}
