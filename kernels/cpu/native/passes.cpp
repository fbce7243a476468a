#include "passes.h"

#include <cstring>

void kvrelay_gather(const void* raw, int thread, int) {
    const PassArgs& args = *static_cast<const PassArgs*>(raw);
    if (thread != 0 || *args.rows == args.chosen) return;
    for (const TokenRows& buffer : args.gathered) {
        // No row is overwritten before it is read: the last token of row i is token i or one after it.
        for (int64_t row = 0; buffer.rows != nullptr && row < args.chosen; row++) {
            const float* from = buffer.rows + args.last[row] * buffer.stride;
            memmove(buffer.rows + row * buffer.stride, from, buffer.width * sizeof(float));
        }
    }
    *args.rows = args.chosen;
}

void kvrelay_follow(const void* raw, int thread, int) {
    const PassArgs& args = *static_cast<const PassArgs*>(raw);
    if (thread != 0 || --*args.passes == 0) return;
    if (!next_tokens(*args.step)) *args.passes = -1;
    *args.tokens = args.sample->tokens;
    args.sample->tokens += args.chosen;
    args.sample->largest += args.chosen;
    for (int64_t row = 0; row < args.chosen; row++) args.draws[row].position++;
}
