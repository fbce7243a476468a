#include "reduce.h"

#include <algorithm>

#include "simd.h"
#include "team.h"

namespace {

// Written by its rank only.
struct alignas(LINE) Arrival {
    Word barriers;
    uint32_t exchanges;
};

Word& aborted(const RankGroup& group) { return *reinterpret_cast<Word*>(group.memory); }

int64_t lane_bytes(int64_t ranks) { return sizeof(Bell) + ranks * sizeof(Arrival); }

int64_t slots_begin(int64_t ranks, int64_t lanes) { return round_up(LINE + lanes * lane_bytes(ranks), PAGE); }

// One rank's end of one lane.
class Lane {
public:
    Lane(RankGroup& group, int number)
        : group_(group), bell_(*reinterpret_cast<Bell*>(group.memory + LINE + number * lane_bytes(group.ranks))),
          arrivals_(reinterpret_cast<Arrival*>(&bell_ + 1)), mine_(arrivals_[group.rank]),
          slots_(group.memory + slots_begin(group.ranks, group.lanes) + number * 2 * group.ranks * group.slot_bytes) {}

    // Begins an exchange: the slot of rank 0 for it; those of the others follow, `slot_bytes` apart.
    char* begin() { return slots_ + mine_.exchanges++ % 2 * group_.ranks * group_.slot_bytes; }

    // Waits until all ranks have come to this barrier; false after a failure.
    bool meet() {
        const uint32_t number = mine_.barriers.load(std::memory_order_relaxed) + 1;
        mine_.barriers.store(number);
        // The last rank to come sees all others here, and wakes those that sleep.
        if (all_at(number)) {
            if (bell_.sleepers.load()) ring(bell_);
            return true;
        }
        const Failure failure =
            wait_at(bell_, aborted(group_), group_.spin_ns, group_.timeout_ns, [&] { return all_at(number); });
        if (failure == NO_FAILURE) return true;
        fail(failure);
        return false;
    }

    void fail(Failure failure) {
        keep_first(group_.failure, failure);
        kvrelay_ranks_abort(&group_);
    }

    uint32_t barriers(int rank) const { return arrivals_[rank].barriers.load(); }
    Bell& bell() { return bell_; }

private:
    bool all_at(uint32_t number) const {
        for (int rank = 0; rank < group_.ranks; rank++) {
            // The numbers may wrap around.
            if (int32_t(barriers(rank) - number) < 0) return false;
        }
        return true;
    }

    RankGroup& group_;
    Bell& bell_;
    Arrival* const arrivals_;
    Arrival& mine_;
    char* const slots_;
};

// Whether the exchanges may go on; makes the failure known to this rank if they may not.
bool open(RankGroup& group, Lane& lane) {
    if (!aborted(group).load()) return true;
    lane.fail(ABORTED);
    return false;
}

// out = the sum of `parts` parts, `apart` numbers from one to the next, in their order; added to what is there if `add`.
template <class T>
void add_up(const T* first, int64_t apart, int parts, T* out, int64_t count, bool add) {
    int64_t i = 0;
    for (; i + W <= count; i += W) {
        vf total = load(first + i);
        for (int part = 1; part < parts; part++) total = total + load(first + part * apart + i);
        store(out + i, add ? load(out + i) + total : total);
    }
    for (; i < count; i++) {
        float total = number(first[i]);
        for (int part = 1; part < parts; part++) total += number(first[part * apart + i]);
        put(out + i, add ? number(out[i]) + total : total);
    }
}

// Calls `act(offset, row, column, count)` for the part of each row in numbers [begin, end) of rows of this width; `offset` is
// from `begin`.
template <class Act>
void by_rows(int64_t begin, int64_t end, int64_t width, Act act) {
    for (int64_t at = begin; at < end;) {
        const int64_t row = at / width, column = at % width, count = std::min(width - column, end - at);
        act(at - begin, row, column, count);
        at += count;
    }
}

// The share of a thread in `count` numbers, in whole cache lines.
Share lines_of(int64_t count, int64_t number_bytes, int thread, int threads) {
    const int64_t each = LINE / number_bytes;
    Share share(divide_up(count, each), thread, threads);
    share.begin = std::min(count, share.begin * each);
    share.end = std::min(count, share.end * each);
    return share;
}

// Sums numbers [begin, end), which fit into a slot; false after a failure.
template <class T>
bool reduce_piece(const ReduceArgs& args, Lane& lane, int64_t begin, int64_t end) {
    const RankGroup& group = *args.group;
    const int64_t apart = group.slot_bytes / sizeof(T), count = end - begin;
    T *const slots = reinterpret_cast<T*>(lane.begin()), *const mine = slots + group.rank * apart;
    by_rows(begin, end, args.width, [&](int64_t offset, int64_t row, int64_t column, int64_t width) {
        memcpy(mine + offset, static_cast<const T*>(args.part) + row * args.part_stride + column, width * sizeof(T));
    });
    if (!lane.meet()) return false;
    by_rows(begin, end, args.width, [&](int64_t offset, int64_t row, int64_t column, int64_t width) {
        T* out = static_cast<T*>(args.out) + row * args.out_stride + column;
        add_up(slots + offset, apart, group.ranks, out, width, args.add);
    });
    return true;
}

template <class T>
void reduce(const ReduceArgs& args, Lane& lane, Share share) {
    const int64_t piece = args.group->slot_bytes / sizeof(T);
    for (int64_t begin = share.begin; begin < share.end; begin += piece) {
        if (!open(*args.group, lane) || !reduce_piece<T>(args, lane, begin, std::min(begin + piece, share.end))) return;
    }
}

}  // namespace

