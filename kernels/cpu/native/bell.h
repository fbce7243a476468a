// How threads of several processes wait for each other in memory that they share.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>

enum Failure : int32_t { NO_FAILURE = 0, TIMED_OUT = 1, ABORTED = 2, MISMATCHED = 3 };

using Word = std::atomic<uint32_t>;

constexpr int64_t LINE = 64, PAGE = 4096;

struct alignas(LINE) Bell {
    Word rung;      // changes with each wake-up
    Word sleepers;  // threads that sleep, or are about to
};

// Wakes all that sleep. Who changes what others wait for calls it if there are sleepers: who counts itself as one later than
// that look sees the change.
inline void ring(Bell& bell) {
    bell.rung.fetch_add(1);
    // Not private, because the threads that share the word are those of several processes.
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&bell.rung), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Returns when `done()`: looks for it during `spin_ns`, then sleeps at the bell.
template <class Done>
Failure wait_at(Bell& bell, const Word& aborted, int64_t spin_ns, int64_t timeout_ns, Done done) {
    using Clock = std::chrono::steady_clock;
    const auto began = Clock::now();
    for (const auto end = began + std::chrono::nanoseconds(spin_ns); Clock::now() < end;) {
        for (int i = 0; i < 32; i++) {
            if (done()) return NO_FAILURE;
            __builtin_ia32_pause();
        }
    }
    const auto sleep = [&] {
        for (;;) {
            const uint32_t rung = bell.rung.load();
            if (done()) return NO_FAILURE;
            if (aborted.load()) return ABORTED;
            const auto left = began + std::chrono::nanoseconds(timeout_ns) - Clock::now();
            if (left <= Clock::duration::zero()) return TIMED_OUT;
            const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(left).count();
            const timespec limit{ns / 1000000000, ns % 1000000000};
            syscall(SYS_futex, reinterpret_cast<uint32_t*>(&bell.rung), FUTEX_WAIT, rung, &limit, nullptr, 0);
        }
    };
    bell.sleepers.fetch_add(1);
    const Failure failure = sleep();
    bell.sleepers.fetch_sub(1);
    return failure;
}

// Notes a failure; the first one stays.
inline void keep_first(Failure& kept, Failure failure) {
    Failure none = NO_FAILURE;
    __atomic_compare_exchange_n(&kept, &none, failure, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}
