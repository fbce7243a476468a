// Sizes of the structs that Python fills in; a test compares them with its own.
#include "attention.h"
#include "linear.h"
#include "rows.h"

extern "C" int64_t kvrelay_args_bytes(int32_t which) {
    constexpr int64_t bytes[] = {sizeof(LinearArgs), sizeof(EmbedArgs), sizeof(ArgmaxArgs), sizeof(AttentionArgs)};
    return bytes[which];
}
