// The prefill products without warpgroup instructions: 256 output columns (128 gate and 128 up, or two
// blocks of the down projection) times up to 64 sorted rows, for every architecture from 8.0.
//
// Each of eight warps owns two 16-column tiles and all rows, so a weight is decoded once per 64 rows
// and a row of activations is read by eight warps only. Two blocks share a multiprocessor: while one
// decodes, the other multiplies. Asynchronous copies fill a ring of stages in shared memory; rows
// arrive in the swizzled order that `store_swizzled` gave them.
#pragma once

#include <algorithm>

#include "prefill_ends.cuh"

namespace exl3 {

constexpr int kMmaThreads = 256;
constexpr int kMmaTiles = 2;  // 16-column tiles of a warp
constexpr int kMmaMostStages = 4;
constexpr int kMmaPart = 32;  // rows of sums in shared memory at a time
constexpr int kMmaPartBytes = kMmaPart * kEpilogueStride * 4;
constexpr int kMmaRows = 64;
constexpr int kMmaResident = 2;  // blocks on a multiprocessor

template <int K, Codebook C>
struct MmaProduct {
    static constexpr int kTileWords = 8 * K;
    static constexpr int kStepBytes = 8 * kTileWords * 4;  // one k tile of 128 columns
    static constexpr int kWidth = 1;  // halves per activation
    static constexpr int kRowBytes = kMmaRows * kStageK * 2;
    static constexpr int kSteps = kStageK / 16;
    static constexpr int kWeightBytes = 2 * kSteps * kStepBytes;

    __host__ __device__ static constexpr int stage_bytes(int inputs) {
        return inputs * kRowBytes + kWeightBytes;
    }

    struct Source : PrefillSource {
        int inputs;
    };

    // All threads copy 16 bytes at a time: the rows of each input, then four k tiles of each block.
    __device__ __forceinline__ static void copy_stage(uint32_t stage, const Source& source, int s) {
        for (int input = 0; input < source.inputs; ++input) {
            const unsigned char* rows =
                (input == 0 ? source.rows[0] : source.rows[1]) + s * source.row_block_bytes;
            const uint32_t target = stage + input * kRowBytes;
            for (int at = threadIdx.x * 16; at < source.row_count * kStageK * 2; at += kMmaThreads * 16) {
                copy_async_16(target + at, rows + at);
            }
        }
        const uint32_t target = stage + source.inputs * kRowBytes;
        for (int at = threadIdx.x * 16; at < kWeightBytes; at += kMmaThreads * 16) {
            const int line = at / kStepBytes, within = at - line * kStepBytes;
            const unsigned char* from = line < kSteps ? source.weights[0] : source.weights[1];
            from += (s * kSteps + line % kSteps) * source.weight_row_bytes + within;
            copy_async_16(target + at, from);
        }
    }

    __device__ __forceinline__ static void wait_for_stage(int count) {
        if (count == 2) copy_async_wait<0>();
        if (count == 3) copy_async_wait<1>();
        if (count == 4) copy_async_wait<2>();
    }

    template <int N>
    __device__ __forceinline__ static void multiply_stage(uint32_t rows,
                                                          const unsigned char* weights,
                                                          const LaneMap<K>& map,
                                                          float (&acc)[kMmaTiles][N / 8][4]) {
        const int lane = threadIdx.x & 31;
        const uint32_t line = rows + ((lane >> 4) * 8 + (lane & 7)) * (kStageK * 2);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            uint32_t a[kMmaTiles][4];
#pragma unroll
            for (int t = 0; t < kMmaTiles; ++t) {
                const uint32_t* tile = reinterpret_cast<const uint32_t*>(weights + step * kStepBytes);
                whole_weights<C, K>(load_window<K>(tile + t * kTileWords, map), a[t]);
            }
            const uint32_t chunk = ((step * 2 + ((lane >> 3) & 1)) ^ (lane & 7)) * 16;
#pragma unroll
            for (int n = 0; n < N / 16; ++n) {
                uint32_t b[4];
                load_matrices(b, line + n * 16 * (kStageK * 2) + chunk);
#pragma unroll
                for (int t = 0; t < kMmaTiles; ++t) {
                    mma_16x8x16(acc[t][2 * n], a[t][0], a[t][1], a[t][2], a[t][3], b[0], b[1]);
                    mma_16x8x16(acc[t][2 * n + 1], a[t][0], a[t][1], a[t][2], a[t][3], b[2], b[3]);
                }
            }
        }
    }

    template <int N>
    __device__ __forceinline__ static void multiply(unsigned char* shared, int count, const Source& source,
                                                    float (&acc)[kMmaTiles][N / 8][4]) {
        const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
        const LaneMap<K> map(lane);
        const int stages = source.k / kStageK, bytes = stage_bytes(source.inputs);
        const uint32_t base = shared_address(shared);
        const int block = warp >> 2, input = source.inputs == 2 ? block : 0;
        const int weight_offset = source.inputs * kRowBytes + block * kSteps * kStepBytes +
                                  (warp & 3) * kMmaTiles * kTileWords * 4;
#pragma unroll
        for (int t = 0; t < kMmaTiles; ++t)
#pragma unroll
            for (int n = 0; n < N / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) acc[t][n][i] = 0.0f;
        for (int s = 0; s < count - 1; ++s) {
            if (s < stages) copy_stage(base + s * bytes, source, s);
            copy_async_commit();
        }
        int slot = 0, free_slot = count - 1;
#pragma unroll 1
        for (int s = 0; s < stages; ++s) {
            wait_for_stage(count);
            // Behind the barrier stage s is complete for all and nobody reads stage s - 1 any more.
            __syncthreads();
            if (s + count - 1 < stages) copy_stage(base + free_slot * bytes, source, s + count - 1);
            copy_async_commit();
            multiply_stage<N>(base + slot * bytes + input * kRowBytes,
                              shared + slot * bytes + weight_offset, map, acc);
            slot = slot + 1 == count ? 0 : slot + 1;
            free_slot = free_slot + 1 == count ? 0 : free_slot + 1;
        }
        copy_async_wait<0>();
        __syncthreads();
    }

