// Where a sequence's keys and values are in the paged pool.
#pragma once

#include <algorithm>

#include "attention.h"

// Successive keys of one head that lie in one block; each is `token_stride()` numbers from the next.
template <typename T>
struct Segment {
    const T* keys;
    const T* values;
    int64_t count;
};

// Finds keys [first, last) of head `head`, in order; returns the number of segments, at most one for each key.
template <typename T>
inline int64_t find(
    const AttentionShape& shape, const T* pool, const int64_t* blocks, int64_t head, int64_t first, int64_t last,
    Segment<T>* found
) {
    int64_t index = first / shape.block_size, slot = first % shape.block_size, segments = 0;
    for (; first < last; index++, slot = 0) {
        int64_t count = std::min(shape.block_size - slot, last - first);
        const T* keys =
            pool + blocks[index] * shape.block_stride + slot * shape.token_stride() + head * shape.head_dim;
        found[segments++] = {keys, keys + shape.page(), count};
        first += count;
    }
    return segments;
}

// Rows of the pool that will be read soon: fetched into the cache a few lines at a time, between other work, so that
// memory is never idle nor its queue full.
class Ahead {
public:
    // `calls`: how often `fetch` will be called, at least.
    template <typename T>
    void begin(const T* const* rows, int64_t count, int64_t width, int64_t calls) {
        rows_ = reinterpret_cast<const char* const*>(rows);
        end_ = rows_ + count;
        width_ = width * int64_t{sizeof(T)};
        offset_ = 0;
        step_ = (count * ((width_ + 63) / 64) + calls - 1) / std::max<int64_t>(calls, 1);
    }

    void fetch() {
        for (int64_t i = 0; i < step_ && rows_ < end_; i++) {
            __builtin_prefetch(*rows_ + offset_, 0, 2);
            offset_ += 64;
            if (offset_ >= width_) offset_ = 0, rows_++;
        }
    }

private:
    const char* const* rows_ = nullptr;
    const char* const* end_ = nullptr;
    int64_t width_ = 0, offset_ = 0, step_ = 0;
};