void kvrelay_all_reduce(const void* raw, int thread, int threads) {
    const ReduceArgs& args = *static_cast<const ReduceArgs*>(raw);
    threads = std::min(threads, args.group->threads);
    if (thread >= threads) return;
    Lane lane(*args.group, thread);
    const int64_t count = *args.rows * args.width;
    if (args.type == BFLOAT16) {
        reduce<bf16>(args, lane, lines_of(count, sizeof(bf16), thread, threads));
    } else {
        reduce<float>(args, lane, lines_of(count, sizeof(float), thread, threads));
    }
}

void kvrelay_all_gather(const void* raw, int thread, int) {
    const AllGatherArgs& args = *static_cast<const AllGatherArgs*>(raw);
    RankGroup& group = *args.group;
    if (thread != 0) return;
    Lane lane(group, 0);
    for (int64_t begin = 0; begin < args.bytes; begin += group.slot_bytes) {
        if (!open(group, lane)) return;
        const int64_t count = std::min(group.slot_bytes, args.bytes - begin);
        char* slots = lane.begin();
        memcpy(slots + group.rank * group.slot_bytes, args.part + begin, count);
        if (!lane.meet()) return;
        for (int rank = 0; rank < group.ranks; rank++) {
            memcpy(args.out + rank * args.bytes + begin, slots + rank * group.slot_bytes, count);
        }
    }
}

void kvrelay_all_to_all(const void* raw, int thread, int) {
    if (thread != 0) return;
    const AllToAllArgs& args = *static_cast<const AllToAllArgs*>(raw);
    RankGroup& group = *args.group;
    Lane lane(group, 0);
    // All ranks see the sizes of all messages, so they agree on the number of pieces.
    const int64_t each = group.slot_bytes / group.ranks / LINE * LINE, piece = each - LINE;
    int64_t longest = 0;
    std::fill(args.received, args.received + group.ranks, 0);
    for (int64_t begin = 0; begin == 0 || begin < longest; begin += piece) {
        if (!open(group, lane)) return;
        char* const slots = lane.begin();
        const auto part = [&](int from, int to) { return slots + from * group.slot_bytes + to * each; };
        const char* source = args.part;
        for (int to = 0; to < group.ranks; source += args.sent[to++]) {
            char* const mine = part(group.rank, to);
            memcpy(mine, args.sent + to, sizeof(int64_t));
            // What a rank sends to itself takes the same way: it is a small part, and in the cache.
            if (begin < args.sent[to]) memcpy(mine + LINE, source + begin, std::min(piece, args.sent[to] - begin));
        }
        if (!lane.meet()) return;
        if (begin == 0) {
            int64_t total = 0;
            for (int from = 0; from < group.ranks; from++) {
                for (int to = 0; to < group.ranks; to++) {
                    int64_t size;
                    memcpy(&size, part(from, to), sizeof size);
                    longest = std::max(longest, size);
                }
                memcpy(args.received + from, part(from, group.rank), sizeof(int64_t));
                total += args.received[from];
            }
            if (total > args.room) {
                lane.fail(MISMATCHED);
                return;
            }
        }
        char* out = args.out;
        for (int from = 0; from < group.ranks; out += args.received[from++]) {
            const int64_t count = std::min(piece, args.received[from] - begin);
            if (count > 0) memcpy(out + begin, part(from, group.rank) + LINE, count);
        }
    }
}

int64_t kvrelay_ranks_bytes(int32_t ranks, int32_t lanes, int64_t slot_bytes) {
    return slots_begin(ranks, lanes) + 2 * int64_t(lanes) * ranks * slot_bytes;
}

void kvrelay_ranks_abort(RankGroup* group) {
    aborted(*group).store(1);
    for (int lane = 0; lane < group->lanes; lane++) ring(Lane(*group, lane).bell());
}

int32_t kvrelay_rank_is_late(const RankGroup* group, int32_t rank) {
    for (int number = 0; number < group->lanes; number++) {
        const Lane lane(*const_cast<RankGroup*>(group), number);
        if (int32_t(lane.barriers(rank) - lane.barriers(group->rank)) < 0) return 1;
    }
    return 0;
}
