#include <algorithm>
#include <cmath>

#include "states.h"
#include "states_products.h"
#include "team.h"

namespace {

using namespace states;

struct Workspace {
    float *b, *b_across, *c, *products, *decayed, *x, *y, *state, *sums, *dt, *ends;

    Workspace(float* at, int64_t dim, int64_t size) {
        const auto take = [&](int64_t count) {
            float* taken = at;
            at += round_up(count, 16);
            return taken;
        };
        b = take(CHUNK * padded(size));
        b_across = take(size * CHUNK);
        c = take(CHUNK * padded(size));
        products = take(CHUNK * CHUNK);
        decayed = take(CHUNK * CHUNK);
        x = take(CHUNK * padded(dim));
        y = take(CHUNK * padded(dim));
        state = take(size * padded(dim));
        sums = take(CHUNK);
        dt = take(CHUNK);
        ends = at;
    }
};

// log(1 + e^x)
inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

template <class T>
inline float time_step(const SsdArgs& args, int64_t token, int64_t head) {
    float dt = number(static_cast<const T*>(args.dt)[token * args.dt_stride + head]);
    if (args.dt_bias != nullptr) dt += args.dt_bias[head];
    if (args.softplus) dt = softplus(dt);
    return std::min(std::max(dt, args.dt_least), args.dt_most);
}

// One token of one head: state [size, dim] of whole vectors, x and y [dim].
template <int VECTORS_>
inline void recur(float* state, int64_t stride, int64_t size, const float* b, const float* c, const float* x, float kept, float* y) {
    vf of_x[VECTORS_], sums[VECTORS_];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS_; v++) {
        of_x[v] = load(x + v * W);
        sums[v] = vf{};
    }
    const vf decayed = splat(kept);
    for (int64_t n = 0; n < size; n++) {
        const vf of_b = splat(b[n]), of_c = splat(c[n]);
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS_; v++) {
            const vf s = fused(load(state + n * stride + v * W), decayed, of_b * of_x[v]);
            store(state + n * stride + v * W, s);
            sums[v] = fused(s, of_c, sums[v]);
        }
    }
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS_; v++) store(y + v * W, sums[v]);
}

template <class T>
void one_token(const SsdArgs& args, const Workspace& work, float* state, bool empty, int64_t token, int64_t head) {
    const int64_t dim = args.dim, size = args.size;
    const float dt = time_step<T>(args, token, head), kept = empty ? 0.0f : std::exp(dt * args.a[head]);
    fetch(static_cast<const T*>(args.x) + token * args.x_stride + head * dim, dim, work.x);
    for (int64_t i = 0; i < padded(dim); i += W) store(work.y + padded(dim) + i, load(work.x + i) * dt);
    const float* x = work.y + padded(dim);
    if (empty) std::fill(state, state + size * dim, 0.0f);
    int64_t i = 0;
    for (; i + 4 * W <= dim; i += 4 * W) recur<4>(state + i, dim, size, work.b, work.c, x + i, kept, work.y + i);
    for (; i + W <= dim; i += W) recur<1>(state + i, dim, size, work.b, work.c, x + i, kept, work.y + i);
    for (; i < dim; i++) {
        float y = 0.0f;
        for (int64_t n = 0; n < size; n++) {
            float& s = state[n * dim + i];
            s = s * kept + work.b[n] * x[i];
            y += s * work.c[n];
        }
        work.y[i] = y;
    }
    if (args.d != nullptr)
        for (int64_t j = 0; j < padded(dim); j += W) store(work.y + j, fused(load(work.x + j), splat(args.d[head]), load(work.y + j)));
    deliver(work.y, dim, args.out + token * args.out_stride + head * dim);
}

