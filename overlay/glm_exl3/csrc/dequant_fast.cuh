// Packed weights to a dense matrix at two to six bits, both Hadamard transforms partly on the matrix unit.
//
// A block owns 128 x 128 weights, a warp one row of eight tiles. A tile in ring order is a B operand: a
// product with H16 transforms its sixteen rows, whose result is the A operand of a second one that
// transforms its columns. Eight tiles of a warp are columns apart (additions in registers); one exchange
// through shared memory, same lane, other tile, gives every warp eight tiles that are rows apart.
#pragma once

#include "api.h"
#include "codec.cuh"
#include "hadamard.cuh"
#include "ptx.cuh"

namespace exl3 {

constexpr int kFastDequantThreads = 256;
constexpr int kFastDequantBytes = 128 * 128 * 4;

// Two entries of H16 as halves: (-1)^popcount(row & column) for `column` and `column` + 1.
__device__ __forceinline__ uint32_t hadamard16_pair(int row, int column) {
    const uint32_t first = __popc(row & column) & 1, second = __popc(row & (column + 1)) & 1;
    return 0x3c003c00u | first << 15 | second << 31;
}

// The lane's eight weights as two B operands (columns 0-7 and 8-15 of a tile).
template <Codebook C, int K>
__device__ __forceinline__ void weight_operands(const Window& window, uint32_t (&pair)[4]) {
    uint32_t x[8];
    lane_hashes<C, K>(window, x);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const __half2 value = __halves2half2(hashed_weight<C>(x[2 * j]), hashed_weight<C>(x[2 * j + 1]));
        pair[j] = *reinterpret_cast<const uint32_t*>(&value);
    }
}

// Butterflies over the first index.
__device__ __forceinline__ void hadamard8(float (&v)[8][8]) {
#pragma unroll
    for (int step = 1; step < 8; step *= 2) {
#pragma unroll
        for (int t = 0; t < 8; ++t) {
            if (t & step) continue;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float a = v[t][i], b = v[t + step][i];
                v[t][i] = a + b;
                v[t + step][i] = a - b;
            }
        }
    }
}

// H16 * tile * H16 without the factor 1/16. Lane (g, c) gets rows g (first four) and g + 8, columns 4c..4c+3.
// `Exact` feeds the second product with the rest of the rounding to half precision too.
template <bool Exact>
__device__ __forceinline__ void transform_tile(const uint32_t (&pair)[4], const uint32_t (&left)[4],
                                               const uint32_t (&right)[4], float (&v)[8]) {
    float rows[2][4] = {}, sums[2][4] = {};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        mma_16x8x16(rows[h], left[0], left[1], left[2], left[3], pair[2 * h], pair[2 * h + 1]);
    }
#pragma unroll
    for (int pass = 0; pass < (Exact ? 2 : 1); ++pass) {
        uint32_t a[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float* from = rows[j >> 1] + (j & 1) * 2;
            const __half2 value = __floats2half2_rn(from[0], from[1]);
            a[j] = *reinterpret_cast<const uint32_t*>(&value);
            if (Exact) {
                from[0] -= __low2float(value);
                from[1] -= __high2float(value);
            }
        }
#pragma unroll
        for (int q = 0; q < 2; ++q) mma_16x8x16(sums[q], a[0], a[1], a[2], a[3], right[2 * q], right[2 * q + 1]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = sums[(i >> 1) & 1][(i >> 2) * 2 + (i & 1)];
}

template <Codebook C, int K, bool Exact>
__global__ void __launch_bounds__(kFastDequantThreads, 2) fast_dequant_kernel(const DequantArguments a) {
    extern __shared__ __align__(16) float4 exchange[];  // [k tile][n tile][row half][lane]
    __shared__ float row_scales[128];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
    const int k0 = blockIdx.y * 128, n0 = blockIdx.x * 128, n_tiles = a.n / 16;
    const uint32_t* tiles =
        a.trellis + (static_cast<int64_t>(k0 / 16 + warp) * n_tiles + n0 / 16) * (8 * K);
    const LaneMap<K> map(lane);
    Window windows[8];
#pragma unroll
    for (int t = 0; t < 8; ++t) windows[t] = load_window<K>(tiles + t * 8 * K, map);
    if (threadIdx.x < 128) {
        row_scales[threadIdx.x] = __half2float(static_cast<const __half*>(a.suh)[k0 + threadIdx.x]) / 128.0f;
    }
    const uint32_t left[4] = {hadamard16_pair(g, 2 * c), hadamard16_pair(g + 8, 2 * c),
                              hadamard16_pair(g, 2 * c + 8), hadamard16_pair(g + 8, 2 * c + 8)};
    uint32_t right[4];  // output column g of half q is column 4 * (g / 2) + 2q + g % 2
#pragma unroll
    for (int q = 0; q < 2; ++q) {
        const int column = 4 * (g >> 1) + 2 * q + (g & 1);
        right[2 * q] = hadamard16_pair(column, 2 * c);
        right[2 * q + 1] = hadamard16_pair(column, 2 * c + 8);
    }
    float v[8][8];
#pragma unroll
    for (int t = 0; t < 8; ++t) {
        uint32_t pair[4];
        weight_operands<C, K>(windows[t], pair);
        transform_tile<Exact>(pair, left, right, v[t]);
    }
    hadamard8(v);
#pragma unroll
    for (int t = 0; t < 8; ++t) {
        float4* to = exchange + (warp * 8 + t) * 64 + lane;
        to[0] = make_float4(v[t][0], v[t][1], v[t][2], v[t][3]);
        to[32] = make_float4(v[t][4], v[t][5], v[t][6], v[t][7]);
    }
    __syncthreads();
#pragma unroll
    for (int t = 0; t < 8; ++t) {
        const float4* from = exchange + (t * 8 + warp) * 64 + lane;
        const float4 low = from[0], high = from[32];
        v[t][0] = low.x, v[t][1] = low.y, v[t][2] = low.z, v[t][3] = low.w;
        v[t][4] = high.x, v[t][5] = high.y, v[t][6] = high.z, v[t][7] = high.w;
    }
    hadamard8(v);
    const int column = n0 + warp * 16 + c * 4;
    const Quad svh = load_quad(static_cast<const __half*>(a.svh) + column);
    const Type type = static_cast<Type>(a.out_type);
#pragma unroll
    for (int t = 0; t < 8; ++t) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = t * 16 + r * 8 + g;
            const Quad q = {{v[t][4 * r], v[t][4 * r + 1], v[t][4 * r + 2], v[t][4 * r + 3]}};
            store_quad(a.out, type, static_cast<int64_t>(k0 + row) * a.n + column, q * svh * row_scales[row]);
        }
    }
}

}  // namespace exl3
