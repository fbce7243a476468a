#include "experts.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "simd.h"
#include "team.h"

namespace {

constexpr float LOWEST = -std::numeric_limits<float>::infinity();

// exp(x - largest), and their sum.
float exponentials(const float* x, int64_t count, float* out) {
    float largest = LOWEST;
    for (int64_t i = 0; i < count; i++) largest = std::max(largest, x[i]);
    float total = 0;
    int64_t i = 0;
    for (; i + W <= count; i += W) {
        const vf y = exp(load(x + i) - largest);
        store(out + i, y);
        total += sum(y);
    }
    for (; i < count; i++) total += out[i] = std::exp(x[i] - largest);
    return total;
}

void score(const RouteArgs& args, const float* logits, float* scores) {
    const int64_t experts = args.experts;
    if (args.scoring == SOFTMAX) {
        const float factor = 1.0f / exponentials(logits, experts, scores);
        for (int64_t i = 0; i < experts; i++) scores[i] *= factor;
    } else if (args.scoring == SIGMOID) {
        for (int64_t i = 0; i < experts; i++) scores[i] = 1.0f / (1.0f + std::exp(-logits[i]));
    } else {
        std::copy(logits, logits + experts, scores);
    }
}

// The index of the largest number, the first of equal ones. Comparisons with NaN are false, so one is always found.
int64_t largest(const float* x, int64_t count) {
    int64_t best = 0;
    for (int64_t i = 1; i < count; i++) {
        if (x[i] > x[best]) best = i;
    }
    return best;
}

// Puts LOWEST in place of the scores of experts whose groups aren't chosen.
void drop_groups(const RouteArgs& args, float* choice, float* groups) {
    const int64_t size = args.experts / args.groups;
    for (int64_t group = 0; group < args.groups; group++) {
        float first = LOWEST, second = LOWEST;
        for (int64_t i = group * size; i < (group + 1) * size; i++) {
            if (choice[i] > first) {
                second = first;
                first = choice[i];
            } else {
                second = std::max(second, choice[i]);
            }
        }
        groups[group] = args.group_best == 2 ? first + second : first;
    }
    for (int64_t group = 0; group < args.groups; group++) {
        int64_t better = 0;
        for (int64_t other = 0; other < args.groups; other++) {
            better += groups[other] > groups[group] || (groups[other] == groups[group] && other < group);
        }
        if (better >= args.top_groups) std::fill(choice + group * size, choice + (group + 1) * size, LOWEST);
    }
}

void route_row(const RouteArgs& args, int64_t row, float* workspace) {
    float *scores = workspace, *choice = scores + args.experts, *groups = choice + args.experts;
    score(args, args.logits + row * args.logits_stride, scores);
    for (int64_t i = 0; i < args.experts; i++) choice[i] = args.bias == nullptr ? scores[i] : scores[i] + args.bias[i];
    if (args.groups > 1) drop_groups(args, choice, groups);
    int32_t* chosen = args.chosen + row * args.top;
    float* shares = args.shares + row * args.top;
    for (int64_t k = 0; k < args.top; k++) {
        const int64_t best = largest(choice, args.experts);
        chosen[k] = int32_t(best);
        shares[k] = scores[best];
        choice[best] = LOWEST;
    }
    if (args.scoring == SOFTMAX_CHOSEN) {
        const float factor = 1.0f / exponentials(shares, args.top, shares);
        for (int64_t k = 0; k < args.top; k++) shares[k] *= factor;
    }
    float factor = args.scale;
    if (args.normalized) {
        float total = args.least;
        for (int64_t k = 0; k < args.top; k++) total += shares[k];
        factor /= total;
    }
    for (int64_t k = 0; k < args.top; k++) shares[k] *= factor;
}

// Reading an expert's weights costs as much as multiplying so many more rows.
constexpr int64_t READING = 4;

int64_t cost(const GroupedArgs& args, int64_t expert) {
    const int64_t rows = args.begins[expert + 1] - args.begins[expert];
    return rows == 0 ? 0 : rows + READING;
}

// Multiplies some pairs of blocks of an expert with its rows.
void multiply_expert(const GroupedArgs& args, int64_t expert, const Share& pairs, int thread) {
    const int64_t begin = args.begins[expert], rows = args.begins[expert + 1] - begin;
    LinearArgs own = args.linear;
    own.weight = static_cast<const char*>(own.weight) + expert * args.weight_bytes;
    if (own.scales != nullptr) own.scales += expert * args.scales;
    if (own.zeros != nullptr) own.zeros += expert * args.scales;
    if (own.minima != nullptr) own.minima += expert * args.scales;
    if (own.bias != nullptr) own.bias += expert * args.biases;
    if (own.sources != nullptr) {
        own.sources += begin;
    } else {
        own.in += begin * own.in_stride;
    }
    own.out += begin * own.out_stride;
    multiply_linear(own, {rows, thread, 1, &pairs});
}

}  // namespace

