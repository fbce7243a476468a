// AMX: registers of 16 rows of 64 bytes. An instruction multiplies two of bfloat16 and adds the product to one of float32.
//
//     sums [16, 16] += a [16 rows, 32 inputs] . b [16 pairs of inputs, 16 columns, 2]
#pragma once

#include <cstdint>

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__AVX512BF16__)
#define KVRELAY_TILES 1
#ifdef __AMX_INT8__
#define KVRELAY_BYTE_TILES 1
#endif
#include <immintrin.h>
#endif

#if (defined(__AVX512F__) && defined(__AVX512VNNI__)) || defined(__AVXVNNI__)
#define KVRELAY_BYTES 1
#endif

extern "C" {
// Chooses tiles or vectors for all later products of bfloat16. Tiles are used if `wanted` and if the CPU and the operating
// system have them; returns whether they are.
int32_t kvrelay_use_tiles(int32_t wanted);
int32_t kvrelay_tiles_used();
// The name of the instruction set that the kernels were compiled for, one of INSTRUCTION_SETS in `library.py`.
const char* kvrelay_instruction_set();
}

namespace tiles {

extern bool used;

constexpr int64_t ROWS = 16;
constexpr int64_t PAIRS = 16;          // of inputs
constexpr int64_t INPUTS = 2 * PAIRS;

#ifdef KVRELAY_TILES
// Configures all tile registers of this thread as whole tiles, for the lifetime of this object.
class Registers {
public:
    Registers() {
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } shape;
        for (int i = 0; i < 8; i++) {
            shape.row_bytes[i] = 64;
            shape.rows[i] = ROWS;
        }
        // GCC 12 takes the instruction to read 8 bytes only, and may leave out the stores of the others.
        asm volatile("" : : "m"(shape));
        _tile_loadconfig(&shape);
    }
    // With tiles configured, every context switch saves and restores 8 KB more.
    ~Registers() { _tile_release(); }
    Registers(const Registers&) = delete;
    Registers& operator=(const Registers&) = delete;
};
#endif

}  // namespace tiles
