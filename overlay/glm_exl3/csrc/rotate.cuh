// Rows of activations rotated and laid out as the products read them: had128(x * suh) of blocks of 128, times a
// power of two of the row.
//
// A row of 16 elements is 32 bytes in the order of a matrix instruction's fragment: lane t of four holds elements
// 2t, 2t + 1, 2t + 8 and 2t + 9, side by side. `HalfRows` holds halves, `IntegerRows` whole numbers of 16 bits in two
// planes of bytes, x = 256 * high + low.
#pragma once

#include "hadamard.cuh"

namespace exl3 {

constexpr int kWarps = 8;  // of a block
constexpr int kThreads = 32 * kWarps;

// One over a power of two, exactly; of `no_number()` what is no number.
__device__ __forceinline__ float reciprocal_of_power(float power) {
    return __uint_as_float((254u << 23) - __float_as_uint(power));
}
__device__ __forceinline__ float no_number() { return __uint_as_float(0xff400000u); }

// The bits of the largest magnitude; those of what is no number are larger than any.
__device__ __forceinline__ unsigned largest_bits(const Quad& q) {
    unsigned bits = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) bits = max(bits, __float_as_uint(q.v[i]) & 0x7fffffffu);
    return bits;
}

// The power of two that brings the largest rotated number of a row, whose bits `bound` are, to [2^13, 2^14]: within
// half range, and whole numbers are off by at most 2^-14 of it. Marked where it is no number, which whole numbers
// could not say.
__device__ __forceinline__ float row_scale(unsigned bound) {
    const float largest = __uint_as_float(bound);
    return largest < 3.0e38f ? power_of_two_scale(largest, 14) : no_number();
}

struct HalfRows {
    // Stores a lane's four consecutive elements of a row, first element `k`.
    __device__ __forceinline__ static void put(__half* activations, int rows, int row, int k, const Quad& q) {
        const int within = k & 15;
        __half* tile = activations + ((k >> 4) * rows + row) * 16;
        __half2* first = reinterpret_cast<__half2*>(tile + ((within & 7) >> 1) * 4) + (within >> 3);
        first[0] = __floats2half2_rn(q.v[0], q.v[1]);
        first[2] = __floats2half2_rn(q.v[2], q.v[3]);
    }

    // Stores chunk `chunk` of eight halves of a row, already in order, times `ratio`.
    __device__ __forceinline__ static void put_eight(__half* activations, int rows, int row, int chunk, uint4 raw,
                                                     float ratio) {
        const __half2 factor = __float2half2_rn(ratio);
        __half2* h = reinterpret_cast<__half2*>(&raw);
#pragma unroll
        for (int j = 0; j < 4; ++j) h[j] = __hmul2(h[j], factor);
        *reinterpret_cast<uint4*>(activations + ((chunk >> 1) * rows + row) * 16 + (chunk & 1) * 8) = raw;
    }
};

struct IntegerRows {
    __device__ __forceinline__ static void put(__half* activations, int rows, int row, int k, const Quad& q) {
        const int within = k & 15;
        uint16_t* tile = reinterpret_cast<uint16_t*>(activations + ((k >> 4) * rows + row) * 16);
        uint16_t* first = tile + (within & 7) + (within >> 3);
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
            const Planes p = planes(q.v[2 * pair], q.v[2 * pair + 1]);
            first[2 * pair] = static_cast<uint16_t>(p.high);
            first[2 * pair + 8] = static_cast<uint16_t>(p.low);
        }
    }

    __device__ __forceinline__ static void put_eight(__half* activations, int rows, int row, int chunk, uint4 raw,
                                                     float ratio) {
        const __half2* h = reinterpret_cast<const __half2*>(&raw);
        uint32_t high[4], low[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float2 f = __half22float2(h[j]);
            const Planes p = planes(f.x * ratio, f.y * ratio);
            high[j] = p.high;
            low[j] = p.low;
        }
        uint2* tile = reinterpret_cast<uint2*>(activations + ((chunk >> 1) * rows + row) * 16) + (chunk & 1);
        tile[0] = make_uint2(__byte_perm(high[0], high[1], 0x5410), __byte_perm(high[2], high[3], 0x5410));
        tile[2] = make_uint2(__byte_perm(low[0], low[1], 0x5410), __byte_perm(low[2], low[3], 0x5410));
    }

private:
    // Two neighbours, rounded: their high bytes and their low ones, signed, in two bytes each.
    struct Planes {
        uint32_t high, low;
    };
    __device__ __forceinline__ static Planes planes(float first, float second) {
        const uint32_t a = static_cast<uint32_t>(__float2int_rn(first));
        const uint32_t b = static_cast<uint32_t>(__float2int_rn(second));
        return {__byte_perm(a + 128u, b + 128u, 0x0051), __byte_perm(a, b, 0x0040)};
    }
};

