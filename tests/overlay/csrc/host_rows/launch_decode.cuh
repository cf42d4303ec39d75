// Stands in for the launcher and the machine instructions when a kernel is compiled for the host: the threads of a
// block take turns as fibers, products and barriers make them wait for each other, blocks follow one another.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include <cuda_runtime_api.h>

#define __device__
#define __global__
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(...)

struct dim3 {
    unsigned x = 1;
    explicit dim3(unsigned width = 1) : x(width) {}
};
struct uint4 {
    uint32_t x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
struct __nv_bfloat16 {
    uint16_t bits;
};
using std::min;

inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (std::isnan(value)) return {0x7fff};
    return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
    const uint64_t bytes = (uint64_t(high) << 32) | low;
    uint32_t out = 0;
    for (int i = 0; i < 4; ++i) out |= uint32_t(bytes >> (8 * (selector >> (4 * i) & 7)) & 255) << (8 * i);
    return out;
}

namespace exl3 {

constexpr int kWarps = 8, kThreads = 32 * kWarps, kUnsupported = -1;

// A group of fibers that wait until all of them have arrived.
struct Meeting {
    int size, arrived = 0, round = 0;
};

struct Fragments {
    uint32_t a[4], b[2];
};

struct Block {
    ucontext_t scheduler, fibers[kThreads];
    std::unique_ptr<char[]> stacks{new char[kThreads * kStack]};
    bool done[kThreads] = {};
    int running = 0;
    Meeting all{kThreads}, warps[kWarps] = {{32}, {32}, {32}, {32}, {32}, {32}, {32}, {32}};
    Fragments fragments[kThreads];
    std::function<void()> body;
    static constexpr int kStack = 1 << 16;
};
inline Block* block = nullptr;
inline const unsigned char* readable_begin = nullptr;  // what `load_once_16` may read
inline const unsigned char* readable_end = nullptr;

inline void meet(Meeting& meeting) {
    const int round = meeting.round;
    if (++meeting.arrived == meeting.size) {
        meeting.arrived = 0;
        ++meeting.round;
    }
    while (meeting.round == round) swapcontext(&block->fibers[block->running], &block->scheduler);
}

struct Index {
    int x;
};
inline Index threadIdx, blockIdx;
inline void __syncthreads() { meet(block->all); }
inline void wait_for_previous_kernel() {}
inline void allow_next_kernel() {}

inline uint4 load_once_16(const void* global) {
    const auto* from = static_cast<const unsigned char*>(global);
    if (from < readable_begin || from + 16 > readable_end || (from - readable_begin) % 16) {
        std::fprintf(stderr, "a lane reads 16 bytes at %td of the rows\n", from - readable_begin);
        std::exit(1);
    }
    uint4 q;
    std::memcpy(&q, from, 16);
    return q;
}

// Element `odd` of two bf16 numbers.
inline float half_of(uint32_t pair, int odd) { return float_of(odd ? pair & 0xffff0000u : pair << 16); }

inline uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t out = 0;
    for (int odd = 0; odd < 2; ++odd) {
        const float exact = std::fmaf(half_of(a, odd), half_of(b, odd), half_of(c, odd));
        out |= uint32_t(__float2bfloat16_rn(exact).bits) << (16 * odd);
    }
    return out;
}

// mma.m16n8k16: lane l holds rows l / 4 and l / 4 + 8 of a, column l / 4 of b, and of each the elements 2 (l % 4),
// 2 (l % 4) + 1 and both 8 further along k; of d the columns 2 (l % 4) and 2 (l % 4) + 1 of both rows.
inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    const int thread = block->running, first = thread / 32 * 32, lane = thread % 32;
    Fragments& mine = block->fragments[thread];
    std::memcpy(mine.a, a, sizeof a);
    mine.b[0] = b0, mine.b[1] = b1;
    meet(block->warps[thread / 32]);
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
        double sum = d[i];
        for (int k = 0; k < 16; ++k) {
            const Fragments& left = block->fragments[first + row % 8 * 4 + k % 8 / 2];
            const Fragments& right = block->fragments[first + column * 4 + k % 8 / 2];
            sum += double(half_of(left.a[row / 8 + 2 * (k / 8)], k % 2)) * half_of(right.b[k / 8], k % 2);
        }
        d[i] = static_cast<float>(sum);
    }
    meet(block->warps[thread / 32]);
}

inline void run_fiber() {
    block->body();
    block->done[block->running] = true;
    swapcontext(&block->fibers[block->running], &block->scheduler);
}

inline void run_block(const std::function<void()>& body) {
    Block made;
    block = &made;
    made.body = body;
    for (int i = 0; i < kThreads; ++i) {
        getcontext(&made.fibers[i]);
        made.fibers[i].uc_stack.ss_sp = made.stacks.get() + i * Block::kStack;
        made.fibers[i].uc_stack.ss_size = Block::kStack;
        makecontext(&made.fibers[i], run_fiber, 0);
    }
    for (bool left = true; left;) {
        left = false;
        for (int i = 0; i < kThreads; ++i) {
            if (made.done[i]) continue;
            left = true;
            made.running = threadIdx.x = i;
            swapcontext(&made.scheduler, &made.fibers[i]);
        }
    }
}

template <typename Arguments>
int launch(void (*kernel)(Arguments), dim3 grid, int, cudaStream_t, bool, const Arguments& arguments) {
    for (unsigned i = 0; i < grid.x; ++i) {
        blockIdx.x = static_cast<int>(i);
        run_block([&] { kernel(arguments); });
    }
    return 0;
}

}  // namespace exl3
