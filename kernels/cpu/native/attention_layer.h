// The two kernels of a layer, for a pool of type T. Each T is compiled in its own file, so that they compile in parallel.
#pragma once

// The inner loops have constant bounds and vectors that must stay in registers. GCC unrolls them only at -O3; without it,
// prefill is four times slower.
#ifndef __clang__
#pragma GCC optimize("O3")
#endif

#include <algorithm>
#include <vector>

#include "attention.h"
#include "attention_decode.h"
#include "attention_prefill.h"
#include "team.h"

// This thread's workspace of at least `count` numbers; it is kept for later calls and grows when necessary.
inline float* thread_workspace(int64_t count) {
    struct alignas(64) CacheLine {
        float numbers[16];
    };
    static thread_local std::vector<CacheLine> lines;
    if (count > int64_t(lines.size()) * 16) lines = std::vector<CacheLine>(divide_up(count, 16));
    return lines.data()->numbers;
}

// Writes the codes of x [dim] and returns their scale; `kernels/kv_codes.py` has the formula.
inline bf16 quantize(const float* x, int64_t dim, int8_t* codes) {
    // As integers, because a NaN is larger than all numbers then.
    uint32_t largest = 0;
    for (int64_t d = 0; d < dim; d++) {
        uint32_t bits;
        memcpy(&bits, x + d, sizeof bits);
        largest = std::max(largest, bits & 0x7fffffff);
    }
    float most;
    memcpy(&most, &largest, sizeof most);
    if (most != most) {
        std::fill_n(codes, dim, int8_t{});
        return 0x7fc0;
    }
    most /= 127.0f;
    memcpy(&largest, &most, sizeof most);
    const bf16 scale = most < 0x1p-126f ? 0 : bf16((largest + 0xffff) >> 16);
    const float divisor = number(scale);
    for (int64_t d = 0; d < dim; d++) {
        // The sum is rounded to an integer, ties to even; infinity divided by itself is no number.
        const float code = x[d] / divisor;
        codes[d] = scale && code == code ? int8_t(code + 12582912.0f - 12582912.0f) : int8_t{};
    }
    return scale;
}

template <typename T>
void write(const AttentionArgs& args, int64_t token, int64_t head) {
    const AttentionStep& step = *args.step;
    const AttentionShape& shape = step.shape;
    const int64_t dim = shape.head_dim, half = dim / 2;
    float* x = args.qkv + token * args.qkv_stride + head * dim;
    const int64_t key = head - shape.heads;  // below 0: a query; then keys of all KV heads, then values
    if (key < shape.kv_heads) {
        if (args.norm != nullptr) {
            float lanes[W] = {};
            for (int64_t d = 0; d < dim; d++) lanes[d % W] += x[d] * x[d];
            const float scale = 1.0f / __builtin_sqrtf(sum(load(lanes)) / dim + args.eps);
            const float* weight = args.norm + head * dim;
            for (int64_t d = 0; d < dim; d++) x[d] *= scale * weight[d];
        }
        const int64_t angle = args.rotation * step.rotation_stride + step.places[token].angle * dim;
        const float *cos = step.cos + angle, *sin = step.sin + angle;
        for (int64_t d = 0; step.cos != nullptr && d < half; d++) {
            const float first = x[d], second = x[d + half];
            x[d] = first * cos[d] + second * sin[d];
            x[d + half] = second * cos[d + half] + first * sin[d + half];
        }
    }
    if (key < 0) return;
    const bool value = key >= shape.kv_heads;
    const auto [block, slot, angle] = step.places[token];
    T* plane = static_cast<T*>(args.pool) + block + (value ? shape.plane_stride : 0);
    const int64_t kv_head = value ? key - shape.kv_heads : key;
    T* to = plane + slot * shape.token_stride() + kv_head * dim;
    if constexpr (scaled<T>) {
        shape.scales(plane)[slot * shape.kv_heads + kv_head] = quantize(x, dim, to);
    } else {
        int64_t d = 0;
        for (; d + W <= dim; d += W) store(to + d, load(x + d));
        for (; d < dim; d++) put(to + d, x[d]);
    }
}

template <typename T>
void write_all(const AttentionArgs& args, int thread, int threads) {
    const AttentionStep& step = *args.step;
    const int64_t heads = step.shape.heads + 2 * step.shape.kv_heads;
    Share share(int64_t(step.places.size()) * heads, thread, threads);
    for (int64_t i = share.begin; i < share.end; i++) write<T>(args, i / heads, i % heads);
}

template <typename T, typename P>
void attend_all(const AttentionArgs& args, int thread, int threads) {
    [[maybe_unused]] typename P::Registers registers;
    const AttentionShape& shape = args.step->shape;
    Worklist& list = args.step->worklists[args.worklist];
    const int64_t needed = std::max(Tile(shape, tile_tokens(shape), nullptr).size, decode_workspace(shape));
    float* workspace = thread_workspace(needed);
    for (size_t share = thread; share < list.items.size(); share += threads) {
        const std::vector<Item>& items = list.items[share];
        for (size_t i = 0; i < items.size(); i++) {
            if (items[i].decode) {
                decode<T>(args, list, items[i], i + 1 < items.size() ? &items[i + 1] : nullptr, workspace);
            } else {
                prefill<T, P>(args, list, items[i], workspace);
            }
        }
    }
}
