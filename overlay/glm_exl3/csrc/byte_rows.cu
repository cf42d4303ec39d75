// Few tokens times rows of 8-bit codes or bf16 on the tensor cores of every architecture: a warp owns 8 or 16 rows
// and takes turns over k with the others of its block that share them. Codes become bf16 exactly. Shapes alone decide
// how rows and k are shared and up to eight tokens (bf16: sixteen) the order of a token's sums does not depend on
// their number, so a token's bits do not depend on its neighbours.
#include "byte_rows.h"
#include "launch_decode.cuh"

namespace exl3 {
namespace {

constexpr int kTile = 8;  // tokens of one product
constexpr int kFewRows = 1056, kFewUnits = 8;
static_assert(kRowsTokens == 2 * kTile);

__device__ __forceinline__ uint32_t word_of(const uint4& q, int i) {
    return i == 0 ? q.x : i == 1 ? q.y : i == 2 ? q.z : q.w;
}

// Columns 2 i and 2 i + 1 of the 16 bytes of a row in `q`, as bf16.
template <RowKind Kind>
__device__ __forceinline__ uint32_t pair_of(const uint4& q, int i) {
    if constexpr (Kind == RowKind::kBf16) {
        return word_of(q, i);
    } else if constexpr (Kind == RowKind::kE4m3) {
        // Exponent and mantissa at those of bf16 are the value times 2^-120, subnormals included.
        const uint32_t codes = __byte_perm(word_of(q, i >> 1), 0u, i & 1 ? 0x3424 : 0x1404);
        const uint32_t small = (codes >> 4 & 0x07f007f0u) | (codes & 0x80008000u);
        return fma_bf16x2(small, 0x7b807b80u, 0x80008000u);
    } else {
        // 128 plus the low seven bits, less 128 or, with the sign bit, 256.
        const uint32_t codes = __byte_perm(word_of(q, i >> 1), 0x43434343u, i & 1 ? 0x5342 : 0x5140);
        return fma_bf16x2(codes & 0xff80ff80u, 0xbf80bf80u, codes & 0xff7fff7fu);
    }
}

// A lane holds 16 bytes of one or two rows (`Halves`) in each unit; four columns of them are the left operand of a
// product, whose right operand are the same four columns of one token. So columns are permuted alike on both sides.
// `Sharers` warps share k, each has `Ahead` units in flight and sums them in `Chains`.
template <RowKind Kind, int Tiles, int Halves, int Sharers, int Ahead, int Chains>
__device__ __forceinline__ void rows_product(const RowsArguments& a) {
    constexpr int kProducts = Kind == RowKind::kBf16 ? 2 : 4;  // of a unit
    constexpr int kInputs = kProducts / 2;                     // 16-byte words of one token in a unit
    constexpr int kRows = 8 * Halves, kGroups = kWarps / Sharers, kOutputs = kRows * kTile * Tiles;
    static_assert(Ahead % Chains == 0);  // which chain takes a unit does not depend on Ahead
    __shared__ float parts[kWarps][kOutputs];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int eighth = lane >> 2, quarter = lane & 3, sharer = warp % Sharers;
    const int row0 = (blockIdx.x * kGroups + warp / Sharers) * kRows;
    const int64_t row_bytes = static_cast<int64_t>(a.k) * 2 / kInputs;
    const int units = static_cast<int>(row_bytes / kRowsUnitBytes);
    const unsigned char* rows[Halves];
#pragma unroll
    for (int half = 0; half < Halves; ++half) {
        const int row = min(row0 + eighth + 8 * half, a.n - 1);
        rows[half] = static_cast<const unsigned char*>(a.rows) + row * row_bytes + 16 * quarter;
    }
    const char* x[Tiles];
#pragma unroll
    for (int tile = 0; tile < Tiles; ++tile) {
        const int64_t token = eighth + kTile * tile;
        x[tile] = static_cast<const char*>(a.x) + token * a.x_stride * 2 + 16 * kInputs * quarter;
    }
    const uint4 zero = make_uint4(0, 0, 0, 0);
    float sums[Chains][Tiles][4] = {};
    uint4 held[Ahead][Halves];
    const auto load_rows = [&](int first) {
#pragma unroll
        for (int s = 0; s < Ahead; ++s) {
            const int unit = first + Sharers * s;
#pragma unroll
            for (int half = 0; half < Halves; ++half) {
                const unsigned char* from = rows[half] + unit * kRowsUnitBytes;
                held[s][half] = unit < units ? load_once_16(from) : zero;
            }
        }
    };
    load_rows(sharer);
    allow_next_kernel();
    wait_for_previous_kernel();
    for (int first = sharer; first < units; first += Sharers * Ahead) {
        if (first != sharer) load_rows(first);
        uint4 inputs[Ahead][Tiles][kInputs];
#pragma unroll
        for (int s = 0; s < Ahead; ++s) {
            const int unit = first + Sharers * s;
#pragma unroll
            for (int tile = 0; tile < Tiles; ++tile) {
                const bool there = unit < units && eighth + kTile * tile < a.tokens;
                const uint4* from = reinterpret_cast<const uint4*>(x[tile] + unit * kRowsUnitBytes * kInputs);
#pragma unroll
                for (int i = 0; i < kInputs; ++i) inputs[s][tile][i] = there ? from[i] : zero;
            }
        }
#pragma unroll
        for (int s = 0; s < Ahead; ++s) {
#pragma unroll
            for (int j = 0; j < kProducts; ++j) {
                uint32_t left[4] = {};
#pragma unroll
                for (int half = 0; half < Halves; ++half) {
                    left[half] = pair_of<Kind>(held[s][half], 2 * j);
                    left[half + 2] = pair_of<Kind>(held[s][half], 2 * j + 1);
                }
#pragma unroll
                for (int tile = 0; tile < Tiles; ++tile) {
                    const uint4& four = inputs[s][tile][j >> 1];
                    mma_bf16(sums[s % Chains][tile], left, word_of(four, 2 * j & 3), word_of(four, (2 * j & 3) + 1));
                }
            }
        }
    }
#pragma unroll
    for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 2 * Halves; ++i) {
            float sum = 0.0f;
#pragma unroll
            for (int s = 0; s < Chains; ++s) sum += sums[s][tile][i];
            const int row = eighth + 8 * (i >> 1), token = kTile * tile + 2 * quarter + (i & 1);
            parts[warp][token * kRows + row] = sum;
        }
    }
    __syncthreads();
    for (int at = threadIdx.x; at < kGroups * kOutputs; at += kThreads) {
        const int group = at / kOutputs, cell = at % kOutputs, token = cell / kRows;
        const int row = (blockIdx.x * kGroups + group) * kRows + cell % kRows;
        if (token >= a.tokens || row >= a.n) continue;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < Sharers; ++w) sum += parts[group * Sharers + w][cell];
        if constexpr (Kind != RowKind::kBf16) sum *= a.scale[row];
        const int64_t to = static_cast<int64_t>(token) * a.n + row;
        if (Kind == RowKind::kBf16 && a.floats_out) {
            static_cast<float*>(a.out)[to] = sum;
        } else {
            static_cast<__nv_bfloat16*>(a.out)[to] = __float2bfloat16_rn(sum);
        }
    }
}