// Rows of activations to rotate: `count` rows of `k` elements, element 0 of row r at x[index(r)].
template <typename Index>
struct RowSource {
    const void* x;
    Type type;
    Index index;
    const __half* suh;
    int k, count;

    // A task is one block of 128 of one row.
    __device__ __forceinline__ int tasks() const { return count * (k / 128); }
    __device__ __forceinline__ int row_of(int task) const { return count == 1 ? 0 : task / (k / 128); }
    __device__ __forceinline__ int place_of(int task, int row, int lane) const {
        return (task - row * (k / 128)) * 128 + lane * 4;
    }

    // The lane's rotated numbers of tasks first, first + kWarps, ..; all loads are under way together.
    template <int Batch>
    __device__ __forceinline__ void load(Quad (&q)[Batch], int first, int lane) const {
        if (type == Type::kFloat) {
            load_scaled(q, first, lane, [this](int64_t at) { return load_quad(x, Type::kFloat, at); });
        } else {
            load_scaled(q, first, lane, [this](int64_t at) { return load_short_quad(x, type == Type::kHalf, at); });
        }
        hadamard128(q, lane);
    }

    template <int Batch, typename Load>
    __device__ __forceinline__ void load_scaled(Quad (&q)[Batch], int first, int lane, Load load) const {
#pragma unroll
        for (int i = 0; i < Batch; ++i) {
            const int task = min(first + i * kWarps, tasks() - 1), row = row_of(task);
            const int at = place_of(task, row, lane);
            q[i] = load(index(row) + at) * load_quad(suh + at);
        }
    }
};

// Raises `bounds[row]` to the bits of the largest magnitude of the tasks first, first + kWarps, .. held in `q`.
template <typename Index, int Batch>
__device__ __forceinline__ void raise_bounds(const RowSource<Index>& source, unsigned* bounds,
                                             const Quad (&q)[Batch], int first, int lane) {
#pragma unroll
    for (int i = 0; i < Batch; ++i) {
        const int task = first + i * kWarps;
        if (task >= source.tasks()) break;
        const unsigned most = __reduce_max_sync(kFullWarp, largest_bits(q[i]));
        if (lane == 0) atomicMax(bounds + source.row_of(task), most);
    }
}

// Gives `store(row, first element, numbers)` the numbers of the same tasks times the row's power of two.
template <typename Index, typename Store, int Batch>
__device__ __forceinline__ void store_held(const RowSource<Index>& source, const unsigned* bounds,
                                           const Quad (&q)[Batch], int first, int lane, Store store) {
#pragma unroll
    for (int i = 0; i < Batch; ++i) {
        const int task = first + i * kWarps;
        if (task >= source.tasks()) break;
        const int row = source.row_of(task);
        store(row, source.place_of(task, row, lane), q[i] * row_scale(bounds[row]));
    }
}

// A whole block rotates all rows; `bounds`, one a row, are zero before and hold the rows' largest after. What a
// warp can hold it reads once.
template <typename Index, typename Store>
__device__ __forceinline__ void rotate_each(const RowSource<Index>& source, unsigned* bounds, int warp, int lane,
                                            Store store) {
    constexpr int kBatch = 4, kStride = kBatch * kWarps;
    Quad q[kBatch] = {};
#pragma unroll 1
    for (int first = warp; first < source.tasks(); first += kStride) {
        source.load(q, first, lane);
        raise_bounds(source, bounds, q, first, lane);
    }
    __syncthreads();
#pragma unroll 1
    for (int first = warp; first < source.tasks(); first += kStride) {
        if (source.tasks() > kStride) source.load(q, first, lane);
        store_held(source, bounds, q, first, lane, store);
    }
}

// The same into shared or global memory, from row `first` of `rows`.
template <typename Rows, typename Index>
__device__ __forceinline__ void rotate_rows(const RowSource<Index>& source, unsigned* bounds,
                                            __half* activations, int rows, int first, int warp, int lane) {
    rotate_each(source, bounds, warp, lane, [&](int row, int at, const Quad& q) {
        Rows::put(activations, rows, first + row, at, q);
    });
}

template <typename Index>
__device__ __forceinline__ RowSource<Index> row_source(const void* x, Type type, Index index,
                                                       const __half* suh, int k, int count) {
    return {x, type, index, suh, k, count};
}

}  // namespace exl3
