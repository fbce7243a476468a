#include "integers.h"

#include "integer_bytes.h"
#include "integer_rows.h"
#include "integer_words.h"

namespace {

// From this number of rows on, bytes or tiles are faster than words.
constexpr int64_t MANY = 5;

void multiply_int8(const LinearArgs& args, int thread, int threads) {
    [[maybe_unused]] const bool many = *args.rows >= MANY, narrow = args.type == INT8_INT8;
#ifdef KVRELAY_BYTE_TILES
    if (many && tiles::used) {
        return narrow ? run<ByteTiles<false>, Packed>(args, thread, threads)
                      : run<ByteTiles<true>, Packed>(args, thread, threads);
    }
#endif
#ifdef KVRELAY_BYTES
    if (many && narrow) return run<Bytes, Packed>(args, thread, threads);
#endif
    run<Words<INT8, false>, Packed>(args, thread, threads);
}

// With groups, weights as bfloat16 are faster for many rows where the CPU multiplies those.
bool few(const LinearArgs& args) {
#ifdef __AVX512BF16__
    return *args.rows <= (tiles::used ? 6 : 12);
#else
    return true;
#endif
}

}  // namespace

bool multiplied_as_integers(const LinearArgs& args) {
    if (args.type == FLOAT8 || weight_bits(args.type) > 8) return false;
    return args.type == INT8_INT8 || (args.type == INT8 && scaled_last(args)) || few(args);
}

void multiply_integers(const LinearArgs& args, int thread, int threads) {
    switch (args.type) {
        case INT4: return run<Words<INT4, true>, Packed>(args, thread, threads);
        case FLOAT4: return run<Words<FLOAT4, true>, Packed>(args, thread, threads);
        case INT8:
            if (!scaled_last(args)) return run<Words<INT8, true>, Packed>(args, thread, threads);
        default: return multiply_int8(args, thread, threads);
    }
}

int64_t integer_workspace(int64_t inputs) {
    int64_t floats = std::max(Words<INT8, false>::prepared_floats(inputs), Words<INT4, true>::prepared_floats(inputs));
#ifdef KVRELAY_BYTES
    floats = std::max(floats, Bytes::prepared_floats(inputs));
#endif
#ifdef KVRELAY_BYTE_TILES
    floats = std::max({floats, ByteTiles<false>::prepared_floats(inputs), ByteTiles<true>::prepared_floats(inputs)});
#endif
    return round_up(floats, LINE / sizeof(float));
}
