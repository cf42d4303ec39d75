// The decode kernels' inputs rotated in launches of their own, where column blocks would repeat it too often.
#pragma once

#include "linear_decode.cuh"
#include "moe_decode.cuh"

namespace exl3 {

// Rotates all tokens once, part by part as the blocks of the product would. Grid: (parts of k, tokens).
template <typename Rows>
__global__ void __launch_bounds__(kThreads)
rotate_tokens(const LinearArguments a, const LinearScratch scratch, int rows_per_group, int k_part) {
    __shared__ unsigned bound;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, part = blockIdx.x, token = blockIdx.y;
    allow_next_kernel();
    if (threadIdx.x == 0) bound = 0;
    const int first = token / rows_per_group * rows_per_group;
    const int rows = min(rows_per_group, a.tokens - first);
    const int k_begin = part * k_part;
    const int64_t index = static_cast<int64_t>(token) * a.w.k + k_begin;
    const auto source = row_source(a.x, static_cast<Type>(a.x_type), [=](int) { return index; },
                                   static_cast<const __half*>(a.w.suh) + k_begin, min(k_part, a.w.k - k_begin), 1);
    __syncthreads();
    wait_for_previous_kernel();
    rotate_rows<Rows>(source, &bound, scratch.rotated + static_cast<int64_t>(first) * a.w.k + k_begin * rows,
                      rows, token - first, warp, lane);
    if (threadIdx.x == 0) scratch.scales[token * gridDim.x + part] = row_scale(bound);
}

// Rotates the input of every pair once, part by part as the blocks of the product would.
// Grid: (pairs, inputs, parts of k).
template <typename Rows>
__global__ void __launch_bounds__(kThreads)
moe_rotate(const MoeArguments a, const DecodeScratch scratch, int k_part) {
    __shared__ unsigned bound;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, pair = blockIdx.x, part = blockIdx.z;
    if (threadIdx.x == 0) bound = 0;
    // The kernels after this one read the routing before they wait, so they may start only once it is there.
    wait_for_previous_kernel();
    allow_next_kernel();
    const int expert = local_expert(a, expert_of(a, pair));
    if (expert < 0) return;
    const int k_begin = part * k_part;
    const __half* suh = static_cast<const __half*>(a.w13.suh) +
                        (static_cast<int64_t>(expert) * gridDim.y + blockIdx.y) * a.w13.k + k_begin;
    const int64_t index = static_cast<int64_t>(pair / a.top_k) * a.w13.k + k_begin;
    const auto source = row_source(a.x, static_cast<Type>(a.x_type), [=](int) { return index; }, suh,
                                   min(k_part, a.w13.k - k_begin), 1);
    __syncthreads();
    const int64_t line = static_cast<int64_t>(blockIdx.y) * gridDim.x + pair;
    rotate_rows<Rows>(source, &bound, scratch.rotated + line * a.w13.k + k_begin, 1, 0, warp, lane);
    if (threadIdx.x == 0) scratch.rotated_scale[line * gridDim.z + part] = row_scale(bound);
}

}  // namespace exl3
