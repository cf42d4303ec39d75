// The weight-streaming product of the decode kernels: a block multiplies a few token rows with
// 128 columns (or 128 gate and 128 up columns) of packed weights.
//
// Weights are the A operand (a tile in ring order is the fragment of its transpose), tokens are N.
// Each warp owns 64 columns and a slice of k, streams its own tiles through a private ring of
// shared memory and never meets another warp until the slices are added. 3inst and mcg weights
// enter as their two halves in adjacent k slots against a doubled activation; mul1 weights as
// 1024 + byte sum, corrected afterwards with the activation sum that a tile of ones yields.
#pragma once

#include "codec.cuh"
#include "hadamard.cuh"
#include "ptx.cuh"

namespace exl3 {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kStages = 2;  // the loop flips between two slots
// Each half of a pair doubled, by a product with one: permutes would load the busier pipe.
__device__ __forceinline__ void double_halves(uint32_t pair, uint32_t& first, uint32_t& second) {
    asm("{.reg .b16 l, h; .reg .b32 a, b, one;\n"
        "mov.b32 {l, h}, %2; mov.b32 a, {l, l}; mov.b32 b, {h, h}; mov.b32 one, 0x3c003c00;\n"
        "mul.rn.f16x2 %0, a, one; mul.rn.f16x2 %1, b, one;}"
        : "=r"(first), "=r"(second)
        : "r"(pair));
}

constexpr int kTilesPerWarp = 4;
// k tiles a stage: at five and six bits four would leave too little shared memory for activations.
constexpr int steps_per_stage(int bits) { return bits >= 5 ? 2 : 4; }

template <int K, Codebook C, int NT, int Matrices>
struct Stream {
    static constexpr int kRows = 8 * NT;
    static constexpr int kSlices = kWarps / (2 * Matrices);
    static constexpr int kColumns = 128 * Matrices;
    static constexpr int kTileWords = 8 * K;
    static constexpr int kStepsPerStage = steps_per_stage(K);
    static constexpr int kStepWords = kTilesPerWarp * kTileWords;
    static constexpr int kStageWords = kStepsPerStage * kStepWords;
    static constexpr int kRingBytes = kWarps * kStages * kStageWords * 4;
    static constexpr int kReduceStride = kColumns + 4;  // words; 2 * stride = 8 mod 32 banks
    // Few rows: every slice has its own buffer; many rows: slices take turns in one.
    static constexpr int kReduceBuffers = NT == 1 ? kSlices : 1;
    static constexpr int kReduceBytes = kReduceBuffers * kRows * kReduceStride * 4;
    static constexpr bool kByteSum = C == Codebook::kMul1;

    float acc[kTilesPerWarp][NT][4];
    float ones[NT][4];

    // One warp's share: which matrix, which 64 of the 128 columns, which slice of the k tiles.
    struct Share {
        int matrix, half, slice, stage_begin, stage_end;

        __device__ __forceinline__ Share(int warp, int k_stages) {
            half = warp & 1;
            matrix = Matrices == 2 ? (warp >> 1) & 1 : 0;
            slice = warp / (2 * Matrices);
            stage_begin = slice * k_stages / kSlices;
            stage_end = (slice + 1) * k_stages / kSlices;
        }
    };

    // A lane's part of the copy of one stage: up to kChunks pieces of 16 bytes. Offsets are fixed over
    // the kernel; only the base moves.
    static constexpr int kChunks = (kStageWords / 4 + 31) / 32;
    struct Copier {
        const unsigned char* source;
        uint32_t target;
        int row_bytes;
        int offset[kStepWords / 4 == 32 ? 1 : kChunks];
        bool last_chunk;

        __device__ __forceinline__ Copier(uint32_t ring, const uint32_t* tiles, int row, int lane)
            : target(ring + lane * 16), row_bytes(row) {
            constexpr int kStepChunks = kStepWords / 4;
            source = reinterpret_cast<const unsigned char*>(tiles);
            if constexpr (kStepChunks == 32) {
                source += lane * 16;
            } else {
#pragma unroll
                for (int i = 0; i < kChunks; ++i) {
                    const int chunk = i * 32 + lane;
                    const int step = chunk / kStepChunks;
                    offset[i] = step * row_bytes + (chunk - step * kStepChunks) * 16;
                }
            }
            last_chunk = (kChunks - 1) * 32 + lane < kStageWords / 4;
        }

        __device__ __forceinline__ void next(int slot) {
            const uint32_t to = target + slot * kStageWords * 4;
#pragma unroll
            for (int i = 0; i < kChunks; ++i) {
                const int from = kStepWords / 4 == 32 ? i * row_bytes
                                                      : offset[kStepWords / 4 == 32 ? 0 : i];
                if (i + 1 < kChunks || kStageWords / 4 % 32 == 0 || last_chunk) {
                    copy_async_16(to + i * 512, source + from);
                }
            }
            source += kStepsPerStage * row_bytes;
        }
    };

