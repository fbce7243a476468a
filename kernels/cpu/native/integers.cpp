#include "integers.h"

#include "integer_bytes.h"
#include "integer_nibbles.h"
#include "integer_rows.h"
#include "integer_words.h"

namespace {

// From this number of rows on, bytes or tiles are faster than words.
constexpr int64_t MANY = 5;

void multiply_int8(const LinearArgs& args, const Portion& portion) {
    [[maybe_unused]] const bool many = portion.rows >= MANY, narrow = args.type == INT8_INT8;
#ifdef KVRELAY_BYTE_TILES
    if (many && tiles::used) {
        return narrow ? run<ByteTiles<false>, Packed>(args, portion)
                      : run<ByteTiles<true>, Packed>(args, portion);
    }
#endif
#ifdef KVRELAY_BYTES
    if (many && narrow) return run<Bytes, Packed>(args, portion);
#endif
    run<Words<false>, Packed>(args, portion);
}

// With groups, weights as bfloat16 are faster for many rows if the CPU multiplies those by AMX. If it multiplies them by
// vectors, those of 8 bits are.
bool few([[maybe_unused]] const LinearArgs& args, [[maybe_unused]] int64_t rows) {
#ifdef __AVX512BF16__
    return tiles::used ? rows <= 6 : weight_bits(args.type) == 4 || rows <= 12;
#else
    return true;
#endif
}

}  // namespace

bool multiplied_as_integers(const LinearArgs& args, int64_t rows) {
    if (args.type == FLOAT8 || weight_bits(args.type) > 8) return false;
    return args.type == INT8_INT8 || (args.type == INT8 && scaled_last(args)) || few(args, rows);
}

void multiply_integers(const LinearArgs& args, const Portion& portion) {
    switch (args.type) {
        case INT4: return run<Nibbles<INT4>, Packed>(args, portion);
        case FLOAT4: return run<Nibbles<FLOAT4>, Packed>(args, portion);
        case INT8:
            if (!scaled_last(args)) return run<Words<true>, Packed>(args, portion);
        default: return multiply_int8(args, portion);
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
