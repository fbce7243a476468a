#include "linear.h"

#include <algorithm>

#include "codes.h"
#include "integers.h"
#include "linear_floats.h"
#include "simd.h"
#include "tiles.h"

namespace {

// Weights that are multiplied as they are packed.
template <class T>
class Dense {
public:
    using Number = T;

    Dense(const LinearArgs& args, const Order& order, float*)
        : order_(order), weights_(static_cast<const T*>(args.weight)),
          block_(packed_pairs(args.inputs, args.type) * 2 * W), most_(panel_pairs(args.inputs, sizeof(T))) {}

    // Pairs of a panel, if the rows are taken in so many parts.
    int64_t panel(int64_t) const { return most_; }

    void open(int64_t, int64_t) {}

    // A single part prefetches its own weights, two tiles ahead.
    Pair<T> pair(int64_t pair, Position at) const {
        const int64_t b0 = order_.first(pair), b1 = order_.second(pair);
        const T *w0 = weights_ + b0 * block_, *w1 = weights_ + b1 * block_;
        const char *at0 = reinterpret_cast<const char*>(w0), *at1 = reinterpret_cast<const char*>(w1);
        const int64_t bytes = block_ * int64_t{sizeof(T)}, tile = bytes / order_.steps;
        if (at.parts > 1) return {b0, b1, w0, w1, order_.next_panel(at0, at1, bytes, order_.steps, at)};
        return {b0, b1, w0, w1, {at0 + 2 * tile, at1 + 2 * tile, int(tile / LINE)}};
    }

private:
    Order order_;
    const T* weights_;
    int64_t block_, most_;
};

// Weights that are decoded into `panel` first.
template <WeightType TYPE>
class Coded {
public:
    using Number = bf16;

    Coded(const LinearArgs& args, const Order& order, float* panel)
        : order_(order), codes_{static_cast<const uint8_t*>(args.weight), args.scales, args.zeros, args.minima, args.inputs, args.group, TYPE},
          block_(packed_pairs(args.inputs, TYPE) * 2 * W), most_(panel_pairs(args.inputs, sizeof(bf16))), panel_(reinterpret_cast<bf16*>(panel)) {}

    // With one part nothing is multiplied twice, so a pair is enough, and stays in the L1 cache.
    int64_t panel(int64_t parts) const { return parts == 1 ? 1 : most_; }

    void open(int64_t begin, int64_t end) {
        begin_ = begin;
        for (int64_t pair = begin; pair < end; pair++) {
            decode<TYPE>(codes_, order_.first(pair), decoded(pair, 0));
            decode<TYPE>(codes_, order_.second(pair), decoded(pair, 1));
        }
    }

    Pair<bf16> pair(int64_t pair, Position at) const {
        const int64_t b0 = order_.first(pair), b1 = order_.second(pair), bytes = codes_.block_bytes();
        const char* codes = reinterpret_cast<const char*>(codes_.codes);
        const Prefetch next = order_.next_panel(codes + b0 * bytes, codes + b1 * bytes, bytes, order_.steps, at);
        return {b0, b1, decoded(pair, 0), decoded(pair, 1), next};
    }

private:
    bf16* decoded(int64_t pair, int which) const { return panel_ + ((pair - begin_) * 2 + which) * block_; }

    Order order_;
    Codes codes_;
    int64_t block_, most_, begin_ = 0;
    bf16* panel_;
};

template <class Weights>
void run_bf16(const LinearArgs& args, const Portion& portion) {
#ifdef KVRELAY_TILES
    if (tiles::used) return run<Tiles, Weights>(args, portion);
#endif
    run<Vectors<bf16>, Weights>(args, portion);
}

template <class T>
void pack(const T* weight, int64_t outputs, int64_t inputs, T* packed) {
    const int64_t padded_inputs = 2 * packed_pairs(inputs, sizeof(T) == 2 ? BFLOAT16 : FLOAT32);
    for (int64_t output = 0; output < round_up(outputs, W); output++) {
        T* block = packed + output / W * W * padded_inputs;
        for (int64_t k = 0; k < padded_inputs; k++) {
            block[packed_offset<T>(output % W, k)] = output < outputs && k < inputs ? weight[output * inputs + k] : T{};
        }
    }
}

void pack_codes(const uint8_t* codes, int64_t outputs, int64_t inputs, WeightType type, uint8_t* packed) {
    const int64_t padded_inputs = 2 * packed_pairs(inputs, type);
    const int bits = weight_bits(type);
    memset(packed, 0, round_up(outputs, W) * padded_inputs * bits / 8);
    for (int64_t output = 0; output < outputs; output++) {
        uint8_t* block = packed + output / W * W * padded_inputs * bits / 8;
        for (int64_t k = 0; k < inputs; k++) {
            const CodePlace place(output % W, k, bits);
            block[place.byte] |= (codes[output * inputs + k] & ((1 << bits) - 1)) << place.shift;
        }
    }
}

}  // namespace

int32_t kvrelay_block_outputs() { return W; }

int64_t kvrelay_packed_bytes(int64_t outputs, int64_t inputs, int32_t type) {
    return round_up(outputs, W) * packed_pairs(inputs, type) * 2 * weight_bits(type) / 8;
}

void kvrelay_pack(const void* weight, int64_t outputs, int64_t inputs, int32_t type, void* packed) {
    if (type == FLOAT32) {
        pack(static_cast<const float*>(weight), outputs, inputs, static_cast<float*>(packed));
    } else if (type == BFLOAT16) {
        pack(static_cast<const bf16*>(weight), outputs, inputs, static_cast<bf16*>(packed));
    } else {
        pack_codes(static_cast<const uint8_t*>(weight), outputs, inputs, WeightType(type), static_cast<uint8_t*>(packed));
    }
}

int64_t kvrelay_linear_workspace(int64_t inputs, int32_t type) {
    int64_t floats = Vectors<float>::prepared_floats(inputs);
#ifdef KVRELAY_TILES
    floats = std::max(floats, Tiles::prepared_floats(inputs));
#endif
    if (weight_bits(type) > 8) return floats;
    floats += panel_pairs(inputs, sizeof(bf16)) * 2 * packed_pairs(inputs, type) * 2 * W / 2;
    return std::max(floats, integer_workspace(inputs));
}

void multiply_linear(const LinearArgs& args, const Portion& portion) {
    if (multiplied_as_integers(args, portion.rows)) return multiply_integers(args, portion);
    switch (args.type) {
        case FLOAT32: return run<Vectors<float>, Dense<float>>(args, portion);
        case BFLOAT16: return run_bf16<Dense<bf16>>(args, portion);
        case INT8:
        case INT8_INT8: return run_bf16<Coded<INT8>>(args, portion);
        case INT4: return run_bf16<Coded<INT4>>(args, portion);
        case FLOAT8: return run_bf16<Coded<FLOAT8>>(args, portion);
        case FLOAT4: return run_bf16<Coded<FLOAT4>>(args, portion);
    }
}

void kvrelay_linear(const void* raw, int thread, int threads) {
    const LinearArgs& args = *static_cast<const LinearArgs*>(raw);
    multiply_linear(args, {*args.rows, thread, threads});
}