void kvrelay_route(const void* raw, int thread, int threads) {
    const RouteArgs& args = *static_cast<const RouteArgs*>(raw);
    const Share share(*args.rows, thread, threads);
    float* workspace = args.workspace + thread * (2 * args.experts + args.groups);
    for (int64_t row = share.begin; row < share.end; row++) route_row(args, row, workspace);
}

void kvrelay_sort_pairs(const void* raw, int thread, int) {
    if (thread != 0) return;
    const SortArgs& args = *static_cast<const SortArgs*>(raw);
    const int64_t pairs = *args.rows * args.top;
    const auto named = [&](int32_t expert) { return expert >= 0 && expert < args.experts; };
    const auto expert_of = [&](int64_t pair) {
        const int32_t chosen = args.chosen[pair];
        if (args.slots == nullptr || chosen < 0 || chosen >= args.all) return chosen;
        return args.slots[pair / args.top % args.phases * args.all + chosen];
    };
    std::fill(args.begins, args.begins + args.experts + 1, 0);
    for (int64_t pair = 0; pair < pairs; pair++) {
        const int32_t expert = expert_of(pair);
        if (named(expert)) args.begins[expert + 1]++;
    }
    for (int64_t expert = 0; expert < args.experts; expert++) {
        if (args.load != nullptr) args.load[expert] += args.begins[expert + 1];
        args.begins[expert + 1] += args.begins[expert];
    }
    // Each expert's begin goes up with its pairs, to where the next one begins.
    for (int64_t pair = 0; pair < pairs; pair++) {
        const int32_t expert = expert_of(pair);
        args.places[pair] = named(expert) ? args.begins[expert]++ : -1;
        if (named(expert)) args.sources[args.places[pair]] = int32_t(pair / args.top);
    }
    for (int64_t expert = args.experts; expert > 0; expert--) args.begins[expert] = args.begins[expert - 1];
    args.begins[0] = 0;
}

// The experts' work lies on one line, which the threads divide evenly: each begins where the one before it ends.
void kvrelay_grouped(const void* raw, int thread, int threads) {
    const GroupedArgs& args = *static_cast<const GroupedArgs*>(raw);
    const int64_t blocks = divide_up(args.linear.outputs, W), pairs = divide_up(blocks, 2);
    int64_t total = 0;
    for (int64_t expert = 0; expert < args.experts; expert++) total += cost(args, expert) * pairs;
    const int64_t begin = total * thread / threads, end = total * (thread + 1) / threads;
    int64_t at = 0;
    for (int64_t expert = 0; expert < args.experts && at < end; expert++) {
        const int64_t each = cost(args, expert), next = at + each * pairs;
        if (each > 0 && next > begin) {
            Share own(pairs, 0, 1);
            if (at < begin) own.begin = divide_up(begin - at, each);
            if (next > end) own.end = divide_up(end - at, each);
            if (own.begin < own.end) multiply_expert(args, expert, own, thread);
        }
        at = next;
    }
}

void kvrelay_combine(const void* raw, int thread, int threads) {
    const CombineArgs& args = *static_cast<const CombineArgs*>(raw);
    // Few rows have many columns, which are then divided too.
    const int64_t pieces = *args.rows >= threads ? 1 : threads, width = args.width;
    const Share items(*args.rows * pieces, thread, threads);
    for (int64_t item = items.begin; item < items.end; item++) {
        const int64_t row = item / pieces;
        const Share columns(divide_up(width, W), int(item % pieces), int(pieces));
        const int32_t* places = args.places + row * args.top;
        const float* shares = args.shares + row * args.top;
        float* out = args.out + row * args.out_stride;
        for (int64_t column = columns.begin * W; column < std::min(columns.end * W, width); column += W) {
            const int64_t count = std::min<int64_t>(W, width - column);
            alignas(64) float last[W] = {};
            const auto part = [&](const float* from) {
                if (count == W) return load(from);
                memcpy(last, from, count * sizeof(float));
                return load(last);
            };
            vf total = args.add ? part(out + column) : vf{};
            for (int64_t k = 0; k < args.top; k++) {
                if (places[k] < 0) continue;
                total = fused(part(args.parts + places[k] * args.parts_stride + column), splat(shares[k]), total);
            }
            if (count == W) {
                store(out + column, total);
            } else {
                memcpy(out + column, &total, count * sizeof(float));
            }
        }
    }
}
