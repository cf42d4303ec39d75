// Routing, rotation and combination around the prefill products.
#include <algorithm>

#include "prefill.cuh"
#include "rotate_wide.cuh"

namespace exl3 {

constexpr int kMaxExperts = 1024;

namespace {

// Calls `visit(pair, expert)` for every pair with a local expert among those of thread `me`; eight loads are
// under way together.
template <typename Visit>
__device__ __forceinline__ void each_pair(const MoeArguments& a, int me, Visit visit) {
    constexpr int kBatch = 8;
    const int pairs = a.tokens * a.top_k;
    for (int first = me; first < pairs; first += kBatch * kMaxExperts) {
        int expert[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int pair = first + i * kMaxExperts;
            expert[i] = pair < pairs ? local_expert(a, expert_of(a, pair)) : -1;
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            if (expert[i] >= 0) visit(first + i * kMaxExperts, expert[i]);
        }
    }
}

// Sorts pairs by expert and cuts each expert's rows into tiles; one block of kMaxExperts threads.
__global__ void __launch_bounds__(kMaxExperts) route_kernel(const MoeArguments a,
                                                           const PrefillScratch s) {
    __shared__ int count[kMaxExperts], rows[kMaxExperts], tiles[kMaxExperts];
    const int me = threadIdx.x;
    count[me] = 0;
    __syncthreads();
    each_pair(a, me, [&](int, int expert) { atomicAdd(&count[expert], 1); });
    __syncthreads();
    const int mine = count[me], my_tiles = (mine + s.tile_rows - 1) / s.tile_rows;
    rows[me] = mine;
    tiles[me] = my_tiles;
    __syncthreads();
    for (int step = 1; step < kMaxExperts; step *= 2) {
        const int r = me >= step ? rows[me - step] : 0, t = me >= step ? tiles[me - step] : 0;
        __syncthreads();
        rows[me] += r;
        tiles[me] += t;
        __syncthreads();
    }
    const int first = rows[me] - mine, first_tile = tiles[me] - my_tiles;
    if (me == kMaxExperts - 1) *s.tile_count = tiles[me];
    if (me < a.experts) s.expert_first[me] = first;
    for (int t = 0; t < my_tiles; ++t) {
        s.tiles[first_tile + t] = {me, first + t * s.tile_rows,
                                     min(s.tile_rows, mine - t * s.tile_rows), 0};
    }
    __syncthreads();
    count[me] = first;
    __syncthreads();
    each_pair(a, me, [&](int pair, int expert) {
        const int row = atomicAdd(&count[expert], 1);
        s.row_pair[row] = pair;
        s.row_expert[row] = expert;
    });
}

// A power of two per expert that keeps the rotated down input inside half range whatever the tokens.
__global__ void __launch_bounds__(kThreads) down_scale_kernel(const MoeArguments a,
                                                             const PrefillScratch s) {
    __shared__ unsigned bounds[kWarps];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const __half* suh = static_cast<const __half*>(a.w2.suh) +
                        static_cast<int64_t>(blockIdx.x) * a.w2.k;
    unsigned bits = 0;
    for (int at = threadIdx.x * 4; at < a.w2.k; at += kThreads * 4) bits = max(bits, largest_bits(load_quad(suh + at)));
    bits = __reduce_max_sync(kFullWarp, bits);
    if (lane == 0) bounds[warp] = bits;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int w = 1; w < kWarps; ++w) bits = max(bits, bounds[w]);
    const float bound = __uint_as_float(bits);
    const float limit = a.limit < 64.0f ? a.limit * a.limit : kUnlimitedActivation;
    s.down_scale[blockIdx.x] = power_of_two_scale(bound * limit, 12);
}

// Rotates the rows of one pair; grid (pairs, inputs).
__global__ void __launch_bounds__(kThreads, 5)
rotate_pairs_kernel(const MoeArguments a, const PrefillScratch s) {
    __shared__ unsigned bound;
    const int pair = s.row_pair[blockIdx.x], expert = s.row_expert[blockIdx.x];
    const int inputs = gridDim.y, hidden = a.w13.k;
    const __half* suh = static_cast<const __half*>(a.w13.suh) +
                        (static_cast<int64_t>(expert) * inputs + blockIdx.y) * hidden;
    const WideRow row = {a.x, static_cast<Type>(a.x_type), static_cast<int64_t>(pair / a.top_k) * hidden, suh, hidden};
    if (threadIdx.x == 0) bound = 0;
    __syncthreads();
    const int64_t first = static_cast<int64_t>(blockIdx.y) * gridDim.x;
    const bool doubled = takes_doubled(a.w13, s);
    __half* input = s.rotated + first * hidden * (doubled ? 2 : 1);
    const int in_tile = blockIdx.x - s.expert_first[expert];
    rotate_wide(row, &bound, threadIdx.x, [&](int at, const Quad (&q)[4]) {
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const int column = at + wide_place(i);
            if (doubled) {
                store_doubled(input, gridDim.x, blockIdx.x, in_tile, column, q[i]);
                store_doubled(input, gridDim.x, blockIdx.x, in_tile, column + 4, q[i + 1]);
            } else {
                store_swizzled_eight(input, gridDim.x, blockIdx.x, in_tile, column, q[i], q[i + 1]);
            }
        }
    });
    if (threadIdx.x == 0) s.row_scale[first + blockIdx.x] = reciprocal_of_power(row_scale(bound));
}

