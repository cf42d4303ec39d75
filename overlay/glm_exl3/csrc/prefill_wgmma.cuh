// The prefill products on Hopper: 256 output columns (128 gate and 128 up, or two blocks of the down
// projection) times up to 128 sorted rows, one block of four warpgroups at a time.
//
// Each warp decodes its own tile of every k step into the A registers of a warpgroup multiply whose
// B operand, the rotated activations, all warpgroups share in swizzled shared memory. While one step
// multiplies, the next is decoded; bulk copies run ahead.
#pragma once

#include "prefill.cuh"
#include "wgmma.cuh"

namespace exl3 {

constexpr int kPrefillThreads = 512;
constexpr int kStageK = 64;
constexpr int kMaxStages = 8;
constexpr int kEpilogueStride = 260;  // words; twice it is 8 mod 32 banks
constexpr int kEpilogueBytes = 64 * kEpilogueStride * 4;
constexpr int kInputBytes = kTileRows * kStageK * 2;

template <int K, Codebook C>
struct PrefillProduct {
    static constexpr int kTileWords = 8 * K;
    static constexpr int kStepBytes = 8 * kTileWords * 4;  // one k tile of 128 columns
    static constexpr int kWeightBytes = 2 * (kStageK / 16) * kStepBytes;

    __host__ __device__ static constexpr int stage_bytes(int inputs) {
        return (inputs * kInputBytes + kWeightBytes + 1023) / 1024 * 1024;
    }
    // A power of two that fits shared memory.
    __host__ __device__ static constexpr int stage_count(int inputs) {
        return stage_bytes(inputs) * 8 <= 224 * 1024 ? 8 : 4;
    }

    // Where one work item reads: two column blocks of weights, `row_count` rows of one or two inputs.
    struct Source {
        const unsigned char* weights[2];
        const unsigned char* rows[2];
        int64_t weight_row_bytes, row_block_bytes;
        int k, row_count, inputs;
    };

    // Ring of stages; `turn` counts the stages of all work items so far.
    struct Ring {
        uint32_t base, barriers;
        int bytes, count, turn;
    };

    // What one warp copies of every stage: warps 0-7 a line of weights each, warps 8 and 9 an input.
    struct Copy {
        const unsigned char* from;
        int64_t stride;
        int offset, bytes;

        __device__ __forceinline__ Copy(const Source& source, int warp) {
            if (warp < 8) {
                from = source.weights[warp >> 2] + (warp & 3) * source.weight_row_bytes;
                stride = 4 * source.weight_row_bytes;
                offset = source.inputs * kInputBytes + warp * kStepBytes;
                bytes = kStepBytes;
            } else {
                from = source.rows[warp & 1];
                stride = source.row_block_bytes;
                offset = (warp & 1) * kInputBytes;
                bytes = warp < 8 + source.inputs ? source.row_count * kStageK * 2 : 0;
            }
        }
    };

    // One lane of each copying warp; warp 8 also announces the bytes of all. The announcement is the
    // only arrival of the stage's barrier, so copies may finish before it.
    __device__ __forceinline__ static void copy_stage(const Ring& ring, const Source& source, Copy& copy,
                                                      int s, int warp) {
        const int slot = (ring.turn + s) & (ring.count - 1);
        const uint32_t stage = ring.base + slot * ring.bytes, barrier = ring.barriers + slot * 8;
        if (warp == 8) barrier_expect(barrier, source.inputs * copy.bytes + kWeightBytes);
        copy_bulk(stage + copy.offset, copy.from, copy.bytes, barrier);
        copy.from += copy.stride;
    }

    // The lane's eight weights of a tile as the A registers of m64k16.
    __device__ __forceinline__ static void decode(const uint32_t* tile, const LaneMap<K>& map,
                                                  uint32_t (&a)[4]) {
        uint32_t x[8], pair[4];
        lane_hashes<C, K>(load_window<K>(tile, map), x);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if constexpr (C == Codebook::kMul1) {
                const uint32_t sums =
                    multiply_add(byte_sum_half(x[2 * j + 1]), 0x10000u, byte_sum_half(x[2 * j]));
                const __half2 value = __hfma2(*reinterpret_cast<const __half2*>(&sums),
                                              __half2half2(__ushort_as_half(0x1eee)),
                                              __half2half2(__ushort_as_half(0xc931)));
                pair[j] = *reinterpret_cast<const uint32_t*>(&value);
            } else {
                const uint32_t even = pair_word(x[2 * j]), odd = pair_word(x[2 * j + 1]);
                const __half2 e = *reinterpret_cast<const __half2*>(&even);
                const __half2 o = *reinterpret_cast<const __half2*>(&odd);
                const __half2 first = __hadd2(__low2half2(e), __high2half2(e));
                const __half2 second = __hadd2(__low2half2(o), __high2half2(o));
                const __half2 value = __lows2half2(first, second);
                pair[j] = *reinterpret_cast<const uint32_t*>(&value);
            }
        }
        a[0] = pair[0];
        a[1] = pair[2];
        a[2] = pair[1];
        a[3] = pair[3];
    }

    template <int N>
    __device__ __forceinline__ static void multiply(unsigned char* shared, Ring& ring,
                                                    const Source& source, float (&acc)[N / 2]) {
        const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
        const LaneMap<K> map(lane);
        const int stages = source.k / kStageK;
        const int block = warp >> 3, input = source.inputs == 2 ? block : 0;
        const int pause = ring.count / 4;  // stages between barriers of the whole block
        const int weight_offset = source.inputs * kInputBytes + block * 4 * kStepBytes +
                                  (warp & 7) * kTileWords * 4;
#pragma unroll
        for (int i = 0; i < N / 2; ++i) acc[i] = 0.0f;
        int issued = 0;
        Copy copy(source, warp);
        uint32_t a[2][4];
#pragma unroll 1
        for (int s = 0; s < stages; ++s) {
            if ((s & (pause - 1)) == 0) {
                // Behind the barrier all warps have finished reading the stages before s - 1.
                __syncthreads();
                if (lane == 0 && copy.bytes > 0) {
                    const int limit = min(stages, s - 1 + ring.count);
#pragma unroll 1
                    for (; issued < limit; ++issued) copy_stage(ring, source, copy, issued, warp);
                }
                __syncwarp();
            }
            const int slot = (ring.turn + s) & (ring.count - 1);
            barrier_wait(ring.barriers + slot * 8, ((ring.turn + s) >> (ring.count == 8 ? 3 : 2)) & 1);
            const int offset = slot * ring.bytes;
            const uint32_t* weights =
                reinterpret_cast<const uint32_t*>(shared + offset + weight_offset);
            const uint64_t operand = swizzled_operand(ring.base + offset + input * kInputBytes);
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                decode(weights + step * (kStepBytes / 4), map, a[step & 1]);
                wgmma_fence();
                Wgmma<N>::run(acc, a[step & 1], operand + step * 2);
                wgmma_commit();
                wgmma_wait<1>();
            }
        }
        wgmma_wait<0>();
        ring.turn += stages;
        __syncthreads();
    }

    // Columns of 64 rows (half `part` of the tile) to shared memory as [row][256].
    template <int N>
    __device__ __forceinline__ static void spread(float* lines, const float (&acc)[N / 2], int part) {
        const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
        const int column = warp * 16 + (lane >> 2);
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
            if (j / 8 != part) continue;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = (j % 8) * 8 + (lane & 3) * 2 + (i & 1);
                lines[row * kEpilogueStride + column + (i >> 1) * 8] = acc[j * 4 + i];
            }
        }
    }
};

}  // namespace exl3
