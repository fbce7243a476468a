// Several passes of a decoder in one run of its program: each computes the tokens that the one before it has chosen.
//
//     embed, layers      of all tokens of the pass, up to the last layer's attention
//     kvrelay_gather     what the last layer has of each row's last token, side by side: nothing else is needed any more
//     rest of the last layer, norm and head, kvrelay_sample
//     kvrelay_follow     makes the chosen tokens those of the next pass
#pragma once

#include <cstdint>

#include "attention.h"
#include "sample.h"

// A buffer of a row for each token.
struct TokenRows {
    float* rows;     // [tokens, width]; null: none
    int64_t stride;  // numbers from one row to the next
    int64_t width;
};

struct PassArgs {
    int64_t* rows;           // of all other kernels: tokens of the pass, then rows that choose one
    const int64_t** tokens;  // of the pass
    const int64_t* last;     // [chosen] each row's last token in the first pass, ascending; one for each later
    SampleRow* draws;        // [chosen] moves on with each pass
    SampleArgs* sample;      // its outputs move on with each pass: [passes, chosen]
    AttentionStep* step;
    int64_t* passes;         // that are to run, this one included; below 0 if there was no memory for one
    int64_t chosen;
    TokenRows gathered[3];
};

extern "C" {
void kvrelay_gather(const void* args, int thread, int threads);
void kvrelay_follow(const void* args, int thread, int threads);
}
