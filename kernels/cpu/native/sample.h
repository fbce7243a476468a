// From logits to tokens: what `engine/sampling/sampler.py` does, each row on one thread.
//
//     s[v]    = (logits[v] - largest) / temperature
//     kept    = the tokens that pass top-k, then top-p, and min-p
//     token   = argmax over kept v of exp(s[v]) / e[v],  e exponential noise, a function of (seed, position, v) only
//             = the largest logit's token, the first of equal ones, where the temperature is 0 or that logit isn't finite
#pragma once

#include <cstdint>

// How a row's token is chosen; `kernels/cpu/sample.py` packs it.
struct SampleRow {
    uint64_t seed;
    int64_t position;   // of the token to choose, in its sequence
    double top_p;       // 1 keeps all
    int64_t top_k;      // 0 keeps all
    float temperature;  // 0 is greedy
    float lowest;       // the logarithm of min_p: s below it isn't kept
};

struct SampleArgs {
    const int64_t* rows;
    float* in;               // [rows, width]; overwritten in rows that are drawn
    const SampleRow* draws;  // [rows]
    int64_t* tokens;         // [rows]
    float* largest;          // [rows] the largest logit; NaN counts as larger than all
    float* workspace;        // 2 * width floats, rounded up to a multiple of 32, for each thread
    int64_t in_stride;
    int64_t width;
};

extern "C" {
void kvrelay_sample(const void* args, int thread, int threads);
}
