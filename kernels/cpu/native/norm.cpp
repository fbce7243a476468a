#include "norm.h"

#include <cmath>

#include "simd.h"
#include "team.h"

namespace {

// Sum over x [width] of (x - mean), or of its square.
template <bool SQUARED>
float total(const float* x, int64_t width, float mean) {
    vf lanes = {};
    int64_t i = 0;
    for (; i + W <= width; i += W) {
        const vf y = load(x + i) - mean;
        lanes = lanes + (SQUARED ? y * y : y);
    }
    float sum_of_all = sum(lanes);
    for (; i < width; i++) sum_of_all += SQUARED ? (x[i] - mean) * (x[i] - mean) : x[i] - mean;
    return sum_of_all;
}

}  // namespace

void kvrelay_norm(const void* raw, int thread, int threads) {
    const NormArgs& args = *static_cast<const NormArgs*>(raw);
    const Share share(*args.rows, thread, threads);
    for (int64_t row = share.begin; row < share.end; row++) {
        const float* in = args.in + row * args.in_stride;
        float* out = args.out + row * args.out_stride;
        const float width = float(args.whole_width);
        const float mean = args.centered ? total<false>(in, args.width, 0.0f) / width : 0.0f;
        const float squares = args.squares != nullptr ? args.squares[row * args.squares_stride] : total<true>(in, args.width, mean);
        const float scale = 1.0f / std::sqrt(squares / width + args.eps);
        for (int64_t i = 0; i < args.width; i++) {
            const float bias = args.bias != nullptr ? args.bias[i] : 0.0f;
            const float y = (in[i] - mean) * scale * args.weight[i] + bias;
            out[i] = args.add ? out[i] + y : y;
        }
    }
}

void kvrelay_squares(const void* raw, int thread, int threads) {
    const NormArgs& args = *static_cast<const NormArgs*>(raw);
    const Share share(*args.rows, thread, threads);
    for (int64_t row = share.begin; row < share.end; row++) {
        args.out[row * args.out_stride] = total<true>(args.in + row * args.in_stride, args.width, 0.0f);
    }
}
