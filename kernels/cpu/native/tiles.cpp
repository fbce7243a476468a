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
