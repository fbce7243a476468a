#include "attention_layer.h"

void write_float(const AttentionArgs& args, int thread, int threads) { write_all<float>(args, thread, threads); }

void attend_float(const AttentionArgs& args, int thread, int threads) {
    attend_all<float, VectorProducts>(args, thread, threads);
}
