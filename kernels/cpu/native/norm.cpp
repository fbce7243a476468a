#include "norm.h"

#include <cmath>

#include "simd.h"
#include "team.h"

namespace {

// Sum over x [width] of (x - mean), or of its square.
template <bool SQUARED, class T>
float total(const T* x, int64_t width, float mean) {
    vf lanes = {};
    int64_t i = 0;
    for (; i + W <= width; i += W) {
        const vf y = load(x + i) - mean;
        lanes = lanes + (SQUARED ? y * y : y);
    }
    float sum_of_all = sum(lanes);
    for (; i < width; i++) {
        const float y = number(x[i]) - mean;
        sum_of_all += SQUARED ? y * y : y;
    }
    return sum_of_all;
}

template <class T>
void norm(const NormArgs& args, const Share& share) {
    for (int64_t row = share.begin; row < share.end; row++) {
        const T* in = static_cast<const T*>(args.in) + row * args.in_stride;
        T* out = static_cast<T*>(args.out) + row * args.out_stride;
        const float width = float(args.whole_width);
        const float mean = args.centered ? total<false>(in, args.width, 0.0f) / width : 0.0f;
        const float squares = args.squares != nullptr ? args.squares[row * args.squares_stride] : total<true>(in, args.width, mean);
        const float scale = 1.0f / std::sqrt(squares / width + args.eps);
        int64_t i = 0;
        for (; i + W <= args.width; i += W) {
            const vf bias = args.bias != nullptr ? load(args.bias + i) : vf{};
            const vf y = (load(in + i) - mean) * scale * load(args.weight + i) + bias;
            store(out + i, args.add ? load(out + i) + y : y);
        }
        for (; i < args.width; i++) {
            const float bias = args.bias != nullptr ? args.bias[i] : 0.0f;
            const float y = (number(in[i]) - mean) * scale * args.weight[i] + bias;
            put(out + i, args.add ? number(out[i]) + y : y);
        }
    }
}

}  // namespace

void kvrelay_norm(const void* raw, int thread, int threads) {
    const NormArgs& args = *static_cast<const NormArgs*>(raw);
    const Share share(*args.rows, thread, threads);
    args.bfloat16 ? norm<bf16>(args, share) : norm<float>(args, share);
}

void kvrelay_squares(const void* raw, int thread, int threads) {
    const NormArgs& args = *static_cast<const NormArgs*>(raw);
    const Share share(*args.rows, thread, threads);
    const float* in = static_cast<const float*>(args.in);
    float* out = static_cast<float*>(args.out);
    for (int64_t row = share.begin; row < share.end; row++) {
        out[row * args.out_stride] = total<true>(in + row * args.in_stride, args.width, 0.0f);
    }
}
