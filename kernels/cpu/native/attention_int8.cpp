#include "attention_layer.h"
#include "attention_tiles.h"
#include "tiles.h"

void write_int8(const AttentionArgs& args, int thread, int threads) { write_all<int8_t>(args, thread, threads); }

void attend_int8(const AttentionArgs& args, int thread, int threads) {
#ifdef KVRELAY_TILES
    if (tiles::used) {
        attend_all<int8_t, TileProducts>(args, thread, threads);
        return;
    }
#endif
    attend_all<int8_t, VectorProducts>(args, thread, threads);
}
