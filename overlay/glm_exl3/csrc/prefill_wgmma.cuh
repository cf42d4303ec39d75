// The prefill products on Hopper: 256 output columns (128 gate and 128 up, or two blocks of the down
// projection) times up to 128 sorted rows, one block of four warpgroups at a time.
//
// Each warp decodes its own tile of every k step into the A registers of a warpgroup multiply whose
// B operand, the rotated activations, all warpgroups share in swizzled shared memory. While one step
// multiplies, the next is decoded; copies run two stages ahead.
#pragma once

#include "prefill.cuh"
#include "wgmma.cuh"

namespace exl3 {

constexpr int kPrefillThreads = 512;
constexpr int kPrefillStages = 4;
constexpr int kStageK = 64;
constexpr int kEpilogueStride = 260;  // words; twice it is 8 mod 32 banks
constexpr int kEpilogueBytes = 64 * kEpilogueStride * 4;
constexpr int kInputBytes = kTileRows * kStageK * 2;

template <int K, Codebook C>
struct PrefillProduct {
    static constexpr int kTileWords = 8 * K;
    static constexpr int kStepBytes = 8 * kTileWords * 4;          // one k tile of 128 columns
    static constexpr int kWeightBytes = 2 * (kStageK / 16) * kStepBytes;

    __host__ __device__ static constexpr int stage_bytes(int inputs) {
        return (inputs * kInputBytes + kWeightBytes + 1023) / 1024 * 1024;
    }

    // Where one work item reads: two column blocks of weights, `rows` rows of one or two inputs.
    struct Source {
        const unsigned char* weights[2];
        const __half* rows[2];
        int64_t weight_row_bytes;
        int k, row_count, inputs;
    };

    template <int N>
    __device__ __forceinline__ static void copy_stage(uint32_t stage, const Source& source, int s) {
        for (int input = 0; input < source.inputs; ++input) {
#pragma unroll
            for (int i = 0; i < (N * 8 + kPrefillThreads - 1) / kPrefillThreads; ++i) {
                const int at = i * kPrefillThreads + threadIdx.x, row = at >> 3, chunk = at & 7;
                if (N * 8 % kPrefillThreads != 0 && row >= N) break;
                const __half* from = source.rows[input] +
                                     static_cast<int64_t>(min(row, source.row_count - 1)) * source.k +
                                     s * kStageK + chunk * 8;
                copy_async_16(stage + input * kInputBytes + row * 128 + ((chunk ^ (row & 7)) * 16), from);
            }
        }
        const uint32_t weights = stage + source.inputs * kInputBytes;
        constexpr int kRowChunks = kStepBytes / 16;
#pragma unroll
        for (int i = 0; i < (kWeightBytes / 16 + kPrefillThreads - 1) / kPrefillThreads; ++i) {
            const int at = i * kPrefillThreads + threadIdx.x;
            if (kWeightBytes / 16 % kPrefillThreads != 0 && at >= kWeightBytes / 16) break;
            const int line = at / kRowChunks, chunk = at - line * kRowChunks;
            const int block = line >> 2, step = line & 3;
            const unsigned char* from = source.weights[block] +
                                        (s * 4 + step) * source.weight_row_bytes + chunk * 16;
            copy_async_16(weights + at * 16, from);
        }
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
    __device__ __forceinline__ static void multiply(unsigned char* shared, const Source& source,
                                                    float (&acc)[N / 2]) {
        const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
        const LaneMap<K> map(lane);
        const int stages = source.k / kStageK;
        const int bytes = stage_bytes(source.inputs);
        const uint32_t base = shared_address(shared);
        const int block = warp >> 3;
        const int input = source.inputs == 2 ? block : 0;
#pragma unroll
        for (int i = 0; i < N / 2; ++i) acc[i] = 0.0f;
#pragma unroll
        for (int s = 0; s < kPrefillStages - 2; ++s) {
            if (s < stages) copy_stage<N>(base + s * bytes, source, s);
            copy_async_commit();
        }
        uint32_t a[2][4];
#pragma unroll 1
        for (int s = 0; s < stages; ++s) {
            copy_async_wait<kPrefillStages - 3>();
            fence_async_proxy();
            __syncthreads();
            const int ahead = s + kPrefillStages - 2;
            if (ahead < stages) {
                copy_stage<N>(base + (ahead % kPrefillStages) * bytes, source, ahead);
            }
            copy_async_commit();
            const int offset = (s % kPrefillStages) * bytes;
            const uint32_t* weights = reinterpret_cast<const uint32_t*>(
                shared + offset + source.inputs * kInputBytes + block * 4 * kStepBytes) +
                (warp & 7) * kTileWords;
            const uint64_t operand = swizzled_operand(base + offset + input * kInputBytes);
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
        copy_async_wait<0>();
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
