#include "attention_layer.h"
#include "attention_tiles.h"
#include "tiles.h"

void write_bf16(const AttentionArgs& args, int thread, int threads) { write_all<bf16>(args, thread, threads); }

void attend_bf16(const AttentionArgs& args, int thread, int threads) {
#ifdef KVRELAY_TILES
    if (tiles::used) {
        attend_all<bf16, TileProducts>(args, thread, threads);
        return;
    }
#endif
    attend_all<bf16, VectorProducts>(args, thread, threads);
}
