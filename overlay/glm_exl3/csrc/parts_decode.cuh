// Several matrices times the same few tokens in one launch: packed parts with scales of their own and, if any,
// dense rows. Every part lands in its columns of one output; gate and up may leave as their activation.
//
// A packed part's blocks work as those of `linear_few_tokens` and give its bits. That kernel is left as it is:
// its code is what the tables of kernels measure.
#pragma once

#include "api.h"
#include "moe_decode.cuh"
#include "stream_integer.cuh"

namespace exl3 {

struct PartsPlan {
    const void* x;  // [tokens, k]
    void* out;      // [tokens, stride]
    int x_type, out_type, tokens, k, count;
    int64_t stride;
    float limit;  // of the activation
    struct Part {
        Packed w;
        int* counters;    // [n/128]
        float* scales;    // [tokens, split], powers of two of the parts of rows
        __half* rotated;  // [k/16, tokens, 16], as the product's rows order sixteen
        float* sums;      // [n/128, split, 8, 128]
        int column, first_block, split, k_part;
    } part[kMostParts];
    const void* dense;  // [dense_rows, k] in x's type, 16 bits, or null
    int dense_rows, dense_column;  // their blocks come first, `kWarps` rows each
};

// Eight numbers of sixteen bits as floats.
__device__ __forceinline__ void widen_eight(const uint4& raw, bool half, float (&to)[8]) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 f = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
        to[2 * i] = half ? f.x : __uint_as_float(words[i] << 16);
        to[2 * i + 1] = half ? f.y : __uint_as_float(words[i] & 0xffff0000u);
    }
}

// One dense row a warp, its first numbers loaded before the tokens exist.
__device__ __forceinline__ void dense_row(const PartsPlan& p, int row, int lane) {
    constexpr int kBatch = 4, kRowsOfTokens = 8;
    const bool valid = row < p.dense_rows, half = static_cast<Type>(p.x_type) == Type::kHalf;
    const int chunks = p.k / 8;
    const uint4* weights =
        reinterpret_cast<const uint4*>(p.dense) + static_cast<int64_t>(valid ? row : 0) * chunks;
    uint4 held[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) held[i] = __ldg(weights + min(i * 32 + lane, chunks - 1));
    wait_for_previous_kernel();
    if (!valid) return;
    float sum[kRowsOfTokens] = {};
#pragma unroll 1
    for (int first = 0; first < chunks; first += kBatch * 32) {
        uint4 now[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            now[i] = held[i];
            held[i] = __ldg(weights + min(first + (kBatch + i) * 32 + lane, chunks - 1));
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int chunk = first + i * 32 + lane;
            if (chunk >= chunks) break;
            float w[8];
            widen_eight(now[i], half, w);
#pragma unroll
            for (int token = 0; token < kRowsOfTokens; ++token) {
                if (token >= p.tokens) break;
                const uint4* line = reinterpret_cast<const uint4*>(p.x) + static_cast<int64_t>(token) * chunks;
                float x[8];
                widen_eight(line[chunk], half, x);  // not __ldg: another kernel has just written them
#pragma unroll
                for (int j = 0; j < 8; ++j) sum[token] = fmaf(w[j], x[j], sum[token]);
            }
        }
    }
#pragma unroll
    for (int token = 0; token < kRowsOfTokens; ++token) {
        if (token >= p.tokens) break;
        float all = sum[token];
#pragma unroll
        for (int step = 16; step > 0; step /= 2) all += __shfl_xor_sync(kFullWarp, all, step);
        if (lane != 0) continue;
        const int64_t at = token * p.stride + p.dense_column + row;
        if (half) {
            static_cast<__half*>(p.out)[at] = __float2half_rn(all);
        } else {
            static_cast<__nv_bfloat16*>(p.out)[at] = __float2bfloat16_rn(all);
        }
    }
}

// A number as the output's type holds it.
__device__ __forceinline__ Quad rounded(Quad q, Type type) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (type == Type::kHalf) q.v[i] = __half2float(__float2half_rn(q.v[i]));
        if (type == Type::kBFloat16) q.v[i] = __bfloat162float(__float2bfloat16_rn(q.v[i]));
    }
    return q;
}

// The finished numbers of one row of a column block whose sums all lie in memory.
__device__ __forceinline__ Quad finished(const PartsPlan::Part& part, int block, int row, int lane) {
    const float* sums = part.sums + (static_cast<int64_t>(block) * part.split * kPartsTokens + row) * 128 + lane * 4;
    const Quad q = sum_parts(
        part.split, [&](int s) { return sums + s * kPartsTokens * 128; }, [](int) { return true; });
    return hadamard128(q, lane) * load_quad(static_cast<const __half*>(part.w.svh) + block * 128 + lane * 4);
}