// `count` tokens of one head, whose state [size, dim] is in the workspace.
template <class T>
void chunk(const SsdArgs& args, const Workspace& work, int64_t first, int64_t count, int64_t head) {
    const int64_t dim = args.dim, size = args.size, width = padded(dim);
    float sum = 0.0f;
    for (int64_t t = 0; t < count; t++) {
        work.dt[t] = time_step<T>(args, first + t, head);
        work.sums[t] = sum += work.dt[t] * args.a[head];
        float* x = work.x + t * width;
        fetch(static_cast<const T*>(args.x) + (first + t) * args.x_stride + head * dim, dim, x);
    }
    std::fill(work.sums + count, work.sums + padded(count), sum);
    decay(work.products, work.sums, nullptr, count, true, work.decayed, CHUNK);
    product(count, width, size, work.c, padded(size), work.state, width, work.y, width, false);
    for (int64_t t = 0; t < count; t++) {
        const vf before = splat(std::exp(work.sums[t])), skip = splat(args.d != nullptr ? args.d[head] : 0.0f);
        for (int64_t i = 0; i < width; i += W) {
            float *x = work.x + t * width + i, *y = work.y + t * width + i;
            store(y, load(y) * before + load(x) * skip);
            store(x, load(x) * work.dt[t]);
        }
    }
    product(count, width, count, work.decayed, CHUNK, work.x, width, work.y, width, true, true);
    for (int64_t t = 0; t < count; t++) {
        deliver(work.y + t * width, dim, args.out + (first + t) * args.out_stride + head * dim);
        scale(work.x + t * width, width, std::exp(sum - work.sums[t]));
    }
    scale(work.state, size * width, std::exp(sum));
    product(size, width, count, work.b_across, CHUNK, work.x, width, work.state, width, true);
}

template <class T>
void run(const SsdArgs& args, int thread, int threads) {
    const int64_t dim = args.dim, size = args.size, width = padded(dim), per_group = args.heads / args.groups;
    const Workspace work(args.workspace + thread * kvrelay_ssd_workspace(dim, size), dim, size);
    const Share share(args.heads, thread, threads);
    const auto* b = static_cast<const T*>(args.b);
    const auto* c = static_cast<const T*>(args.c);
    for (int64_t row = 0; row < *args.of.rows; row++) {
        const int64_t first = args.of.firsts[row], end = args.of.firsts[row + 1];
        const bool empty = args.of.starts[row] == 0;
        float* states = state_of<float>(args.of, row);
        begin_state<float>(args.of, row, share.begin * size * dim, share.end * size * dim);
        if (end - first == 1) {
            for (int64_t head = share.begin, group = -1; head < share.end; head++) {
                if (group != head / per_group) {
                    group = head / per_group;
                    fetch(b + first * args.b_stride + group * size, size, work.b);
                    fetch(c + first * args.c_stride + group * size, size, work.c);
                }
                one_token<T>(args, work, states + head * size * dim, empty, first, head);
            }
            continue;
        }
        for (int64_t begin = first; begin < end; begin += CHUNK) {
            const int64_t count = std::min(CHUNK, end - begin);
            for (int64_t head = share.begin, group = -1; head < share.end; head++) {
                if (group != head / per_group) {
                    group = head / per_group;
                    for (int64_t t = 0; t < count; t++) {
                        fetch(b + (begin + t) * args.b_stride + group * size, size, work.b + t * padded(size));
                        fetch(c + (begin + t) * args.c_stride + group * size, size, work.c + t * padded(size));
                    }
                    transpose(work.b, padded(size), count, size, work.b_across, CHUNK);
                    product(count, padded(count), size, work.c, padded(size), work.b_across, CHUNK, work.products, CHUNK, false);
                }
                float* state = states + head * size * dim;
                if (empty && begin == first) std::fill(work.state, work.state + size * width, 0.0f);
                else
                    for (int64_t n = 0; n < size; n++) fetch(state + n * dim, dim, work.state + n * width);
                chunk<T>(args, work, begin, count, head);
                for (int64_t n = 0; n < size; n++) deliver(work.state + n * width, dim, state + n * dim);
            }
        }
    }
}

}  // namespace

int64_t kvrelay_ssd_workspace(int64_t dim, int64_t size) { return Workspace(nullptr, dim, size).ends - static_cast<float*>(nullptr); }

void kvrelay_ssd(const void* raw, int thread, int threads) {
    const SsdArgs& args = *static_cast<const SsdArgs*>(raw);
    if (args.bfloat16) run<bf16>(args, thread, threads);
    else run<float>(args, thread, threads);
}
