// AMX: registers of 16 rows of 64 bytes, and an instruction that multiplies two of them of bfloat16 and adds to a third of
// float32.
//
//     sums [16, 16] += a [16 rows, 32 inputs] . b [16 pairs of inputs, 16 columns, 2]
#pragma once

#include <cstdint>

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__AVX512BF16__)
#define KVRELAY_TILES 1
#include <immintrin.h>
#endif

extern "C" {
// Whether bfloat16 is from now on multiplied by tiles, which it is if `wanted` and the CPU and its kernel have them.
// Otherwise by vectors.
int32_t kvrelay_use_tiles(int32_t wanted);
int32_t kvrelay_tiles_used();
}

namespace tiles {

extern bool used;

constexpr int64_t ROWS = 16;
constexpr int64_t PAIRS = 16;          // of inputs
constexpr int64_t INPUTS = 2 * PAIRS;

#ifdef KVRELAY_TILES
// The tile registers of this thread, all of them whole tiles, for as long as this lives.
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
        _tile_loadconfig(&shape);
    }
    // With them, every change of threads saves and restores 8 KB more.
    ~Registers() { _tile_release(); }
    Registers(const Registers&) = delete;
    Registers& operator=(const Registers&) = delete;
};
#endif

}  // namespace tiles
