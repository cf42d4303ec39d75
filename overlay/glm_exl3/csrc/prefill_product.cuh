// The two product kernels of the prefill path and their launch, for one K and codebook.
#pragma once

#include <algorithm>

#include "prefill_wgmma.cuh"

namespace exl3 {

template <typename Product, int N, typename End>
__device__ __forceinline__ void prefill_item(unsigned char* shared, typename Product::Ring& ring,
                                             const PrefillSource& source,
                                             const MoeArguments& a, const PrefillScratch& s,
                                             const Tile& tile, int block, int64_t pairs) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    float acc[N / 2];
    Product::template multiply<N>(shared, ring, source, acc);
    float* lines = reinterpret_cast<float*>(shared);
#pragma unroll
    for (int part = 0; part < (N + 63) / 64; ++part) {
        Product::template spread<N>(lines, acc, part);
        __syncthreads();
        for (int row = warp; row < min(64, tile.rows - part * 64); row += kPrefillThreads / 32) {
            End::row(a, s, tile, block, part * 64 + row, pairs, lines + row * kEpilogueStride, lane);
        }
        fence_async_proxy();
        __syncthreads();
    }
}

template <int K, Codebook C, int Inputs, bool Narrow, typename End>
__global__ void __launch_bounds__(kPrefillThreads, 1)
prefill_kernel(const MoeArguments a, const PrefillScratch s) {
    using Product = PrefillProduct<K, C, Inputs, Narrow>;
    constexpr int kFirst = Narrow ? 16 : 64, kSecond = Narrow ? 32 : 96, kThird = Narrow ? 48 : 128;
    extern __shared__ __align__(1024) unsigned char prefill_shared[];
    __shared__ __align__(8) uint64_t barriers[2 * Product::kStages];
    const int blocks = End::blocks(a);
    const int items = uniform(*s.tile_count) * blocks;
    const int64_t pairs = static_cast<int64_t>(a.tokens) * a.top_k;
    typename Product::Ring ring = {shared_address(prefill_shared), shared_address(barriers),
                                   shared_address(barriers + Product::kStages), 0};
    if (threadIdx.x < 2 * Product::kStages) {
        barrier_init(ring.full + threadIdx.x * 8, threadIdx.x < Product::kStages ? 1 : Product::kFreeing);
    }
    fence_async_proxy();
    __syncthreads();
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        Tile tile = s.tiles[item / blocks];
        tile.rows = uniform(tile.rows);
        const int block = item % blocks;
        PrefillSource source;
        End::template sources<Product>(source, a, s, tile, block, pairs, Inputs);
        if (tile.rows <= kFirst) {
            prefill_item<Product, kFirst, End>(prefill_shared, ring, source, a, s, tile, block, pairs);
        } else if (tile.rows <= kSecond) {
            prefill_item<Product, kSecond, End>(prefill_shared, ring, source, a, s, tile, block, pairs);
        } else {
            prefill_item<Product, kThird, End>(prefill_shared, ring, source, a, s, tile, block, pairs);
        }
    }
}

template <int K, Codebook C, int Inputs, bool Narrow, typename End>
int launch_prefill(const MoeArguments& a, const PrefillScratch& s, cudaStream_t stream) {
    using Product = PrefillProduct<K, C, Inputs, Narrow>;
    const int bytes = std::max(Product::kStages * Product::kStageBytes, kEpilogueBytes);
    const auto kernel = prefill_kernel<K, C, Inputs, Narrow, End>;
    if (const cudaError_t error = cudaFuncSetAttribute(
            kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) {
        return error;
    }
    int device = 0, multiprocessors = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    kernel<<<multiprocessors, kPrefillThreads, bytes, stream>>>(a, s);
    return cudaGetLastError();
}

template <int K, Codebook C>
int prefill_gate_up_instance(const MoeArguments& a, const PrefillScratch& s, cudaStream_t stream) {
    if (s.tile_rows == kNarrowRows) {
        return a.same_suh ? launch_prefill<K, C, 1, true, GateUpEnd>(a, s, stream)
                          : launch_prefill<K, C, 2, true, GateUpEnd>(a, s, stream);
    }
    return a.same_suh ? launch_prefill<K, C, 1, false, GateUpEnd>(a, s, stream)
                      : launch_prefill<K, C, 2, false, GateUpEnd>(a, s, stream);
}

template <int K, Codebook C>
int prefill_down_instance(const MoeArguments& a, const PrefillScratch& s, cudaStream_t stream) {
    return s.tile_rows == kNarrowRows ? launch_prefill<K, C, 1, true, DownEnd>(a, s, stream)
                                      : launch_prefill<K, C, 1, false, DownEnd>(a, s, stream);
}

}  // namespace exl3
