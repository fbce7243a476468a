// Several passes of a decoder in one run of its program: each computes the tokens that the one before it has chosen.
//
//     embed, layers      of all tokens of the pass
//     kvrelay_gather     the hidden states of each row's last token, side by side
//     norm and head, kvrelay_sample
//     kvrelay_follow     makes the chosen tokens those of the next pass
#pragma once

#include <cstdint>

#include "attention.h"
#include "sample.h"

struct PassArgs {
    int64_t* rows;           // of all other kernels: tokens of the pass, then rows that choose one
    const int64_t** tokens;  // of the pass
    float* hidden;           // [tokens, width]
    const int64_t* last;     // [chosen] each row's last token in the first pass, ascending; one for each later
    SampleRow* draws;        // [chosen] moves on with each pass
    SampleArgs* sample;      // its outputs move on with each pass: [passes, chosen]
    AttentionStep* step;
    int64_t* passes;         // that are to run, this one included; below 0 if there was no memory for one
    int64_t hidden_stride;
    int64_t width;
    int64_t chosen;
};

extern "C" {
void kvrelay_gather(const void* args, int thread, int threads);
void kvrelay_follow(const void* args, int thread, int threads);
}
