// A team of threads that runs the instructions of a step, with a barrier after each. The threads live as long as the team.
//
// An instruction is a kernel and its arguments. Every thread of the team calls the kernel, which divides its work
// statically by (thread, threads) and needs no lock. All kernels are exported functions of the same type, so a program
// consists of addresses only:
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
// A team of `threads`, including the caller of `kvrelay_team_run`; null if the threads can't be started.
void* kvrelay_team_new(int threads);
// Runs a program of `count` instructions: once, or again as long as `*passes`, which its kernels change, is above 0. It ends
// behind an instruction that has set `*stop`. Either may be null.
void kvrelay_team_run(
    void* team, const Instruction* program, int64_t count, const int64_t* passes, const int32_t* stop
);
void kvrelay_team_free(void* team);
}

// The share [begin, end) of `thread` in `count` items; shares differ by one at most.
struct Share {
    int64_t begin, end;
    Share(int64_t count, int thread, int threads)
        : begin(count * thread / threads), end(count * (thread + 1) / threads) {}
};
