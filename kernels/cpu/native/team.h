// A kept team of threads that runs a step's instructions, with a barrier after each.
//
// An instruction is a kernel and its arguments. Every thread of the team calls it; the kernel shares its work out
// statically by (thread, threads) and needs no lock. Kernels are exported functions of this one type, so that whoever
// records a program needs nothing but their addresses:
//
//     extern "C" void kvrelay_something(const void* args, int thread, int threads);
#pragma once

#include <cstdint>

using Kernel = void (*)(const void* args, int thread, int threads);

struct Instruction {
    Kernel kernel;
    const void* args;
};

extern "C" {
// A team of `threads`, the caller of `kvrelay_team_run` being one of them; null if the threads can't be had.
void* kvrelay_team_new(int threads);
void kvrelay_team_run(void* team, const Instruction* program, int64_t count);
void kvrelay_team_free(void* team);
}

// The part [begin, end) of `count` things that is `thread`'s: shares differ by one at most.
struct Share {
    int64_t begin, end;
    Share(int64_t count, int thread, int threads)
        : begin(count * thread / threads), end(count * (thread + 1) / threads) {}
};
