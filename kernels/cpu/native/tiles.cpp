#include "tiles.h"

#include <sys/syscall.h>
#include <unistd.h>

bool tiles::used = false;

#ifdef KVRELAY_TILES
namespace {

// Linux permits the registers to all threads of a process after it has requested them.
bool permitted() {
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

}  // namespace

int32_t kvrelay_use_tiles(int32_t wanted) { return tiles::used = wanted && permitted(); }
#else
int32_t kvrelay_use_tiles(int32_t) { return 0; }
#endif

int32_t kvrelay_tiles_used() { return tiles::used; }

const char* kvrelay_instruction_set() {
#if defined(KVRELAY_TILES) && defined(KVRELAY_BYTE_TILES)
    return "amx";
#elif defined(__AVX512F__) && defined(__AVX512VNNI__) && defined(__AVX512BF16__)
    return "avx512bf16";
#elif defined(__AVX512F__) && defined(__AVX512VNNI__)
    return "avx512vnni";
#elif defined(__AVX512F__)
    return "avx512";
#elif defined(__AVXVNNI__)
    return "avxvnni";
#else
    return "avx2";
#endif
}
