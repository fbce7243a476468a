#include "integers.h"

#include "integer_bytes.h"
#include "integer_nibbles.h"
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
    run<Words<false>, Packed>(args, thread, threads);
}

// With groups, weights as bfloat16 are faster for many rows if the CPU multiplies those by AMX. If it multiplies them by
// vectors, those of 8 bits are.
bool few(const LinearArgs& args) {
#ifdef __AVX512BF16__
    return tiles::used ? *args.rows <= 6 : weight_bits(args.type) == 4 || *args.rows <= 12;
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
        case INT4: return run<Nibbles<INT4>, Packed>(args, thread, threads);
        case FLOAT4: return run<Nibbles<FLOAT4>, Packed>(args, thread, threads);
        case INT8:
            if (!scaled_last(args)) return run<Words<true>, Packed>(args, thread, threads);
        default: return multiply_int8(args, thread, threads);
    }
}

int64_t integer_workspace(int64_t inputs) {
    int64_t floats = std::max(Words<true>::prepared_floats(inputs), Nibbles<INT4>::prepared_floats(inputs));
#ifdef KVRELAY_BYTES
    floats = std::max(floats, Bytes::prepared_floats(inputs));
#endif
#ifdef KVRELAY_BYTE_TILES
    floats = std::max({floats, ByteTiles<false>::prepared_floats(inputs), ByteTiles<true>::prepared_floats(inputs)});
#endif
    return round_up(floats, LINE / sizeof(float));
}