template <RowKind Kind, int Tiles>
__global__ void __launch_bounds__(kThreads, 2) byte_rows_kernel(const RowsArguments a) {
    rows_product<Kind, Tiles, 2, kWarps, 4 / Tiles, 4 / Tiles>(a);
}

// With 8 rows a warp a multiprocessor has one block at most, which may hold more.
template <int Tiles, int Halves, int Sharers>
__global__ void __launch_bounds__(kThreads, Halves == 1 ? 1 : 4 - Tiles) dense_rows_kernel(const RowsArguments a) {
    constexpr int kAhead = Halves == 1 ? 16 / Tiles : 4;
    rows_product<RowKind::kBf16, Tiles, Halves, Sharers, kAhead, 4>(a);
}

template <RowKind Kind>
int launch_byte_rows(const RowsArguments& a, cudaStream_t stream) {
    const auto kernel = a.tokens <= kTile ? byte_rows_kernel<Kind, 1> : byte_rows_kernel<Kind, 2>;
    return launch(kernel, dim3((a.n + 15) / 16), 0, stream, true, a);
}

template <int Halves, int Sharers>
int launch_dense_rows(const RowsArguments& a, cudaStream_t stream) {
    constexpr int kBlockRows = 8 * Halves * kWarps / Sharers;
    const auto kernel =
        a.tokens <= kTile ? dense_rows_kernel<1, Halves, Sharers> : dense_rows_kernel<2, Halves, Sharers>;
    return launch_as(a.urgent, kernel, dim3((a.n + kBlockRows - 1) / kBlockRows), 0, stream, true, a);
}

}  // namespace

int byte_rows(const RowsArguments& a, cudaStream_t stream) {
    const int row_bytes = a.kind == RowKind::kBf16 ? 2 * a.k : a.k;
    if (a.tokens > kRowsTokens || row_bytes % kRowsUnitBytes != 0) return kUnsupported;
    if (a.tokens == 0 || a.n == 0) return 0;
    if (a.kind == RowKind::kE4m3) return launch_byte_rows<RowKind::kE4m3>(a, stream);
    if (a.kind == RowKind::kInt8) return launch_byte_rows<RowKind::kInt8>(a, stream);
    // Short rows: 64 of them a block, or most warps would have nothing to read. Few rows: 8 a block, so that twice as
    // many multiprocessors read them.
    if (row_bytes <= kFewUnits * kRowsUnitBytes) return launch_dense_rows<2, 2>(a, stream);
    return a.n <= kFewRows ? launch_dense_rows<1, kWarps>(a, stream) : launch_dense_rows<2, kWarps>(a, stream);
}

}  // namespace exl3