    // Columns of kMmaPart rows (part `part` of the tile) to shared memory as [row][256].
    template <int N>
    __device__ __forceinline__ static void spread(float* lines, const float (&acc)[kMmaTiles][N / 8][4],
                                                  int part) {
        const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
#pragma unroll
        for (int t = 0; t < kMmaTiles; ++t) {
            const int column = (warp * kMmaTiles + t) * 16 + (lane >> 2);
#pragma unroll
            for (int n = 0; n < N / 8; ++n) {
                if (n / (kMmaPart / 8) != part) continue;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int row = n % (kMmaPart / 8) * 8 + (lane & 3) * 2 + (i & 1);
                    lines[row * kEpilogueStride + column + (i >> 1) * 8] = acc[t][n][i];
                }
            }
        }
    }
};

template <typename Product, int N, typename End>
__device__ __forceinline__ void mma_item(unsigned char* shared, int count,
                                         const typename Product::Source& source, const MoeArguments& a,
                                         const PrefillScratch& s, const Tile& tile, int block,
                                         int64_t pairs) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    float acc[kMmaTiles][N / 8][4];
    Product::template multiply<N>(shared, count, source, acc);
    float* lines = reinterpret_cast<float*>(shared);
#pragma unroll
    for (int part = 0; part < N / kMmaPart; ++part) {
        Product::template spread<N>(lines, acc, part);
        __syncthreads();
        const int rows = min(kMmaPart, tile.rows - part * kMmaPart);
        for (int row = warp; row < rows; row += kMmaThreads / 32) {
            End::row(a, s, tile, block, part * kMmaPart + row, pairs, lines + row * kEpilogueStride, lane);
        }
        __syncthreads();
    }
}

template <int K, Codebook C, typename End>
__global__ void __launch_bounds__(kMmaThreads, kMmaResident)
prefill_mma_kernel(const MoeArguments a, const PrefillScratch s, int count) {
    using Product = MmaProduct<K, C>;
    extern __shared__ __align__(1024) unsigned char mma_shared[];
    const int blocks = End::blocks(a);
    constexpr int kPieces = kTileRows / kMmaRows;
    const int items = *s.tile_count * blocks * kPieces;
    const int64_t pairs = static_cast<int64_t>(a.tokens) * a.top_k;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        Tile tile = s.tiles[item / (blocks * kPieces)];
        const int first = item / blocks % kPieces * kMmaRows;
        if (first >= tile.rows) continue;
        tile.first_row += first;
        tile.rows = min(kMmaRows, tile.rows - first);
        const int block = item % blocks;
        typename Product::Source source;
        source.inputs = std::is_same_v<End, GateUpEnd> && !a.same_suh ? 2 : 1;
        End::template sources<Product>(source, a, s, tile, block, pairs, source.inputs);
        if (tile.rows <= 32) {
            mma_item<Product, 32, End>(mma_shared, count, source, a, s, tile, block, pairs);
        } else {
            mma_item<Product, kMmaRows, End>(mma_shared, count, source, a, s, tile, block, pairs);
        }
    }
}

template <int K, Codebook C, typename End>
int launch_mma(const MoeArguments& a, const PrefillScratch& s, int inputs, cudaStream_t stream) {
    using Product = MmaProduct<K, C>;
    int device = 0, multiprocessors = 0, block_most = 0, all = 0, reserved = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    cudaDeviceGetAttribute(&block_most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    cudaDeviceGetAttribute(&all, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
    cudaDeviceGetAttribute(&reserved, cudaDevAttrReservedSharedMemoryPerBlock, device);
    const int share = std::min(block_most, all / kMmaResident - reserved);
    const int stages = std::max(2, std::min(kMmaMostStages, share / Product::stage_bytes(inputs)));
    const int bytes = std::max(stages * Product::stage_bytes(inputs), kMmaPartBytes);
    if (bytes > block_most) return kUnsupported;
    const auto kernel = prefill_mma_kernel<K, C, End>;
    if (const cudaError_t error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) {
        return error;
    }
    kernel<<<multiprocessors * kMmaResident, kMmaThreads, bytes, stream>>>(a, s, stages);
    return cudaGetLastError();
}

template <int K, Codebook C>
int mma_gate_up_instance(const MoeArguments& a, const PrefillScratch& s, cudaStream_t stream) {
    return launch_mma<K, C, GateUpEnd>(a, s, a.same_suh ? 1 : 2, stream);
}

template <int K, Codebook C>
int mma_down_instance(const MoeArguments& a, const PrefillScratch& s, cudaStream_t stream) {
    return launch_mma<K, C, DownEnd>(a, s, 1, stream);
}

}  // namespace exl3
