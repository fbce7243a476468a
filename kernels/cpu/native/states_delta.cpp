#include <algorithm>
#include <cmath>
#include <utility>

#include "states.h"
#include "states_products.h"
#include "team.h"

namespace {

using namespace states;

constexpr int64_t SOLVED = 8;  // rows of the triangle that are solved one by one; what they need of earlier ones is a product
constexpr int64_t BLOCK = 16;  // tokens of a block within which channels are decayed pair by pair: whole vectors
constexpr float LEAST = 1e-6f; // is added to a square of a length

struct Workspace {
    float *q, *k, *k_across, *of_keys, *of_queries, *decayed, *solved, *y, *state, *sums, *beta, *decays, *scaled, *ends;

    Workspace(float* at, int64_t dim, int64_t key_dim) {
        const auto take = [&](int64_t count) {
            float* taken = at;
            at += round_up(count, 16);
            return taken;
        };
        q = take(CHUNK * padded(key_dim));
        k = take(CHUNK * padded(key_dim));
        k_across = take(key_dim * CHUNK);
        of_keys = take(CHUNK * CHUNK);
        of_queries = take(CHUNK * CHUNK);
        decayed = take(CHUNK * CHUNK);
        solved = take(CHUNK * padded(dim));
        y = take(CHUNK * padded(dim));
        state = take(key_dim * padded(dim));
        sums = take(CHUNK);
        beta = take(CHUNK);
        decays = take(CHUNK * padded(key_dim));
        scaled = take(CHUNK * padded(key_dim));
        ends = at;
    }
};

inline float squares(const float* x, int64_t width) {
    vf lanes = {};
    for (int64_t i = 0; i < width; i += W) lanes = fused(load(x + i), load(x + i), lanes);
    return sum(lanes);
}

// Keys and queries of `count` tokens of a key head, normalized and scaled.
template <class T>
void fetch_keys(const DeltaArgs& args, const Workspace& work, int64_t first, int64_t count, int64_t key_head) {
    const int64_t width = padded(args.key_dim);
    const float scaling = 1.0f / std::sqrt(float(args.key_dim));
    for (int64_t t = 0; t < count; t++) {
        float *q = work.q + t * width, *k = work.k + t * width;
        fetch(static_cast<const T*>(args.q) + (first + t) * args.q_stride + key_head * args.key_dim, args.key_dim, q);
        fetch(static_cast<const T*>(args.k) + (first + t) * args.k_stride + key_head * args.key_dim, args.key_dim, k);
        scale(q, width, args.normalized ? scaling / std::sqrt(squares(q, width) + LEAST) : scaling);
        if (args.normalized) scale(k, width, 1.0f / std::sqrt(squares(k, width) + LEAST));
    }
}

// Decays the state [key_dim, VECTORS_ * W] of one token, adds what is new, and reads it. `kept` has a factor for each key
// channel.
template <int VECTORS_>
inline void recur(
    float* state, int64_t stride, int64_t key_dim, const float* q, const float* k, const float* v, const float* kept, float beta,
    float* y
) {
    vf found[VECTORS_] = {}, sums[VECTORS_] = {};
    for (int64_t n = 0; n < key_dim; n++) {
        const vf of_k = splat(k[n] * kept[n]);
#pragma GCC unroll 8
        for (int i = 0; i < VECTORS_; i++) found[i] = fused(load(state + n * stride + i * W), of_k, found[i]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < VECTORS_; i++) found[i] = (load(v + i * W) - found[i]) * beta;
    for (int64_t n = 0; n < key_dim; n++) {
        const vf of_k = splat(k[n]), of_q = splat(q[n]), decayed = splat(kept[n]);
#pragma GCC unroll 8
        for (int i = 0; i < VECTORS_; i++) {
            const vf s = fused(load(state + n * stride + i * W), decayed, of_k * found[i]);
            store(state + n * stride + i * W, s);
            sums[i] = fused(s, of_q, sums[i]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < VECTORS_; i++) store(y + i * W, sums[i]);
}

template <class T>
void one_token(const DeltaArgs& args, const Workspace& work, float* state, bool empty, int64_t token, int64_t head) {
    const int64_t dim = args.dim, key_dim = args.key_dim;
    float* kept = work.decays;
    if (args.channels) {
        fetch(args.g + token * args.g_stride + head * key_dim, key_dim, kept);
        for (int64_t n = 0; n < key_dim; n += W) store(kept + n, exp(load(kept + n)));
    } else {
        std::fill(kept, kept + key_dim, std::exp(args.g[token * args.g_stride + head]));
    }
    const float beta = number(static_cast<const T*>(args.beta)[token * args.beta_stride + head]);
    float *v = work.solved, *y = work.y;
    fetch(static_cast<const T*>(args.v) + token * args.v_stride + head * dim, dim, v);
    if (empty) std::fill(state, state + key_dim * dim, 0.0f);
    int64_t i = 0;
    for (; i + 4 * W <= dim; i += 4 * W) recur<4>(state + i, dim, key_dim, work.q, work.k, v + i, kept, beta, y + i);
    for (; i + W <= dim; i += W) recur<1>(state + i, dim, key_dim, work.q, work.k, v + i, kept, beta, y + i);
    for (; i < dim; i++) {
        float found = 0.0f;
        for (int64_t n = 0; n < key_dim; n++) found += state[n * dim + i] * (work.k[n] * kept[n]);
        found = (v[i] - found) * beta;
        y[i] = 0.0f;
        for (int64_t n = 0; n < key_dim; n++) {
            float& s = state[n * dim + i];
            s = s * kept[n] + work.k[n] * found;
            y[i] += s * work.q[n];
        }
    }
    deliver(y, dim, static_cast<T*>(args.out) + token * args.out_stride + head * dim);
}

// to [count, width] = x * exp(decays - those of token `before`), or, with `past`, the inverse. No exponent is above 0.
inline void decayed_rows(
    const float* x, const float* decays, int64_t before, int64_t first, int64_t end, int64_t width, bool past, float* to
) {
    for (int64_t t = first; t < end; t++)
        for (int64_t n = 0; n < width; n += W) {
            const vf since = load(decays + t * width + n) - (before < 0 ? vf{} : load(decays + before * width + n));
            store(to + (t - first) * width + n, load(x + t * width + n) * exp(past ? -since : since));
        }
}

// of_keys [count, count] = what `decay` makes of the products of keys, below the diagonal and times the factors `beta`, and
// of_queries those of queries with keys, with the diagonal; each channel with a decay of its own.
//
// Tokens are taken in blocks. Between blocks, both sides are decayed to the begin of the later one, so that each is a
// product; within a block, each pair of tokens has factors of its own.
void decay_channels(const Workspace& work, int64_t count, int64_t key_dim) {
    const int64_t width = padded(key_dim), columns = padded(count);
    for (int64_t row = 0; row < count; row += BLOCK) {
        const int64_t end = std::min(row + BLOCK, count);
        for (int64_t t = row; t < end; t++) {
            std::fill(work.of_keys + t * CHUNK, work.of_keys + t * CHUNK + columns, 0.0f);
            std::fill(work.of_queries + t * CHUNK, work.of_queries + t * CHUNK + columns, 0.0f);
        }
        if (row > 0) {
            // Blocks are whole vectors, so no product writes to the columns of the own block.
            decayed_rows(work.k, work.decays, row, 0, row, width, true, work.scaled);
            transpose(work.scaled, width, row, key_dim, work.k_across, CHUNK);
            for (const auto& [from, to] : {std::pair(work.k, work.of_keys), std::pair(work.q, work.of_queries)}) {
                decayed_rows(from, work.decays, row, row, end, width, false, work.scaled);
                product(end - row, row, key_dim, work.scaled, width, work.k_across, CHUNK, to + row * CHUNK, CHUNK, false);
            }
        }
        for (int64_t t = row; t < end; t++)
            for (int64_t s = row; s <= t; s++) {
                vf keys = {}, queries = {};
                for (int64_t n = 0; n < width; n += W) {
                    const vf since = load(work.decays + t * width + n) - load(work.decays + s * width + n);
                    const vf key = load(work.k + s * width + n) * exp(since);
                    keys = fused(key, load(work.k + t * width + n), keys);
                    queries = fused(key, load(work.q + t * width + n), queries);
                }
                if (s < t) work.of_keys[t * CHUNK + s] = sum(keys);
                work.of_queries[t * CHUNK + s] = sum(queries);
            }
        for (int64_t t = row; t < end; t++) scale(work.of_keys + t * CHUNK, columns, work.beta[t]);
    }
}

// `count` tokens of one head, whose state [key_dim, dim] is in the workspace. With G the decay since the chunk's begin, and
// D[i, j] = G[i] / G[j]: solved U = (1 + tril(beta K K' D, -1))^-1 beta (V - G K S), out = G Q S + tril(Q K' D) U.
// With CHANNELS, G is a row of factors of the key's channels.
template <class T, bool CHANNELS>
void chunk(const DeltaArgs& args, const Workspace& work, int64_t first, int64_t count, int64_t head) {
    const int64_t dim = args.dim, key_dim = args.key_dim, width = padded(dim), key_width = padded(key_dim);
    float sum = 0.0f;
    for (int64_t t = 0; t < count; t++) {
        work.beta[t] = -number(static_cast<const T*>(args.beta)[(first + t) * args.beta_stride + head]);
        if constexpr (CHANNELS) {
            float* own = work.decays + t * key_width;
            fetch(args.g + (first + t) * args.g_stride + head * key_dim, key_dim, own);
            for (int64_t n = 0; t > 0 && n < key_width; n += W) store(own + n, load(own + n) + load(own - key_width + n));
        } else {
            work.sums[t] = sum += args.g[(first + t) * args.g_stride + head];
        }
    }
    const auto since_begin = [&](const float* x) -> const float* {
        if constexpr (!CHANNELS) return x;
        decayed_rows(x, work.decays, -1, 0, count, key_width, false, work.scaled);
        return work.scaled;
    };
    const auto before = [&](int64_t t) { return CHANNELS ? 1.0f : std::exp(work.sums[t]); };
    if constexpr (CHANNELS) decay_channels(work, count, key_dim);
    else std::fill(work.sums + count, work.sums + padded(count), sum);
    product(count, width, key_dim, since_begin(work.k), key_width, work.state, width, work.solved, width, false);
    for (int64_t t = 0; t < count; t++) {
        float *v = work.y, *u = work.solved + t * width;
        fetch(static_cast<const T*>(args.v) + (first + t) * args.v_stride + head * dim, dim, v);
        const vf kept = splat(before(t)), beta = splat(-work.beta[t]);
        for (int64_t i = 0; i < width; i += W) store(u + i, beta * (load(v + i) - kept * load(u + i)));
    }
    float* triangle = CHANNELS ? work.of_keys : work.decayed;
    if constexpr (!CHANNELS) decay(work.of_keys, work.sums, work.beta, count, false, triangle, CHUNK);
    for (int64_t row = 0; row < count; row += SOLVED) {
        const int64_t end = std::min(row + SOLVED, count);
        float* u = work.solved + row * width;
        if (row > 0) product(end - row, width, row, triangle + row * CHUNK, CHUNK, work.solved, width, u, width, true);
        for (int64_t r = row + 1; r < end; r++)
            product(1, width, r - row, triangle + r * CHUNK + row, CHUNK, u, width, work.solved + r * width, width, true);
    }
    product(count, width, key_dim, since_begin(work.q), key_width, work.state, width, work.y, width, false);
    if constexpr (!CHANNELS) {
        for (int64_t t = 0; t < count; t++) scale(work.y + t * width, width, before(t));
        decay(work.of_queries, work.sums, nullptr, count, true, work.decayed, CHUNK);
    }
    triangle = CHANNELS ? work.of_queries : work.decayed;
    product(count, width, count, triangle, CHUNK, work.solved, width, work.y, width, true, true);
    for (int64_t t = 0; t < count; t++) {
        deliver(work.y + t * width, dim, static_cast<T*>(args.out) + (first + t) * args.out_stride + head * dim);
        if constexpr (!CHANNELS) scale(work.solved + t * width, width, std::exp(sum - work.sums[t]));
    }
    if constexpr (CHANNELS) {
        decayed_rows(work.k, work.decays, count - 1, 0, count, key_width, true, work.scaled);
        transpose(work.scaled, key_width, count, key_dim, work.k_across, CHUNK);
        const float* last = work.decays + (count - 1) * key_width;
        for (int64_t n = 0; n < key_dim; n++) scale(work.state + n * width, width, std::exp(last[n]));
    } else {
        scale(work.state, key_dim * width, std::exp(sum));
    }
    product(key_dim, width, count, work.k_across, CHUNK, work.solved, width, work.state, width, true);
}

template <class T>
void run(const DeltaArgs& args, int thread, int threads) {
    const int64_t dim = args.dim, key_dim = args.key_dim, width = padded(dim), key_width = padded(key_dim);
    const int64_t shared = args.heads / args.key_heads;
    const Workspace work(args.workspace + thread * kvrelay_delta_workspace(dim, key_dim), dim, key_dim);
    const Share share(args.heads, thread, threads);
    for (int64_t row = 0; row < *args.of.rows; row++) {
        const int64_t first = args.of.firsts[row], end = args.of.firsts[row + 1];
        const bool empty = args.of.starts[row] == 0;
        float* states = state_of<float>(args.of, row);
        begin_state<float>(args.of, row, share.begin * key_dim * dim, share.end * key_dim * dim);
        for (int64_t begin = first; begin < end; begin += CHUNK) {
            const int64_t count = std::min(CHUNK, end - begin);
            for (int64_t head = share.begin, key_head = -1; head < share.end; head++) {
                float* state = states + head * key_dim * dim;
                if (key_head != head / shared) {
                    key_head = head / shared;
                    fetch_keys<T>(args, work, begin, count, key_head);
                    if (end - first > 1 && !args.channels) {
                        transpose(work.k, key_width, count, key_dim, work.k_across, CHUNK);
                        product(count, padded(count), key_dim, work.k, key_width, work.k_across, CHUNK, work.of_keys, CHUNK, false);
                        product(count, padded(count), key_dim, work.q, key_width, work.k_across, CHUNK, work.of_queries, CHUNK, false);
                    }
                }
                if (end - first == 1) {
                    one_token<T>(args, work, state, empty, first, head);
                    continue;
                }
                if (empty && begin == first) std::fill(work.state, work.state + key_dim * width, 0.0f);
                else
                    for (int64_t n = 0; n < key_dim; n++) fetch(state + n * dim, dim, work.state + n * width);
                if (args.channels) chunk<T, true>(args, work, begin, count, head);
                else chunk<T, false>(args, work, begin, count, head);
                for (int64_t n = 0; n < key_dim; n++) deliver(work.state + n * width, dim, state + n * dim);
            }
        }
    }
}

}  // namespace

int64_t kvrelay_delta_workspace(int64_t dim, int64_t key_dim) {
    return Workspace(nullptr, dim, key_dim).ends - static_cast<float*>(nullptr);
}

void kvrelay_delta(const void* raw, int thread, int threads) {
    const DeltaArgs& args = *static_cast<const DeltaArgs*>(raw);
    if (args.bfloat16) run<bf16>(args, thread, threads);
    else run<float>(args, thread, threads);
}
