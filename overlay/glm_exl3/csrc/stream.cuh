// The weight-streaming product of the decode kernels: a block multiplies a few token rows with
// 128 columns (or 128 gate and 128 up columns) of packed weights.
//
// Weights are the A operand (a tile in ring order is the fragment of its transpose), tokens are N.
// Each warp owns 64 columns and a slice of k, streams its own tiles through a private ring of
// shared memory and never meets another warp until the slices are added. 3inst and mcg weights
// enter as their two halves in adjacent k slots against a doubled activation; mul1 weights as
// 1024 + byte sum, corrected afterwards with the activation sum that a tile of ones yields, or as
// bytes (stream_integer.cuh).
#pragma once

#include <type_traits>

#include "codec.cuh"
#include "ptx.cuh"
#include "rotate.cuh"

namespace exl3 {

constexpr int kStages = 2;  // the loop flips between two slots
constexpr int kTilesPerWarp = 4;
// k tiles a stage: at five and six bits four would leave too little shared memory for activations.
constexpr int steps_per_stage(int bits) { return bits >= 5 ? 2 : 4; }

// What products of halves and of integers have in common: who multiplies what, and how weights come.
template <int K, int Rows, int Matrices>
struct StreamShape {
    static constexpr int kRows = Rows;
    static constexpr int kSlices = kWarps / (2 * Matrices);
    static constexpr int kColumns = 128 * Matrices;
    static constexpr int kTileWords = 8 * K;
    static constexpr int kStepsPerStage = steps_per_stage(K);
    static constexpr int kStepWords = kTilesPerWarp * kTileWords;
    static constexpr int kStageWords = kStepsPerStage * kStepWords;
    static constexpr int kRingBytes = kWarps * kStages * kStageWords * 4;
    static constexpr int kReduceStride = kColumns + 4;  // words; 2 * stride = 8 mod 32 banks
    // Few rows: every slice has its own buffer; many rows: slices take turns in one.
    static constexpr int kReduceBuffers = Rows <= 8 ? kSlices : 1;
    static constexpr int kReduceBytes = kReduceBuffers * kRows * kReduceStride * 4;

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

    // Starts the copies of the first stages; needs nothing but weights, so it may run before the
    // activations exist.
    __device__ __forceinline__ static void prefetch(Copier& copier, int stages) {
#pragma unroll
        for (int s = 0; s < kStages; ++s) {
            if (s < stages) copier.next(s);
            copy_async_commit();
        }
    }

    // Calls step(tiles of the warp's columns) for every k tile of the warp's stages, in order.
    template <typename Step>
    __device__ __forceinline__ static void for_each_step(const uint32_t* ring, Copier& copier, int stages,
                                                         Step step) {
        int slot = 0;
#pragma unroll 1
        for (int s = 0; s < stages; ++s) {
            copy_async_wait<kStages - 1>();
            __syncwarp();
            const uint32_t* tiles = ring + slot * kStageWords;
#pragma unroll
            for (int i = 0; i < kStepsPerStage; ++i) step(tiles + i * kStepWords);
            __syncwarp();
            if (s + kStages < stages) copier.next(slot);
            copy_async_commit();
            slot ^= 1;
        }
        copy_async_wait<0>();
    }

    // Calls put_slice(buffer, std::bool_constant<add>) so that `reduce` holds the sums of all warps; every thread of
    // the block calls it after its product.
    template <typename PutSlice>
    __device__ __forceinline__ static void put_slices(float* reduce, const Share& share, PutSlice put_slice) {
        __syncthreads();
        if constexpr (kReduceBuffers == kSlices) {
            put_slice(reduce + share.slice * kRows * kReduceStride, std::false_type());
            __syncthreads();
        } else {
#pragma unroll 1
            for (int s = 0; s < kSlices; ++s) {
                if (share.slice == s && s == 0) put_slice(reduce, std::false_type());
                if (share.slice == s && s > 0) put_slice(reduce, std::true_type());
                __syncthreads();
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

template <int K, Codebook C, int NT, int Matrices>
struct Stream : StreamShape<K, 8 * NT, Matrices> {
    using Shape = StreamShape<K, 8 * NT, Matrices>;
    using Shape::kReduceStride, Shape::kTileWords;
    using typename Shape::Copier, typename Shape::Share;
    using Rows = HalfRows;
    static constexpr bool kByteSum = C == Codebook::kMul1;

    float acc[kTilesPerWarp][NT][4];
    float ones[NT][4];

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
        Shape::for_each_step(ring, copier, stages, [&](const uint32_t* tiles) {
            uint2 b[NT];
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                b[n] = *b_lane[n];
                b_lane[n] += b_step;
            }
            step(tiles, map, b);
        });
    }

    // Leaves the sums of all warps in `reduce`; every thread of the block calls it after `run`.
    __device__ __forceinline__ void put(float* reduce, const Share& share, int lane) const {
        Shape::put_slices(reduce, share, [&](float* buffer, auto add) {
            put_slice<decltype(add)::value>(buffer, share, lane);
        });
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
};

}  // namespace exl3