template <int K, Codebook C, int Products, bool Rotated, bool Gated>
__global__ void __launch_bounds__(kThreads, Products == 2 ? 3 : 4) linear_parts(const __grid_constant__ PartsPlan p) {
    using Work = StreamOf<K, C, 1, 1, Products>;
    extern __shared__ __align__(16) unsigned char shared[];
    __shared__ unsigned bounds[Work::kRows];
    __shared__ int flag;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, rows = p.tokens;
    allow_next_kernel();
    int index = static_cast<int>(blockIdx.x);
    if (index < p.part[0].first_block) {
        dense_row(p, index * kWarps + warp, lane);
        return;
    }
    int which = 0;
    while (which + 1 < p.count && index >= p.part[which + 1].first_block) ++which;
    const PartsPlan::Part& mine = p.part[which];
    const int n_blocks = mine.w.n / 128, split = mine.split;
    index -= mine.first_block;
    const int block = index % n_blocks, cut = index / n_blocks;
    if (threadIdx.x < Work::kRows) bounds[threadIdx.x] = 0;

    const int k_begin = cut * mine.k_part;
    const int k_size = min(mine.k_part, p.k - k_begin);
    const int64_t row_words = static_cast<int64_t>(mine.w.n / 16) * Work::kTileWords;
    const typename Work::Share share(warp, k_size / (16 * Work::kStepsPerStage));
    uint32_t* ring = reinterpret_cast<uint32_t*>(shared) + warp * kStages * Work::kStageWords;
    __half* activations = reinterpret_cast<__half*>(shared + Work::kRingBytes);
    const int stages = share.stage_end - share.stage_begin;
    const uint32_t* source = mine.w.trellis +
                             (k_begin / 16 + share.stage_begin * Work::kStepsPerStage) * row_words +
                             (block * 8 + share.half * kTilesPerWarp) * Work::kTileWords;
    typename Work::Copier copier(shared_address(ring), source, static_cast<int>(row_words * 4), lane);
    Work::prefetch(copier, stages);

    wait_for_previous_kernel();
    if constexpr (Rotated) {
        const uint4* from = reinterpret_cast<const uint4*>(mine.rotated + k_begin * rows);
        for (int i = threadIdx.x; i < rows * k_size / 8; i += kThreads) {
            reinterpret_cast<uint4*>(activations)[i] = __ldcg(from + i);
        }
    } else {
        const int k = p.k;
        const auto rows_of = row_source(p.x, static_cast<Type>(p.x_type),
                                        [=](int row) { return static_cast<int64_t>(row) * k + k_begin; },
                                        static_cast<const __half*>(mine.w.suh) + k_begin, k_size, rows);
        __syncthreads();
        rotate_rows<typename Work::Rows>(rows_of, bounds, activations, rows, 0, warp, lane);
    }
    __syncthreads();

    Work work;
    work.run(ring, copier, activations + share.stage_begin * Work::kStepsPerStage * rows * 16,
             rows, stages, lane);
    float* reduce = reinterpret_cast<float*>(shared);
    work.put(reduce, share, lane);

    const bool meets = Gated || split > 1;
    float* sums = mine.sums + (static_cast<int64_t>(block) * split + cut) * kPartsTokens * 128;
    for (int row = warp; row < rows; row += kWarps) {
        const float scale = Rotated ? __ldcg(mine.scales + row * split + cut) : row_scale(bounds[row]);
        const Quad q = Work::get(reduce, row, lane * 4) * reciprocal_of_power(scale);
        if (meets) {
            store_quad(sums, Type::kFloat, row * 128 + lane * 4, q);
        } else {
            const Quad y = hadamard128(q, lane) *
                           load_quad(static_cast<const __half*>(mine.w.svh) + block * 128 + lane * 4);
            store_quad(p.out, static_cast<Type>(p.out_type),
                       row * p.stride + mine.column + block * 128 + lane * 4, y);
        }
    }
    if (!meets) return;
    int* counter = (Gated ? p.part[0].counters : mine.counters) + block;
    if (!block_arrives_last(counter, Gated ? 2 * split : split, &flag)) return;

    const Type type = static_cast<Type>(p.out_type);
    for (int row = warp; row < rows; row += kWarps) {
        Quad y;
        if constexpr (Gated) {
            const Quad gate = rounded(finished(p.part[0], block, row, lane), type);
            const Quad up = rounded(finished(p.part[1], block, row, lane), type);
#pragma unroll
            for (int i = 0; i < 4; ++i) y.v[i] = clamped_swiglu(gate.v[i], up.v[i], p.limit);
        } else {
            y = finished(mine, block, row, lane);
        }
        const int column = (Gated ? 0 : mine.column) + block * 128 + lane * 4;
        store_quad(p.out, type, row * p.stride + column, y);
    }
}

// Rotates all tokens once for every part, as `rotate_tokens` does for one. Grid: (cuts of k, tokens, parts).
template <typename Rows>
__global__ void __launch_bounds__(kThreads) rotate_parts(const __grid_constant__ PartsPlan p) {
    __shared__ unsigned bound;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, cut = blockIdx.x, token = blockIdx.y;
    const PartsPlan::Part& mine = p.part[blockIdx.z];
    allow_next_kernel();
    if (cut >= mine.split) return;
    if (threadIdx.x == 0) bound = 0;
    const int k_begin = cut * mine.k_part;
    const int64_t index = static_cast<int64_t>(token) * p.k + k_begin;
    const auto source =
        row_source(p.x, static_cast<Type>(p.x_type), [=](int) { return index; },
                   static_cast<const __half*>(mine.w.suh) + k_begin, min(mine.k_part, p.k - k_begin), 1);
    __syncthreads();
    wait_for_previous_kernel();
    rotate_rows<Rows>(source, &bound, mine.rotated + static_cast<int64_t>(k_begin) * p.tokens, p.tokens, token,
                      warp, lane);
    if (threadIdx.x == 0) mine.scales[token * mine.split + cut] = row_scale(bound);
}

}  // namespace exl3
