#include "embed.h"

#include <cstring>

#include "codes.h"
#include "simd.h"
#include "team.h"

namespace {

template <class T>
void look_up(const EmbedArgs& args, int64_t token, float* out) {
    if (!args.packed) {
        const T* row = static_cast<const T*>(args.weight) + token * args.width;
        for (int64_t k = 0; k < args.width; k++) out[k] = number(row[k]);
        return;
    }
    const T* block = static_cast<const T*>(args.weight) + token / W * packed_pairs(args.width, args.type) * 2 * W;
    for (int64_t k = 0; k < args.width; k++) out[k] = number(block[packed_offset<T>(token % W, k)]);
}

template <WeightType TYPE>
void look_up_coded(const EmbedArgs& args, int64_t token, float* out) {
    const Codes codes{static_cast<const uint8_t*>(args.weight), args.scales, args.zeros, args.minima, args.width, args.group, TYPE};
    for (int64_t k = 0; k < args.width; k++) out[k] = decode_one<TYPE>(codes, token, k);
}

}  // namespace

void kvrelay_embed(const void* raw, int thread, int threads) {
    const EmbedArgs& args = *static_cast<const EmbedArgs*>(raw);
    const Share share(*args.rows, thread, threads);
    for (int64_t row = share.begin; row < share.end; row++) {
        float* out = args.out + row * args.out_stride;
        const int64_t token = (*args.tokens)[row] - args.first;
        if (token < 0 || token >= args.count) {
            memset(out, 0, args.width * sizeof(float));
            continue;
        }
        switch (args.type) {
            case FLOAT32: look_up<float>(args, token, out); break;
            case BFLOAT16: look_up<bf16>(args, token, out); break;
            case INT8_INT8:
            case INT8: look_up_coded<INT8>(args, token, out); break;
            case INT4: look_up_coded<INT4>(args, token, out); break;
            case FLOAT8: look_up_coded<FLOAT8>(args, token, out); break;
            case FLOAT4: look_up_coded<FLOAT4>(args, token, out); break;
        }
        if (args.scale == 1.0f) continue;
        for (int64_t k = 0; k < args.width; k++) out[k] *= args.scale;
    }
}
