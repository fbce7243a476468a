// Sums and gathers of the ranks of one machine, in memory that they share.
//
// A rank writes its part into its slot, meets the others at a barrier, and reads all slots in order of their ranks, so that
// all get the same bits. The memory is divided into lanes that don't depend on each other: thread t of each rank exchanges
// with thread t of the others only.
//
//     aborted                                  set once and for ever
//     lane 0      bell, arrivals [ranks]       where threads sleep; how many barriers each rank has reached
//     lane 1 ...
//     lane 0      slots [2, ranks]
//     lane 1 ...
//
// A slot of an exchange of all with all is divided into a part for each rank, which begins with the size of the message.
//
// Exchanges use two sets of slots in turn, which makes one barrier enough: a rank that writes for exchange n + 2 has passed
// the barrier of n + 1, which the others reach after they have read what was exchanged in n.
#pragma once

#include <cstdint>

#include "bell.h"
#include "linear.h"

// One rank's end of a group.
struct RankGroup {
    char* memory;        // of kvrelay_ranks_bytes(ranks, lanes, slot_bytes); zeros at first
    int64_t slot_bytes;  // a multiple of 64
    int64_t spin_ns;     // that a thread looks for the others before it sleeps
    int64_t timeout_ns;  // that a rank may come later than this one
    int32_t rank;
    int32_t ranks;
    int32_t lanes;       // that the memory has
    int32_t threads;     // of each rank that share a sum; up to `lanes`
    Failure failure;     // what ended this rank's exchanges for ever
};

struct ReduceArgs {
    const int64_t* rows;
    RankGroup* group;
    const void* part;  // [rows, width]
    void* out;         // [rows, width], perhaps `part`
    int64_t part_stride;  // numbers from row to row
    int64_t out_stride;
    int64_t width;
    WeightType type;      // FLOAT32 or BFLOAT16, of both
    int32_t add;          // 1: out += sum; 0: out = sum
};

struct AllGatherArgs {
    RankGroup* group;
    const char* part;  // [bytes]
    char* out;         // [ranks, bytes]
    int64_t bytes;
};

struct AllToAllArgs {
    RankGroup* group;
    const char* part;     // what each rank gets, one behind the other
    char* out;            // what each rank has sent, one behind the other
    const int64_t* sent;  // [ranks] bytes to each rank
    int64_t* received;    // [ranks] bytes from each rank
    int64_t room;         // bytes of `out`
};

extern "C" {
// After a failure, none of them writes anything.
void kvrelay_all_reduce(const void* args, int thread, int threads);
void kvrelay_all_gather(const void* args, int thread, int threads);
void kvrelay_all_to_all(const void* args, int thread, int threads);
int64_t kvrelay_ranks_bytes(int32_t ranks, int32_t lanes, int64_t slot_bytes);
// Ends the exchanges of all ranks. Any thread.
void kvrelay_ranks_abort(RankGroup* group);
// Whether `rank` has reached fewer barriers than this rank.
int32_t kvrelay_rank_is_late(const RankGroup* group, int32_t rank);
}
