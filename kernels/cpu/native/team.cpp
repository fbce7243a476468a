#include "team.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace {

// A thread spins for this long before it sleeps. It is longer than the time between two steps, so a worker under load never
// waits for a wake-up, and short enough that an idle worker uses no CPU.
constexpr auto SPIN = std::chrono::microseconds(200);

void futex(std::atomic<uint32_t>& word, int operation, uint32_t value) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}

class Barrier {
public:
    explicit Barrier(int threads) : threads_(threads) {}

    // Returns when all threads have come, whether `*stop` was set then: the same to all of them.
    bool wait(const int32_t* stop = nullptr) {
        if (threads_ == 1) return is_set(stop);
        uint32_t phase = phase_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
            arrived_.store(0, std::memory_order_relaxed);
            stopped_ = is_set(stop);
            phase_.fetch_add(1);
            // A thread increments `sleepers_` before it checks the phase for the last time, so a thread that isn't counted
            // yet will see the new phase.
            if (sleepers_.load()) futex(phase_, FUTEX_WAKE, INT_MAX);
            return stopped_;
        }
        auto deadline = std::chrono::steady_clock::now() + SPIN;
        do {
            for (int i = 0; i < 32; i++) {
                if (phase_.load(std::memory_order_acquire) != phase) return stopped_;
                __builtin_ia32_pause();
            }
        } while (std::chrono::steady_clock::now() < deadline);
        sleepers_.fetch_add(1);
        while (phase_.load() == phase) futex(phase_, FUTEX_WAIT, phase);
        sleepers_.fetch_sub(1);
        return stopped_;
    }

private:
    static bool is_set(const int32_t* stop) { return stop != nullptr && __atomic_load_n(stop, __ATOMIC_RELAXED); }

    const int threads_;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};
    std::atomic<int> sleepers_{0};
    bool stopped_ = false;  // changed by the last thread to come, when no other one reads it
};

class Team {
public:
    explicit Team(int threads) : threads_(threads), barrier_(threads) {
        // The main thread handles the signals of the process.
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        try {
            for (int thread = 1; thread < threads; thread++) others_.emplace_back(&Team::serve, this, thread);
        } catch (const std::system_error&) {
            // The threads that did start sleep forever, at a barrier that never completes.
            for (auto& other : others_) other.detach();
            failed_ = true;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    ~Team() {
        program_ = nullptr;
        barrier_.wait();
        for (auto& other : others_) other.join();
    }

    bool failed() const { return failed_; }

    // After the last barrier, no thread reads the program or `passes` any more.
    void run(const Instruction* program, int64_t count, const int64_t* passes, const int32_t* stop) {
        if (count == 0) return;
        program_ = program;
        count_ = count;
        passes_ = passes;
        stop_ = stop;
        barrier_.wait();
        execute(0);
    }

private:
    void serve(int thread) {
        pthread_setname_np(pthread_self(), "kvrelay-team");
        for (;;) {
            barrier_.wait();
            if (program_ == nullptr) return;
            execute(thread);
        }
    }

    void execute(int thread) {
        const Instruction* program = program_;
        const int64_t* passes = passes_;
        const int32_t* stop = stop_;
        const int64_t count = count_;
        for (bool again = true; again;) {
            for (int64_t i = 0; i < count; i++) {
                program[i].kernel(program[i].args, thread, threads_);
                if (barrier_.wait(stop)) return;
            }
            again = passes != nullptr && *passes > 0;
            // The caller writes `passes` for its next run, so it must not return before all threads have read it.
            if (passes != nullptr) barrier_.wait();
        }
    }

    const int threads_;
    bool failed_ = false;
    Barrier barrier_;
    const Instruction* program_ = nullptr;
    int64_t count_ = 0;
    const int64_t* passes_ = nullptr;
    const int32_t* stop_ = nullptr;
    std::vector<std::thread> others_;
};

}  // namespace

void* kvrelay_team_new(int threads) {
    Team* team = new (std::nothrow) Team(threads);
    // A failed team is never freed, because the threads that did start still use it.
    return team == nullptr || team->failed() ? nullptr : team;
}

void kvrelay_team_run(
    void* team, const Instruction* program, int64_t count, const int64_t* passes, const int32_t* stop
) {
    static_cast<Team*>(team)->run(program, count, passes, stop);
}

void kvrelay_team_free(void* team) { delete static_cast<Team*>(team); }
