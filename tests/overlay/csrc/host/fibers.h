// The threads of a block as fibers that take turns: where one waits for its warp or its block, the others run until
// all have arrived. One block runs at a time.
#pragma once

#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>

struct uint3 {
    unsigned x, y, z;
};
inline uint3 threadIdx, blockIdx, gridDim;

namespace host {

constexpr int kThreads = 256, kWarps = kThreads / 32, kLauncher = kThreads, kStackBytes = 1 << 16;
constexpr int kShownBytes = 96;

// A group of threads that wait until all of them have arrived.
struct Meeting {
    int size, arrived = 0, round = 0;
};

struct Warp {
    Meeting meeting{32};
    alignas(16) unsigned char shown[2][32][kShownBytes];
};

struct Fiber {
    ucontext_t begin;  // where it starts
    void* here[5];     // where it waits once it has
    bool started = false, ended = true;
};

inline Fiber fibers[kThreads + 1];
inline Meeting whole_block{kThreads};
inline Warp warps[kWarps];
inline int running = kLauncher;
inline bool backwards = false;  // the last thread, and of a grid the last block, is first
inline int idle = 0;  // turns in a row that found nothing to do
inline const std::function<void()>* body = nullptr;

[[noreturn]] inline void stop(const char* what, long number) {
    std::fprintf(stderr, "block %u %u %u, thread %d: %s (%ld)\n", blockIdx.x, blockIdx.y, blockIdx.z, running, what,
                 number);
    std::exit(1);
}

inline int lane() { return running % 32; }

[[gnu::noinline]] inline void jump_to(Fiber& next) {
    if (next.started) __builtin_longjmp(next.here, 1);
    setcontext(&next.begin);
}

// Jumps, because swapcontext makes system calls and takes many times as long.
[[gnu::noinline]] inline void switch_to(int thread) {
    Fiber& mine = fibers[running];
    running = thread;
    threadIdx.x = thread;
    mine.started = true;
    if (__builtin_setjmp(mine.here) == 0) jump_to(fibers[thread]);
}

inline void give_turn() {
    for (int step = 1; step <= kThreads; ++step) {
        const int thread = (running + (backwards ? kThreads - step : step)) % kThreads;
        if (!fibers[thread].ended) return switch_to(thread);
    }
    switch_to(kLauncher);
}

inline void meet(Meeting& meeting) {
    const int round = meeting.round;
    idle = 0;
    if (++meeting.arrived == meeting.size) {
        meeting.arrived = 0;
        ++meeting.round;
        return;
    }
    for (give_turn(); meeting.round == round; give_turn()) {
        if (++idle > kThreads) stop("all threads wait, this one in a group of", meeting.size);
    }
}

// What every lane of a warp has shown, as long as this one shows nothing else: two places take turns, so one
// meeting is enough.
template <typename T>
struct Shown {
    const unsigned char (*of)[kShownBytes];
    const T& operator[](int lane) const { return *reinterpret_cast<const T*>(of[lane]); }
};

template <typename T>
Shown<T> show(const T& mine) {
    static_assert(sizeof(T) <= kShownBytes);
    Warp& warp = warps[running / 32];
    auto* place = warp.shown[warp.meeting.round & 1];
    std::memcpy(place[lane()], &mine, sizeof mine);
    meet(warp.meeting);
    return {place};
}

inline void run_fiber() {
    for (;;) {
        (*body)();
        fibers[running].ended = true;
        idle = 0;
        give_turn();
    }
}

inline void run_block(const std::function<void()>& kernel) {
    static const std::unique_ptr<char[]> stacks(new char[size_t(kThreads) * kStackBytes]);
    body = &kernel;
    for (int i = 0; i < kThreads; ++i) {
        fibers[i].ended = false;
        if (fibers[i].started) continue;
        getcontext(&fibers[i].begin);
        fibers[i].begin.uc_stack.ss_sp = stacks.get() + size_t(i) * kStackBytes;
        fibers[i].begin.uc_stack.ss_size = kStackBytes;
        makecontext(&fibers[i].begin, run_fiber, 0);
    }
    switch_to(backwards ? kThreads - 1 : 0);
}

}  // namespace host