    __device__ __forceinline__ void step(const uint32_t* tiles, const LaneMap<K>& map,
                                         const uint2 (&b)[NT]) {
        uint32_t doubled[NT][4];
        if constexpr (!kByteSum) {
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                double_halves(b[n].x, doubled[n][0], doubled[n][1]);
                double_halves(b[n].y, doubled[n][2], doubled[n][3]);
            }
        } else {
            constexpr uint32_t kOne = 0x3c003c00u;
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                mma_16x8x16(ones[n], kOne, kOne, kOne, kOne, b[n].x, b[n].y);
            }
        }
#pragma unroll
        for (int tile = 0; tile < kTilesPerWarp; ++tile) {
            uint32_t x[8];
            lane_hashes<C, K>(load_window<K>(tiles + tile * kTileWords, map), x);
            if constexpr (kByteSum) {
                uint32_t pair[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    pair[j] = __byte_perm(byte_sum_half(x[2 * j]), byte_sum_half(x[2 * j + 1]), 0x5410);
                }
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    mma_16x8x16(acc[tile][n], pair[0], pair[2], pair[1], pair[3], b[n].x, b[n].y);
                }
            } else {
#pragma unroll
                for (int j = 0; j < 8; ++j) x[j] = pair_word(x[j]);
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    mma_16x8x16(acc[tile][n], x[0], x[4], x[1], x[5], doubled[n][0], doubled[n][1]);
                    mma_16x8x16(acc[tile][n], x[2], x[6], x[3], x[7], doubled[n][2], doubled[n][3]);
                }
            }
        }
    }

    // Starts the copies of the first stages; needs nothing but weights, so it may run before the
    // activations exist.
    __device__ __forceinline__ static void prefetch(Copier& copier, int stages) {
#pragma unroll
        for (int s = 0; s < kStages - 1; ++s) {
            if (s < stages) copier.next(s);
            copy_async_commit();
        }
    }

    // `activations`: fragment order [k tile][rows][16], `rows` of them, from the warp's first k tile.
    __device__ __forceinline__ void run(const uint32_t* ring, Copier& copier,
                                        const __half* activations, int rows, int stages, int lane) {
        const LaneMap<K> map(lane);
        const uint2* b_lane[NT];
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            const int row = min(n * 8 + (lane >> 2), rows - 1);
            b_lane[n] = reinterpret_cast<const uint2*>(activations) + row * 4 + (lane & 3);
        }
#pragma unroll
        for (int t = 0; t < kTilesPerWarp; ++t)
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) acc[t][n][i] = 0.0f;
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) ones[n][i] = 0.0f;

        const int b_step = rows * 4;
        int slot = 0;
#pragma unroll 1
        for (int s = 0; s < stages; ++s) {
            copy_async_wait<kStages - 2>();
            __syncwarp();
            if (s + kStages - 1 < stages) copier.next(slot ^ 1);
            copy_async_commit();
            const uint32_t* tiles = ring + slot * kStageWords;
#pragma unroll
            for (int i = 0; i < kStepsPerStage; ++i) {
                uint2 b[NT];
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    b[n] = *b_lane[n];
                    b_lane[n] += b_step;
                }
                step(tiles + i * kStepWords, map, b);
            }
            slot ^= 1;
        }
        copy_async_wait<0>();
    }

    // Leaves the sums of all warps in `reduce`; every thread of the block calls it after `run`.
    __device__ __forceinline__ void put(float* reduce, const Share& share, int lane) const {
        __syncthreads();
        if constexpr (kReduceBuffers == kSlices) {
            put_slice<false>(reduce + share.slice * kRows * kReduceStride, share, lane);
            __syncthreads();
        } else {
#pragma unroll 1
            for (int s = 0; s < kSlices; ++s) {
                if (share.slice == s && s == 0) put_slice<false>(reduce, share, lane);
                if (share.slice == s && s > 0) put_slice<true>(reduce, share, lane);
                __syncthreads();
            }
        }
    }

    template <bool Add>
    __device__ __forceinline__ void put_slice(float* reduce, const Share& share, int lane) const {
        const int column = share.matrix * 128 + share.half * 64 + (lane >> 2);
#pragma unroll
        for (int n = 0; n < NT; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = n * 8 + (lane & 3) * 2 + (i & 1);
                float* line = reduce + row * kReduceStride + column;
#pragma unroll
                for (int t = 0; t < kTilesPerWarp; ++t) {
                    float value = acc[t][n][i];
                    if constexpr (kByteSum) value = value * kMul1Scale + ones[n][i & 1] * kMul1Bias;
                    float* cell = line + t * 16 + (i >> 1) * 8;
                    *cell = Add ? *cell + value : value;
                }
            }
        }
    }

    // The sum over slices of four consecutive columns of one row.
    __device__ __forceinline__ static Quad get(const float* reduce, int row, int column) {
        Quad sum = {};
#pragma unroll
        for (int s = 0; s < kReduceBuffers; ++s) {
            const float4 part =
                *reinterpret_cast<const float4*>(reduce + (s * kRows + row) * kReduceStride + column);
            sum = sum + Quad{{part.x, part.y, part.z, part.w}};
        }
        return sum;
    }
};

