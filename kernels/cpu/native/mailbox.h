// Messages from one rank to another of the same machine, in memory that they share: a few slots, used in turn.
//
//     aborted          set once and for ever
//     bell             where the two ranks' threads sleep
//     sent, taken      numbers of messages; each is written by one rank
//     slots [slots]    a message's size in bytes, then its bytes
//
// The sender waits while all slots are full, the receiver while all are empty.
#pragma once

#include <cstdint>

#include "bell.h"

// One rank's end.
struct Mailbox {
    char* memory;        // of kvrelay_mailbox_bytes(slots, slot_bytes); zeros at first
    int64_t slot_bytes;  // of the largest message
    int64_t spin_ns;     // that a thread looks for the other rank before it sleeps
    int64_t timeout_ns;  // of one wait
    int32_t slots;
    Failure failure;     // what ended this rank's end for ever
};

struct MessageArgs {
    Mailbox* box;
    char* rows;         // [count, row_bytes]
    int64_t count;
    int64_t row_bytes;
    int64_t stride;     // bytes from row to row
};

extern "C" {
// After a failure, neither changes anything. A message of another size than the receiver expects is a failure.
void kvrelay_mailbox_send(const MessageArgs* args);
void kvrelay_mailbox_receive(const MessageArgs* args);
int64_t kvrelay_mailbox_bytes(int32_t slots, int64_t slot_bytes);
// Ends the waits of both ranks. Any thread.
void kvrelay_mailbox_abort(Mailbox* box);
}
