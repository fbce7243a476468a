#include "mailbox.h"

#include <cstring>

namespace {

struct alignas(LINE) Counter {
    Word value;
};

struct Shared {
    alignas(LINE) Word aborted;
    Bell bell;
    Counter sent, taken;
};

int64_t slot_size(int64_t slot_bytes) { return (LINE + slot_bytes + LINE - 1) / LINE * LINE; }

Shared& shared(const Mailbox& box) { return *reinterpret_cast<Shared*>(box.memory); }

char* slot(const Mailbox& box, uint32_t number) { return box.memory + PAGE + number % box.slots * slot_size(box.slot_bytes); }

void fail(Mailbox& box, Failure failure) {
    keep_first(box.failure, failure);
    kvrelay_mailbox_abort(&box);
}

// Waits until `done()`; false after a failure.
template <class Done>
bool wait(Mailbox& box, Done done) {
    Shared& memory = shared(box);
    Failure failure = ABORTED;
    if (!memory.aborted.load()) failure = wait_at(memory.bell, memory.aborted, box.spin_ns, box.timeout_ns, done);
    if (failure == NO_FAILURE) return true;
    fail(box, failure);
    return false;
}

void advance(Shared& memory, Counter& counter) {
    counter.value.fetch_add(1);
    if (memory.bell.sleepers.load()) ring(memory.bell);
}

}  // namespace

void kvrelay_mailbox_send(const MessageArgs* args) {
    Mailbox& box = *args->box;
    Shared& memory = shared(box);
    const uint32_t number = memory.sent.value.load();
    const int64_t bytes = args->count * args->row_bytes;
    if (bytes > box.slot_bytes) return fail(box, MISMATCHED);
    // The numbers may wrap around.
    if (!wait(box, [&] { return number - memory.taken.value.load() < uint32_t(box.slots); })) return;
    char* out = slot(box, number);
    memcpy(out, &bytes, sizeof(bytes));
    out += LINE;
    for (int64_t row = 0; row < args->count; row++) {
        memcpy(out + row * args->row_bytes, args->rows + row * args->stride, args->row_bytes);
    }
    advance(memory, memory.sent);
}

void kvrelay_mailbox_receive(const MessageArgs* args) {
    Mailbox& box = *args->box;
    Shared& memory = shared(box);
    const uint32_t number = memory.taken.value.load();
    if (!wait(box, [&] { return memory.sent.value.load() != number; })) return;
    const char* message = slot(box, number);
    int64_t bytes;
    memcpy(&bytes, message, sizeof(bytes));
    if (bytes != args->count * args->row_bytes) return fail(box, MISMATCHED);
    message += LINE;
    for (int64_t row = 0; row < args->count; row++) {
        memcpy(args->rows + row * args->stride, message + row * args->row_bytes, args->row_bytes);
    }
    advance(memory, memory.taken);
}

int64_t kvrelay_mailbox_bytes(int32_t slots, int64_t slot_bytes) { return PAGE + slots * slot_size(slot_bytes); }

void kvrelay_mailbox_abort(Mailbox* box) {
    Shared& memory = shared(*box);
    memory.aborted.store(1);
    ring(memory.bell);
}
