// Few tokens times 8-bit rows on the tensor cores of every architecture: a block owns 16 rows, its warps take
// turns over k. Codes become bf16 exactly; up to eight tokens their number changes nothing, so a token's bits do
// not depend on its neighbours.
#include "byte_rows.h"
#include "launch_decode.cuh"

namespace exl3 {
namespace {

constexpr int kByteRows = 16;
constexpr int kByteTile = 8;  // tokens of one product
static_assert(kThreads >= kByteRows * kByteRowsTokens && kByteRowsTokens == 2 * kByteTile);

// Two codes of `word`, bytes 2 High and 2 High + 1, as bf16.
template <bool Floats, bool High>
__device__ __forceinline__ uint32_t pair_of(uint32_t word) {
    if constexpr (Floats) {
        // Exponent and mantissa at those of bf16 are the value times 2^-120, subnormals included.
        const uint32_t codes = __byte_perm(word, 0u, High ? 0x3424 : 0x1404);
        const uint32_t small = (codes >> 4 & 0x07f007f0u) | (codes & 0x80008000u);
        return fma_bf16x2(small, 0x7b807b80u, 0x80008000u);
    } else {
        // 128 plus the low seven bits, less 128 or, with the sign bit, 256.
        const uint32_t codes = __byte_perm(word, 0x43434343u, High ? 0x5342 : 0x5140);
        return fma_bf16x2(codes & 0xff80ff80u, 0xbf80bf80u, codes & 0xff7fff7fu);
    }
}

__device__ __forceinline__ uint32_t word_of(const uint4& q, int i) {
    return i == 0 ? q.x : i == 1 ? q.y : i == 2 ? q.z : q.w;
}

// A lane holds 16 bytes of two rows in each unit of 64 columns; word j of both is the left operand of product j,
// whose right operand are the same four columns of one token. So columns are permuted alike on both sides.
template <bool Floats, int Tiles>
__global__ void __launch_bounds__(32 * kWarps, 2) byte_rows_kernel(const ByteRowsArguments a) {
    constexpr int kAhead = 4 / Tiles;  // units a warp has in flight
    constexpr int kOutputs = kByteRows * kByteTile * Tiles;
    __shared__ float parts[kWarps][kOutputs];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int group = lane >> 2, quarter = lane & 3;
    const int row0 = blockIdx.x * kByteRows, units = a.k / kByteRowsUnit;
    const unsigned char* rows[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = min(row0 + group + 8 * half, a.n - 1);
        rows[half] = static_cast<const unsigned char*>(a.codes) + static_cast<int64_t>(row) * a.k + 16 * quarter;
    }
    const char* x[Tiles];
#pragma unroll
    for (int tile = 0; tile < Tiles; ++tile) {
        const int64_t token = group + kByteTile * tile;
        x[tile] = static_cast<const char*>(a.x) + (token * a.k + 16 * quarter) * 2;
    }
    const uint4 zero = make_uint4(0, 0, 0, 0);
    float sums[kAhead][Tiles][4] = {};
    uint4 codes[kAhead][2];
    const auto load_codes = [&](int first) {
#pragma unroll
        for (int s = 0; s < kAhead; ++s) {
            const int unit = first + kWarps * s;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const unsigned char* from = rows[half] + unit * kByteRowsUnit;
                codes[s][half] = unit < units ? __ldg(reinterpret_cast<const uint4*>(from)) : zero;
            }
        }
    };
    load_codes(warp);
    allow_next_kernel();
    wait_for_previous_kernel();
    for (int first = warp; first < units; first += kWarps * kAhead) {
        if (first != warp) load_codes(first);
        uint4 inputs[kAhead][Tiles][2];
#pragma unroll
        for (int s = 0; s < kAhead; ++s) {
            const int unit = first + kWarps * s;
#pragma unroll
            for (int tile = 0; tile < Tiles; ++tile) {
                const bool there = unit < units && group + kByteTile * tile < a.tokens;
                const uint4* from = reinterpret_cast<const uint4*>(x[tile] + unit * kByteRowsUnit * 2);
                inputs[s][tile][0] = there ? from[0] : zero;
                inputs[s][tile][1] = there ? from[1] : zero;
            }
        }
#pragma unroll
        for (int s = 0; s < kAhead; ++s) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const uint32_t upper = word_of(codes[s][0], j), lower = word_of(codes[s][1], j);
                const uint32_t left[4] = {pair_of<Floats, false>(upper), pair_of<Floats, false>(lower),
                                          pair_of<Floats, true>(upper), pair_of<Floats, true>(lower)};
#pragma unroll
                for (int tile = 0; tile < Tiles; ++tile) {
                    const uint4& four = inputs[s][tile][j >> 1];
                    mma_bf16(sums[s][tile], left, word_of(four, 2 * j & 3), word_of(four, (2 * j & 3) + 1));
                }
            }
        }
    }
#pragma unroll
    for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float sum = 0.0f;
#pragma unroll
            for (int s = 0; s < kAhead; ++s) sum += sums[s][tile][i];
            const int row = group + 8 * (i >> 1), token = kByteTile * tile + 2 * quarter + (i & 1);
            parts[warp][token * kByteRows + row] = sum;
        }
    }
    __syncthreads();
    const int at = threadIdx.x, token = at / kByteRows, row = row0 + at % kByteRows;
    if (at >= kOutputs || token >= a.tokens || row >= a.n) return;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += parts[w][at];
    static_cast<__nv_bfloat16*>(a.out)[static_cast<int64_t>(token) * a.n + row] =
        __float2bfloat16_rn(sum * a.scale[row]);
}

}  // namespace

int byte_rows(const ByteRowsArguments& a, cudaStream_t stream) {
    if (a.tokens > kByteRowsTokens || a.k % kByteRowsUnit != 0) return kUnsupported;
    if (a.tokens == 0 || a.n == 0) return 0;
    const dim3 grid((a.n + kByteRows - 1) / kByteRows);
    const auto one = a.floats ? byte_rows_kernel<true, 1> : byte_rows_kernel<false, 1>;
    const auto two = a.floats ? byte_rows_kernel<true, 2> : byte_rows_kernel<false, 2>;
    return launch(a.tokens <= kByteTile ? one : two, grid, 0, stream, true, a);
}

}  // namespace exl3