// Stores a lane's four consecutive elements of a row, first element `k`, in fragment order.
__device__ __forceinline__ void put_fragment(__half* activations, int rows, int row, int k,
                                             const Quad& q) {
    const int within = k & 15;
    __half* tile = activations + ((k >> 4) * rows + row) * 16;
    __half2* first = reinterpret_cast<__half2*>(tile + ((within & 7) >> 1) * 4) + (within >> 3);
    first[0] = __floats2half2_rn(q.v[0], q.v[1]);
    first[2] = __floats2half2_rn(q.v[2], q.v[3]);
}

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

    // The lane's numbers times their scales of tasks first, first + kWarps, ..
    template <bool Float, int Batch>
    __device__ __forceinline__ void load(Quad (&q)[Batch], int first, int lane) const {
#pragma unroll
        for (int i = 0; i < Batch; ++i) {
            const int task = min(first + i * kWarps, tasks() - 1), row = row_of(task);
            const int at = place_of(task, row, lane);
            const int64_t from = index(row) + at;
            q[i] = (Float ? load_quad(x, Type::kFloat, from) : load_short_quad(x, type == Type::kHalf, from)) *
                   load_quad(suh + at);
        }
    }
};

// The power of two of a row from its bound: brings |x * suh| to at most 2^11, so that a rotated element, at
// most sqrt(128) larger, stays inside half range.
__device__ __forceinline__ float row_scale(const unsigned* bounds, int row) {
    return power_of_two_scale(__uint_as_float(bounds[row]), 11);
}

// Raises `bounds[row]` to the largest |x * suh| of the tasks first, first + kWarps, .. held in `q`.
template <typename Index, int Batch>
__device__ __forceinline__ void raise_bounds(const RowSource<Index>& source, unsigned* bounds,
                                             const Quad (&q)[Batch], int first, int lane) {
#pragma unroll
    for (int i = 0; i < Batch; ++i) {
        const int task = first + i * kWarps;
        if (task >= source.tasks()) break;
        const float most = warp_max(largest(q[i]));
        if (lane == 0) atomicMax(bounds + source.row_of(task), __float_as_uint(most));
    }
}

// Gives `store(row, first element, numbers)` the rotated numbers of the same tasks: had128(x * suh) times the
// row's power of two.
template <typename Index, typename Store, int Batch>
__device__ __forceinline__ void rotate_held(const RowSource<Index>& source, const unsigned* bounds,
                                            const Quad (&q)[Batch], int first, int lane, Store store) {
#pragma unroll
    for (int i = 0; i < Batch; ++i) {
        const int task = first + i * kWarps;
        if (task >= source.tasks()) break;
        const int row = source.row_of(task);
        store(row, source.place_of(task, row, lane), hadamard128(q[i] * row_scale(bounds, row), lane));
    }
}

// A whole block rotates all rows; `bounds`, one a row, are zero before and hold the rows' largest after. What a
// warp can hold it reads once.
template <bool Float, typename Index, typename Store>
__device__ __forceinline__ void rotate_each_of(const RowSource<Index>& source, unsigned* bounds, int warp,
                                               int lane, Store store) {
    constexpr int kBatch = 4, kStride = kBatch * kWarps;
    Quad q[kBatch];
    if (source.tasks() <= kStride) {
        source.template load<Float>(q, warp, lane);
        raise_bounds(source, bounds, q, warp, lane);
        __syncthreads();
        rotate_held(source, bounds, q, warp, lane, store);
        return;
    }
#pragma unroll 1
    for (int first = warp; first < source.tasks(); first += kStride) {
        source.template load<Float>(q, first, lane);
        raise_bounds(source, bounds, q, first, lane);
    }
    __syncthreads();
#pragma unroll 1
    for (int first = warp; first < source.tasks(); first += kStride) {
        source.template load<Float>(q, first, lane);
        rotate_held(source, bounds, q, first, lane, store);
    }
}

template <typename Index, typename Store>
__device__ __forceinline__ void rotate_each(const RowSource<Index>& source, unsigned* bounds, int warp, int lane,
                                            Store store) {
    if (source.type == Type::kFloat) {
        rotate_each_of<true>(source, bounds, warp, lane, store);
    } else {
        rotate_each_of<false>(source, bounds, warp, lane, store);
    }
}

// The same in fragment order, from row `first` of `rows`.
template <typename Index>
__device__ __forceinline__ void rotate_rows(const RowSource<Index>& source, unsigned* bounds,
                                            __half* activations, int rows, int first, int warp, int lane) {
    rotate_each(source, bounds, warp, lane, [&](int row, int at, const Quad& q) {
        put_fragment(activations, rows, first + row, at, q);
    });
}

template <typename Index>
__device__ __forceinline__ RowSource<Index> row_source(const void* x, Type type, Index index,
                                                       const __half* suh, int k, int count) {
    return {x, type, index, suh, k, count};
}

}  // namespace exl3
