// Finds and prefetches the keys and values of a sequence in the paged pool.
#pragma once

#include <algorithm>

#include "attention.h"

// Consecutive keys of one head in one block, and their values; each is `token_stride()` numbers from the next.
template <typename T>
struct Segment {
    const T* keys;
    const T* values;
    int64_t count;
    const bf16* key_scales;  // of int8; each is Hkv from the next
    const bf16* value_scales;
};

// Whether numbers of type T are codes, to be multiplied by a scale.
template <typename T>
constexpr bool scaled = std::is_same_v<T, int8_t>;

// Finds keys [first, last) of a KV head, in order. Returns the number of segments, at most one for each key.
template <typename T>
inline int64_t find(
    const AttentionShape& shape, const T* pool, const int64_t* blocks, int64_t head, int64_t first, int64_t last,
    Segment<T>* found
) {
    int64_t index = first / shape.block_size, slot = first % shape.block_size, segments = 0;
    for (; first < last; index++, slot = 0) {
        int64_t count = std::min(shape.block_size - slot, last - first);
        const T* plane = pool + blocks[index] * shape.block_stride;
        const T* keys = plane + slot * shape.token_stride() + head * shape.head_dim;
        found[segments] = {keys, keys + shape.plane_stride, count, nullptr, nullptr};
        if constexpr (scaled<T>) {
            const int64_t scale = slot * shape.kv_heads + head;
            found[segments].key_scales = shape.scales(plane) + scale;
            found[segments].value_scales = shape.scales(plane + shape.plane_stride) + scale;
        }
        segments++;
        first += count;
    }
    return segments;
}

// Prefetches rows of the pool that will be read soon. `fetch` prefetches a few cache lines at a time and is called
// between other work, so that the memory is always busy and its queue never overflows.
class Prefetcher {
public:
    // `calls`: the number of calls of `fetch`, at least.
    template <typename T>
    void begin(const T* const* rows, int64_t count, int64_t width, int64_t calls) {
        rows_ = reinterpret_cast<const char* const*>(rows);
        width_ = width * int64_t{sizeof(T)};
        offset_ = 0;
        left_ = count * divide_up(width_, 64);
        step_ = divide_up(left_, std::max<int64_t>(calls, 1));
    }

    void fetch() {
        const char* const* row = rows_;
        int64_t offset = offset_;
        for (int64_t left = std::min(step_, left_); left > 0; left--) {
            __builtin_prefetch(*row + offset, 0, 2);
            offset += 64;
            if (offset >= width_) offset = 0, row++;
        }
        rows_ = row;
        offset_ = offset;
        left_ -= step_;
    }

private:
    const char* const* rows_ = nullptr;
    int64_t width_ = 0, offset_ = 0, step_ = 0;
    int64_t left_ = 0;  // cache lines
};
