// One long row rotated by a block whose lanes hold sixteen numbers each, eight neighbours and the eight that lie 64
// further: eight lanes are one block of 128, so three exchanges do what five do for lanes of four, loads and stores
// are whole lines, and the same numbers meet in the same order.
#pragma once

#include "rotate.cuh"

namespace exl3 {

constexpr int kWide = 16;       // numbers of a lane
constexpr int kWideApart = 64;  // from its first eight to its others

// A row to rotate: `k` elements, a multiple of 128, from x[index] on.
struct WideRow {
    const void* x;
    Type type;
    int64_t index;
    const __half* suh;
    int k;
};

// The lane's sixteen numbers of sixteen bits, half or bfloat16, by two loads.
__device__ __forceinline__ void load_short_sixteen(const void* source, bool half, int64_t index, Quad (&q)[4]) {
    const uint4* from = reinterpret_cast<const uint4*>(static_cast<const __half*>(source) + index);
    const uint4 raw[2] = {from[0], from[kWideApart / 8]};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint4& eight = raw[i >> 1];
        const uint32_t low = i & 1 ? eight.z : eight.x, high = i & 1 ? eight.w : eight.y;
        const float2 a = __half22float2(*reinterpret_cast<const __half2*>(&low));
        const float2 b = __half22float2(*reinterpret_cast<const __half2*>(&high));
        q[i] = {{half ? a.x : __uint_as_float(low << 16), half ? a.y : __uint_as_float(low & 0xffff0000u),
                 half ? b.x : __uint_as_float(high << 16), half ? b.y : __uint_as_float(high & 0xffff0000u)}};
    }
}

// Butterflies of q[i] and q[i + step].
__device__ __forceinline__ void hadamard_apart(Quad (&q)[4], int step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (i & step) continue;
        const Quad a = q[i], b = q[i + step];
        q[i] = a + b;
        q[i + step] = a + b * -1.0f;
    }
}

// The 128-point transform over eight lanes of sixteen numbers.
__device__ __forceinline__ void hadamard128_wide(Quad (&q)[4], int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) q[i] = hadamard4(q[i]);
    hadamard_apart(q, 1);
#pragma unroll
    for (int step = 1; step < 8; step *= 2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) q[i] = hadamard_step(q[i], step, lane);
    }
    hadamard_apart(q, 2);
}

// The lane's place of quad `i` behind its first number.
__device__ __forceinline__ constexpr int wide_place(int i) { return (i >> 1) * kWideApart + (i & 1) * 4; }

// The lane's rotated numbers, the first of them element `at`.
__device__ __forceinline__ void load_wide(const WideRow& row, int at, int lane, Quad (&q)[4]) {
    Quad suh[4];
    load_short_sixteen(row.suh, true, at, suh);
    if (row.type == Type::kFloat) {
#pragma unroll
        for (int i = 0; i < 4; ++i) q[i] = load_quad(row.x, Type::kFloat, row.index + at + wide_place(i));
    } else {
        load_short_sixteen(row.x, row.type == Type::kHalf, row.index + at, q);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) q[i] = q[i] * suh[i];
    hadamard128_wide(q, lane);
}

// A whole block rotates the row and gives `store(element, numbers)` the numbers of every lane, placed by `wide_place`
// behind it, times the row's power of two; `bound` is zero before and holds the bits of the row's largest after. A row
// of 4096 is read once.
template <typename Store>
__device__ __forceinline__ void rotate_wide(const WideRow& row, unsigned* bound, int thread, Store store) {
    constexpr int kStride = kThreads * kWide;
    const int lane = thread & 31, place = (lane & 7) * 8;
    const int warps_first = (thread >> 5) * 32 * kWide, mine = (lane >> 3) * 128 + place;
    const int last = row.k - 128 + place;  // behind the end whole blocks once more
    Quad q[4] = {};
    for (int first = warps_first; first < row.k; first += kStride) {
        load_wide(row, min(first + mine, last), lane, q);
        unsigned bits = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) bits = max(bits, largest_bits(q[i]));
        bits = __reduce_max_sync(kFullWarp, bits);
        if (lane == 0) atomicMax(bound, bits);
    }
    __syncthreads();
    const float scale = row_scale(*bound);
    for (int first = warps_first; first < row.k; first += kStride) {
        if (row.k > kStride) load_wide(row, min(first + mine, last), lane, q);
        if (first + mine > last) continue;
#pragma unroll
        for (int i = 0; i < 4; ++i) q[i] = q[i] * scale;
        store(first + mine, q);
    }
}

}  // namespace exl3
