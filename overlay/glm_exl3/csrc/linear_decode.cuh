// One packed matrix times a few tokens: rotation, product, rotation back, bias, in one launch.
//
// A block owns 128 columns, up to 8 * NT tokens and a slice of k; the slices of a column block meet
// through a counter, and the last one to arrive adds all parts in order.
#pragma once

#include "api.h"
#include "moe_decode.cuh"
#include "stream_integer.cuh"

namespace exl3 {

struct LinearScratch {
    int* counters;   // [token groups, n/128]
    float* scales;   // [tokens, split], powers of two of the parts of rows
    __half* rotated; // [token groups, k/16, rows of the group, 16], as the product's rows order sixteen
    float* parts;    // [token groups, n/128, split, rows, 128]
};

template <int K, Codebook C, int NT, int Products, bool Rotated>
__global__ void __launch_bounds__(kThreads, NT == 4 ? 2 : NT == 2 || Products == 2 ? 3 : 4)
linear_few_tokens(const LinearArguments a, const LinearScratch scratch, int split, int k_part) {
    using Work = StreamOf<K, C, NT, 1, Products>;
    extern __shared__ __align__(16) unsigned char shared[];
    __shared__ unsigned bounds[Work::kRows];
    __shared__ int flag;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int block = blockIdx.x, first = blockIdx.y * Work::kRows, part = blockIdx.z;
    const int rows = min(Work::kRows, a.tokens - first);
    allow_next_kernel();
    if (threadIdx.x < Work::kRows) bounds[threadIdx.x] = 0;

    const int k_begin = part * k_part;
    const int k_size = min(k_part, a.w.k - k_begin);
    const int64_t row_words = static_cast<int64_t>(a.w.n / 16) * Work::kTileWords;
    const typename Work::Share share(warp, k_size / (16 * Work::kStepsPerStage));
    uint32_t* ring = reinterpret_cast<uint32_t*>(shared) + warp * kStages * Work::kStageWords;
    __half* activations = reinterpret_cast<__half*>(shared + Work::kRingBytes);
    const int stages = share.stage_end - share.stage_begin;
    const uint32_t* source = a.w.trellis +
                             (k_begin / 16 + share.stage_begin * Work::kStepsPerStage) * row_words +
                             (block * 8 + share.half * kTilesPerWarp) * Work::kTileWords;
    typename Work::Copier copier(shared_address(ring), source, static_cast<int>(row_words * 4), lane);
    Work::prefetch(copier, stages);

    wait_for_previous_kernel();
    if constexpr (Rotated) {
        const uint4* source_rows = reinterpret_cast<const uint4*>(
            scratch.rotated + static_cast<int64_t>(first) * a.w.k + k_begin * rows);
        for (int i = threadIdx.x; i < rows * k_size / 8; i += kThreads) {
            reinterpret_cast<uint4*>(activations)[i] = __ldcg(source_rows + i);
        }
    } else {
        const int64_t index = static_cast<int64_t>(first) * a.w.k + k_begin;
        const auto rows_of = row_source(a.x, static_cast<Type>(a.x_type),
                                        [=](int row) { return index + static_cast<int64_t>(row) * a.w.k; },
                                        static_cast<const __half*>(a.w.suh) + k_begin, k_size, rows);
        __syncthreads();
        rotate_rows<typename Work::Rows>(rows_of, bounds, activations, rows, 0, warp, lane);
    }
    __syncthreads();

    Work work;
    work.run(ring, copier, activations + share.stage_begin * Work::kStepsPerStage * rows * 16,
             rows, stages, lane);
    float* reduce = reinterpret_cast<float*>(shared);
    work.put(reduce, share, lane);

    const int64_t group = static_cast<int64_t>(blockIdx.y) * gridDim.x + block;
    float* parts = scratch.parts + group * split * Work::kRows * 128;
    for (int row = warp; row < rows; row += kWarps) {
        const float scale =
            Rotated ? __ldcg(scratch.scales + (first + row) * split + part) : row_scale(bounds[row]);
        const Quad q = Work::get(reduce, row, lane * 4) * reciprocal_of_power(scale);
        store_quad(reduce, Type::kFloat, row * Work::kReduceStride + lane * 4, q);
        if (split > 1) store_quad(parts, Type::kFloat, (part * Work::kRows + row) * 128 + lane * 4, q);
    }
    if (split > 1 && !block_arrives_last(scratch.counters + group, split, &flag)) return;

    const int column = block * 128 + lane * 4;
    for (int row = warp; row < rows; row += kWarps) {
        Quad q = load_quad(reduce, Type::kFloat, row * Work::kReduceStride + lane * 4);
        if (split > 1) {
            q = sum_parts(
                split, [&](int s) { return parts + (s * Work::kRows + row) * 128 + lane * 4; },
                [](int) { return true; });
        }
        q = hadamard128(q, lane) * load_quad(static_cast<const __half*>(a.w.svh) + column);
        if (a.bias != nullptr) q = q + load_quad(static_cast<const __half*>(a.bias) + column);
        store_quad(a.out, static_cast<Type>(a.out_type),
                   static_cast<int64_t>(first + row) * a.w.n + column, q);
    }
}

}  // namespace exl3
