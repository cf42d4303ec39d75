// The two product kernels of the prefill path and their launch, for one K and codebook.
#pragma once

#include <algorithm>

#include "prefill_wgmma.cuh"

namespace exl3 {

// Gate and up: had128, svh, clamped SwiGLU, the down projection's suh and had128, stored as half.
struct GateUpEnd {
    __device__ __forceinline__ static void row(const MoeArguments& a, const PrefillScratch& s,
                                               const Tile& tile, int block, int row, int64_t pairs,
                                               const float* line, int lane) {
        const int64_t at = tile.first_row + row;
        const int column = block * 128 + lane * 4;
        const __half* svh = static_cast<const __half*>(a.w13.svh) +
                            static_cast<int64_t>(tile.expert) * 2 * a.w13.n + column;
        const __half* suh = static_cast<const __half*>(a.w2.suh) +
                            static_cast<int64_t>(tile.expert) * a.w2.k + column;
        const float gate_scale = s.row_scale[at];
        const float up_scale = a.same_suh ? gate_scale : s.row_scale[pairs + at];
        Quad gate = load_quad(line, Type::kFloat, lane * 4) * gate_scale;
        Quad up = load_quad(line, Type::kFloat, 128 + lane * 4) * up_scale;
        gate = hadamard128(gate, lane) * load_quad(svh);
        up = hadamard128(up, lane) * load_quad(svh + a.w13.n);
        Quad h;
#pragma unroll
        for (int i = 0; i < 4; ++i) h.v[i] = clamped_swiglu(gate.v[i], up.v[i], a.limit);
        h = hadamard128(h * load_quad(suh) * s.down_scale[tile.expert], lane);
        store_swizzled(s.intermediate, pairs, at, row, column, h);
    }
};

// Down: had128, svh, routing weight, stored by pair for the combination.
struct DownEnd {
    __device__ __forceinline__ static void row(const MoeArguments& a, const PrefillScratch& s,
                                               const Tile& tile, int block, int row, int64_t,
                                               const float* line, int lane) {
        const int pair = s.row_pair[tile.first_row + row];
        const float scale = a.topk_weights[pair] / s.down_scale[tile.expert];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int column = (block * 2 + half) * 128 + lane * 4;
            if (column >= a.w2.n) return;
            const __half* svh = static_cast<const __half*>(a.w2.svh) +
                                static_cast<int64_t>(tile.expert) * a.w2.n + column;
            const Quad q = hadamard128(load_quad(line, Type::kFloat, half * 128 + lane * 4), lane);
            store_quad(s.routed, Type::kBFloat16, static_cast<int64_t>(pair) * a.w2.n + column,
                       q * load_quad(svh) * scale);
        }
    }
};

template <int K, Codebook C, int N, typename End>
__device__ __forceinline__ void prefill_item(unsigned char* shared,
                                             typename PrefillProduct<K, C>::Ring& ring,
                                             const typename PrefillProduct<K, C>::Source& source,
                                             const MoeArguments& a, const PrefillScratch& s,
                                             const Tile& tile, int block, int64_t pairs) {
    using Product = PrefillProduct<K, C>;
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

template <int K, Codebook C, typename End>
__global__ void __launch_bounds__(kPrefillThreads, 1)
prefill_kernel(const MoeArguments a, const PrefillScratch s) {
    using Product = PrefillProduct<K, C>;
    constexpr bool kGateUp = std::is_same_v<End, GateUpEnd>;
    extern __shared__ __align__(1024) unsigned char prefill_shared[];
    __shared__ __align__(8) uint64_t barriers[kMaxStages];
    const Packed& w = kGateUp ? a.w13 : a.w2;
    const int blocks = kGateUp ? w.n / 128 : (w.n + 255) / 256;
    const int items = *s.tile_count * blocks;
    const int64_t pairs = static_cast<int64_t>(a.tokens) * a.top_k;
    const int64_t matrix_bytes = static_cast<int64_t>(w.k / 16) * (w.n / 16) * Product::kTileWords * 4;
    const int inputs = kGateUp && !a.same_suh ? 2 : 1;
    typename Product::Ring ring = {shared_address(prefill_shared), shared_address(barriers),
                                   Product::stage_bytes(inputs), Product::stage_count(inputs), 0};
    if (threadIdx.x < ring.count) barrier_init(ring.barriers + threadIdx.x * 8, 1);
    fence_async_proxy();
    __syncthreads();
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const Tile tile = s.tiles[item / blocks];
        const int block = item % blocks;
        typename Product::Source source;
        source.k = w.k;
        source.row_count = tile.rows;
        source.inputs = inputs;
        source.row_block_bytes = pairs * kStageK * 2;
        source.weight_row_bytes = static_cast<int64_t>(w.n / 16) * Product::kTileWords * 4;
        const unsigned char* trellis = reinterpret_cast<const unsigned char*>(w.trellis) +
                                       tile.expert * (kGateUp ? 2 : 1) * matrix_bytes;
        if constexpr (kGateUp) {
            source.weights[0] = trellis + block * Product::kStepBytes;
            source.weights[1] = source.weights[0] + matrix_bytes;
            source.rows[0] = reinterpret_cast<const unsigned char*>(s.rotated) +
                             static_cast<int64_t>(tile.first_row) * kStageK * 2;
            source.rows[1] = source.rows[0] + (inputs - 1) * pairs * w.k * 2;
        } else {
            source.weights[0] = trellis + 2 * block * Product::kStepBytes;
            const bool odd = 2 * block + 1 == w.n / 128;  // a last lone block is read twice
            source.weights[1] = source.weights[0] + (odd ? 0 : Product::kStepBytes);
            source.rows[0] = source.rows[1] = reinterpret_cast<const unsigned char*>(s.intermediate) +
                                              static_cast<int64_t>(tile.first_row) * kStageK * 2;
        }
        if (tile.rows <= 32) {
            prefill_item<K, C, 32, End>(prefill_shared, ring, source, a, s, tile, block, pairs);
        } else if (tile.rows <= 64) {
            prefill_item<K, C, 64, End>(prefill_shared, ring, source, a, s, tile, block, pairs);
        } else {
            prefill_item<K, C, 128, End>(prefill_shared, ring, source, a, s, tile, block, pairs);
        }
    }
}

template <int K, Codebook C, typename End>
int launch_prefill(const MoeArguments& a, const PrefillScratch& s, int inputs, cudaStream_t stream) {
    using Product = PrefillProduct<K, C>;
    const int bytes = std::max(Product::stage_count(inputs) * Product::stage_bytes(inputs), kEpilogueBytes);
    const auto kernel = prefill_kernel<K, C, End>;
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
    return launch_prefill<K, C, GateUpEnd>(a, s, a.same_suh ? 1 : 2, stream);
}

template <int K, Codebook C>
int prefill_down_instance(const MoeArguments& a, const PrefillScratch& s, cudaStream_t stream) {
    return launch_prefill<K, C, DownEnd>(a, s, 1, stream);
}

}  // namespace exl3
