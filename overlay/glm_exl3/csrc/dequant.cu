// Packed weights to a dense matrix: every K from 1 to 8, the half rates and all codebooks.
//
// A block of threads owns 128 x 128 weights, the smallest region both Hadamard transforms stay in:
// decode to shared memory, transform along k, transform along n, scale, store.
#include "api.h"
#include "codec.cuh"
#include "dequant_fast.cuh"
#include "hadamard.cuh"

namespace exl3 {
namespace {

constexpr int kDequantThreads = 256;
constexpr int kDequantStride = 129;  // words; odd, so that columns avoid conflicts
constexpr int kDequantBytes = 128 * kDequantStride * 4;

// State of ring element `element` of a tile of `words` 32-bit words.
__device__ __forceinline__ uint32_t ring_state(const uint32_t* tile, int words, int bits2,
                                               int element) {
    const int end = ((element + 1) * bits2) >> 1;
    const int last = (end - 1) >> 5;
    const uint32_t low = __ldg(tile + last);
    const uint32_t high = __ldg(tile + (last == 0 ? words - 1 : last - 1));
    return __funnelshift_r(low, high, static_cast<uint32_t>(-end) & 31u) & 0xffffu;
}

// One weight of a tile to its place in the block.
__device__ __forceinline__ void place(float* block, int k_tile, int n_tile, int lane, int j,
                                      __half weight) {
    const int row = k_tile * 16 + 2 * (lane & 3) + (j & 1) + 8 * ((j >> 1) & 1);
    const int column = n_tile * 16 + (lane >> 2) + 8 * (j >> 2);
    block[row * kDequantStride + column] = __half2float(weight);
}

// All tiles of one k tile, decoded from registers; K in the range of the fast decoder.
template <Codebook C, int K>
__device__ __forceinline__ void decode_row(float* block, const uint32_t* tiles, int k_tile, int lane) {
    const LaneMap<K> map(lane);
    Window windows[8];
#pragma unroll
    for (int tile = 0; tile < 8; ++tile) windows[tile] = load_window<K>(tiles + tile * 8 * K, map);
#pragma unroll
    for (int tile = 0; tile < 8; ++tile) {
        uint32_t x[8];
        lane_hashes<C, K>(windows[tile], x);
#pragma unroll
        for (int j = 0; j < 8; ++j) place(block, k_tile, tile, lane, j, hashed_weight<C>(x[j]));
    }
}

// K = 0: any rate, element by element.
template <Codebook C, int K>
__global__ void __launch_bounds__(kDequantThreads, 3)
dequant_kernel(const DequantArguments a) {
    extern __shared__ float block[];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int k0 = blockIdx.y * 128, n0 = blockIdx.x * 128;
    const int words = 4 * a.bits2, n_tiles = a.n / 16;

    const uint32_t* corner =
        a.trellis + (static_cast<int64_t>(k0 / 16) * n_tiles + n0 / 16) * words;
    if constexpr (K > 0) {
        decode_row<C, K>(block, corner + static_cast<int64_t>(warp) * n_tiles * words, warp, lane);
    } else {
        for (int tile = warp; tile < 64; tile += kDequantThreads / 32) {
            const int k_tile = tile >> 3, n_tile = tile & 7;
            const uint32_t* ring = corner + (static_cast<int64_t>(k_tile) * n_tiles + n_tile) * words;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const uint32_t state = ring_state(ring, words, a.bits2, lane * 8 + j);
                place(block, k_tile, n_tile, lane, j, decode_state<C>(state));
            }
        }
    }
    __syncthreads();
    if (!a.rotated) {
#pragma unroll 4
        for (int column = warp; column < 128; column += kDequantThreads / 32) {
            Quad q;
#pragma unroll
            for (int i = 0; i < 4; ++i) q.v[i] = block[(i * 32 + lane) * kDequantStride + column];
            q = hadamard128(q, lane);
#pragma unroll
            for (int i = 0; i < 4; ++i) block[(i * 32 + lane) * kDequantStride + column] = q.v[i];
        }
        __syncthreads();
    }
#pragma unroll 4
    for (int row = warp; row < 128; row += kDequantThreads / 32) {
        Quad q;
#pragma unroll
        for (int i = 0; i < 4; ++i) q.v[i] = block[row * kDequantStride + lane * 4 + i];
        if (!a.rotated) {
            const float scale = __half2float(static_cast<const __half*>(a.suh)[k0 + row]);
            const __half* svh = static_cast<const __half*>(a.svh) + n0 + lane * 4;
            q = hadamard128(q, lane) * load_quad(svh) * scale;
        }
        store_quad(a.out, static_cast<Type>(a.out_type),
                   static_cast<int64_t>(k0 + row) * a.n + n0 + lane * 4, q);
    }
}

template <Codebook C, int K>
int launch_dequant(const DequantArguments& a, cudaStream_t stream) {
    if (const cudaError_t error = cudaFuncSetAttribute(
            dequant_kernel<C, K>, cudaFuncAttributeMaxDynamicSharedMemorySize, kDequantBytes)) {
        return error;
    }
    dequant_kernel<C, K><<<dim3(a.n / 128, a.k / 128), kDequantThreads, kDequantBytes, stream>>>(a);
    return cudaGetLastError();
}

// Rotated weights keep the format's own rounding, so only whole matrices take the fast way.
template <Codebook C, int K>
int launch_fast_dequant(const DequantArguments& a, cudaStream_t stream) {
    if (a.rotated) return launch_dequant<C, K>(a, stream);
    const auto kernel = static_cast<Type>(a.out_type) == Type::kFloat ? fast_dequant_kernel<C, K, true>
                                                                      : fast_dequant_kernel<C, K, false>;
    if (const cudaError_t error = cudaFuncSetAttribute(
            kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kFastDequantBytes)) {
        return error;
    }
    kernel<<<dim3(a.n / 128, a.k / 128), kFastDequantThreads, kFastDequantBytes, stream>>>(a);
    return cudaGetLastError();
}

template <Codebook C>
int launch_rate(const DequantArguments& a, cudaStream_t stream) {
    switch (a.bits2) {
        case 4: return launch_fast_dequant<C, 2>(a, stream);
        case 6: return launch_fast_dequant<C, 3>(a, stream);
        case 8: return launch_fast_dequant<C, 4>(a, stream);
        case 10: return launch_fast_dequant<C, 5>(a, stream);
        case 12: return launch_fast_dequant<C, 6>(a, stream);
        default: return launch_dequant<C, 0>(a, stream);
    }
}

}  // namespace

int dequant(const DequantArguments& a, cudaStream_t stream) {
    if (a.k % 128 != 0 || a.n % 128 != 0 || a.bits2 < 2 || a.bits2 > 16) return kUnsupported;
    switch (static_cast<Codebook>(a.codebook)) {
        case Codebook::kInst3: return launch_rate<Codebook::kInst3>(a, stream);
        case Codebook::kMcg: return launch_rate<Codebook::kMcg>(a, stream);
        case Codebook::kMul1: return launch_rate<Codebook::kMul1>(a, stream);
    }
    return kUnsupported;
}

}  // namespace exl3