// out[token] = sum of its pairs in order; one block a token and 1024 columns.
__global__ void __launch_bounds__(kThreads) combine_kernel(const MoeArguments a,
                                                          const PrefillScratch s) {
    const int token = blockIdx.y, column = (blockIdx.x * kThreads + threadIdx.x) * 4;
    if (column >= a.w2.n) return;
    constexpr int kBatch = 8;
    Quad sum = {};
    for (int first = 0; first < a.top_k; first += kBatch) {
        Quad q[kBatch] = {};
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
            const int pair = token * a.top_k + min(first + j, a.top_k - 1);
            const bool here = first + j < a.top_k && local_expert(a, expert_of(a, pair)) >= 0;
            if (here) q[j] = load_short_quad(s.routed, false, static_cast<int64_t>(pair) * a.w2.n + column);
        }
#pragma unroll
        for (int j = 0; j < kBatch; ++j) sum = sum + q[j];
    }
    store_quad(a.out, static_cast<Type>(a.out_type), static_cast<int64_t>(token) * a.w2.n + column, sum);
}

}  // namespace

// Rows of experts that live elsewhere are not sorted in.
int prefill_before(const MoeArguments& a, const PrefillScratch& s, cudaStream_t stream) {
    const int pairs = a.tokens * a.top_k, inputs = a.same_suh ? 1 : 2;
    if (a.experts > kMaxExperts) return kUnsupported;
    // Tail rows of pairs without a local expert name pair 0 and expert 0: harmless rotations instead
    // of a count the host would have to wait for.
    if (const auto error = cudaMemsetAsync(s.row_pair, 0, pairs * 4, stream)) return error;
    if (const auto error = cudaMemsetAsync(s.row_expert, 0, pairs * 4, stream)) return error;
    route_kernel<<<1, kMaxExperts, 0, stream>>>(a, s);
    down_scale_kernel<<<a.experts, kThreads, 0, stream>>>(a, s);
    rotate_pairs_kernel<<<dim3(pairs, inputs), kThreads, 0, stream>>>(a, s);
    return cudaGetLastError();
}

int prefill_after(const MoeArguments& a, const PrefillScratch& s, cudaStream_t stream) {
    combine_kernel<<<dim3((a.w2.n + 4 * kThreads - 1) / (4 * kThreads), a.tokens), kThreads, 0,
                     stream>>>(a, s);
    return cudaGetLastError();
}

}  // namespace exl3
