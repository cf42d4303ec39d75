// Routed experts for a few tokens: their inputs rotated (`rotate_decode.cuh`), gate/up with the activation, down with
// the sum over experts.
//
// A block owns one expert and 128 columns. Blocks are numbered by token-expert pair; the pair that
// is first of its expert (or starts its next group of rows) gathers the others, the rest leave, so
// no table is needed. Nothing waits: where several blocks share an output
// (split k, the sum over a token's experts) each adds to a counter after its stores are visible and
// the last one to arrive reads all parts in a fixed order and resets the counter. At most 32 experts per
// token.
#pragma once

#include "api.h"
#include "stream_integer.cuh"

namespace exl3 {

struct DecodeScratch {
    int* gate_counters;    // [pairs, I/128]
    int* down_counters;    // [tokens, H/128]
    float* intermediate_scale;  // [pairs, I/128]
    __half* intermediate;  // [pairs, I], as `HalfRows` orders sixteen
    float* down_parts;     // [pairs, split, H]
    __half* rotated;       // [inputs, pairs, H], as the product's rows order sixteen
    float* rotated_scale;  // [inputs, pairs, split], powers of two
    float* gate_parts;     // [pairs, I/128, split, 256]
};

// The rows of one block: which pairs share this block's expert.
template <int MaxRows>
struct RowGroup {
    int pair[MaxRows];
};

__device__ __forceinline__ int64_t expert_of(const MoeArguments& a, int pair) {
    return a.ids_are_64_bit ? static_cast<const int64_t*>(a.topk_ids)[pair]
                            : static_cast<const int*>(a.topk_ids)[pair];
}

__device__ __forceinline__ int local_expert(const MoeArguments& a, int64_t id) {
    if (id < 0) return -1;
    return a.expert_map != nullptr ? a.expert_map[id] : static_cast<int>(id);
}

// Which pairs share the expert `id`: warps scan equal parts of all pairs, count, meet, and record the
// group. Returns its number of rows, 0 when another block serves this pair: groups hold `cap` rows.
// The result is the same in all threads; the group is complete after the next __syncthreads.
template <int MaxRows>
__device__ __forceinline__ int gather_rows(const MoeArguments& a, int pair, int64_t id, int cap,
                                           RowGroup<MaxRows>& group, int warp, int lane) {
    __shared__ int before[kWarps], after[kWarps];
    const int pairs = a.tokens * a.top_k;
    const int share = (pairs + kWarps * 32 - 1) / (kWarps * 32) * 32;
    const int begin = warp * share, end = min(begin + share, pairs);
    int lower = 0, upper = 0;
    for (int at = begin + lane; at - lane < end; at += 32) {
        const bool same = at < end && expert_of(a, at) == id;
        lower += __popc(__ballot_sync(kFullWarp, same && at < pair));
        upper += __popc(__ballot_sync(kFullWarp, same && at >= pair));
    }
    if (lane == 0) {
        before[warp] = lower;
        after[warp] = upper;
    }
    __syncthreads();
    int rank = 0, found = 0, earlier = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
        if (w == warp) rank = found;
        found += after[w];
        earlier += before[w];
    }
    if (earlier % cap != 0) return 0;
    if (upper > 0) {
        for (int at = begin + lane; at - lane < end; at += 32) {
            const bool same = at < end && at >= pair && expert_of(a, at) == id;
            const unsigned mask = __ballot_sync(kFullWarp, same);
            const int mine = rank + __popc(mask & ((1u << lane) - 1u));
            if (same && mine < cap) group.pair[mine] = at;
            rank += __popc(mask);
        }
    }
    return min(found, cap);
}

// One arrival at a counter, after the caller's stores (or those a barrier ordered before it) are
// visible. True for the arrival that completes `total`; the counter is then zero again.
__device__ __forceinline__ bool arrives_last(int* counter, int total) {
    fence_device();
    const bool last = atomicAdd(counter, 1) == total - 1;
    if (last) {
        *counter = 0;
        fence_device();
    }
    return last;
}

// The same for a whole block.
__device__ __forceinline__ bool block_arrives_last(int* counter, int total, int* flag) {
    __syncthreads();
    if (threadIdx.x == 0) *flag = arrives_last(counter, total);
    __syncthreads();
    return *flag != 0;
}

// The sum in order of the four numbers at every `address(p)` with `present(p)`, p from 0 to `count`: parts other
// blocks have written, eight loads under way together.
template <typename Address, typename Present>
__device__ __forceinline__ Quad sum_parts(int count, Address address, Present present) {
    constexpr int kBatch = 8;
    Quad sum = {};
#pragma unroll 1
    for (int first = 0; first < count; first += kBatch) {
        float4 f[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            f[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            const int p = first + i;
            if (p < count && present(p)) f[i] = __ldcg(reinterpret_cast<const float4*>(address(p)));
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) sum = sum + Quad{{f[i].x, f[i].y, f[i].z, f[i].w}};
    }
    return sum;
}

// What is no number stays none: fminf and fmaxf would give the limit.
__device__ __forceinline__ float clamped_swiglu(float gate, float up, float limit) {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
    return gate / (1.0f + __expf(-gate)) * up;
}

template <int K, Codebook C, int Products>
__global__ void __launch_bounds__(kThreads, 4)
moe_gate_up(const MoeArguments a, const DecodeScratch scratch, int split, int k_part, int cap) {
    using Work = StreamOf<K, C, 1, 2, Products>;
    extern __shared__ __align__(16) unsigned char shared[];
    __shared__ RowGroup<Work::kRows> group;
    __shared__ float scales[2 * Work::kRows];
    __shared__ int flag;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int block = blockIdx.x, pair = blockIdx.y, part = blockIdx.z;

    allow_next_kernel();
    const int64_t id = expert_of(a, pair);
    const int expert = local_expert(a, id);
    if (expert < 0) {
        wait_for_previous_kernel();
        return;
    }
    const int rows = gather_rows(a, pair, id, cap, group, warp, lane);
    if (rows == 0) return;

    const int k_begin = part * k_part;
    const int k_size = min(k_part, a.w13.k - k_begin);
    const int64_t row_words = static_cast<int64_t>(a.w13.n / 16) * Work::kTileWords;
    const typename Work::Share share(warp, k_size / (16 * Work::kStepsPerStage));
    uint32_t* ring = reinterpret_cast<uint32_t*>(shared) + warp * kStages * Work::kStageWords;
    __half* activations = reinterpret_cast<__half*>(shared + Work::kRingBytes);
    const int stages = share.stage_end - share.stage_begin;
    const uint32_t* source =
        a.w13.trellis +
        ((static_cast<int64_t>(expert) * 2 + share.matrix) * (a.w13.k / 16) + k_begin / 16 +
         share.stage_begin * Work::kStepsPerStage) * row_words +
        (block * 8 + share.half * kTilesPerWarp) * Work::kTileWords;
    typename Work::Copier copier(shared_address(ring), source, static_cast<int>(row_words * 4), lane);
    Work::prefetch(copier, stages);
    __syncthreads();

    wait_for_previous_kernel();
    const int inputs = a.same_suh ? 1 : 2;
    const int64_t pairs = static_cast<int64_t>(a.tokens) * a.top_k;
    for (int input = 0; input < inputs; ++input) {
        __half* to = activations + input * rows * k_size;
        for (int row = 0; row < rows; ++row) {
            const int64_t line = input * pairs + group.pair[row];
            if (threadIdx.x == 0) scales[input * rows + row] = __ldcg(scratch.rotated_scale + line * split + part);
            const __half* from = scratch.rotated + line * a.w13.k + k_begin;
            for (int chunk = threadIdx.x; chunk < k_size / 8; chunk += kThreads) {
                copy_async_16(shared_address(to + ((chunk >> 1) * rows + row) * 16 + (chunk & 1) * 8),
                              from + chunk * 8);
            }
        }
    }
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();

    Work work;
    work.run(ring, copier,
             activations + (a.same_suh ? 0 : share.matrix * rows * k_size) +
                 share.stage_begin * Work::kStepsPerStage * rows * 16,
             rows, stages, lane);
    float* reduce = reinterpret_cast<float*>(shared);
    work.put(reduce, share, lane);

    const int i_blocks = a.w13.n / 128;
    for (int row = warp; row < rows; row += kWarps) {
        const float gate_scale = scales[row];
        const float up_scale = a.same_suh ? gate_scale : scales[rows + row];
        const Quad gate = Work::get(reduce, row, lane * 4) * reciprocal_of_power(gate_scale);
        const Quad up = Work::get(reduce, row, 128 + lane * 4) * reciprocal_of_power(up_scale);
        float* line = reduce + row * Work::kReduceStride;
        store_quad(line, Type::kFloat, lane * 4, gate);
        store_quad(line, Type::kFloat, 128 + lane * 4, up);
        if (split > 1) {
            const int64_t at = ((static_cast<int64_t>(group.pair[row]) * i_blocks + block) * split + part) * 256;
            store_quad(scratch.gate_parts, Type::kFloat, at + lane * 4, gate);
            store_quad(scratch.gate_parts, Type::kFloat, at + 128 + lane * 4, up);
        }
    }
    if (split > 1) {
        int* counter = scratch.gate_counters + group.pair[0] * i_blocks + block;
        if (!block_arrives_last(counter, split, &flag)) return;
    }

    const __half* svh = static_cast<const __half*>(a.w13.svh) +
                        static_cast<int64_t>(expert) * 2 * a.w13.n + block * 128 + lane * 4;
    const __half* suh_down = static_cast<const __half*>(a.w2.suh) +
                             static_cast<int64_t>(expert) * a.w2.k + block * 128 + lane * 4;
    for (int row = warp; row < rows; row += kWarps) {
        const int owner = group.pair[row];
        const float* line = reduce + row * Work::kReduceStride;
        Quad gate = load_quad(line, Type::kFloat, lane * 4);
        Quad up = load_quad(line, Type::kFloat, 128 + lane * 4);
        if (split > 1) {
            const float* parts = scratch.gate_parts +
                                 (static_cast<int64_t>(owner) * i_blocks + block) * split * 256 + lane * 4;
            const auto always = [](int) { return true; };
            gate = sum_parts(split, [&](int s) { return parts + s * 256; }, always);
            up = sum_parts(split, [&](int s) { return parts + s * 256 + 128; }, always);
        }
        gate = hadamard128(gate, lane) * load_quad(svh);
        up = hadamard128(up, lane) * load_quad(svh + a.w13.n);
        Quad h;
#pragma unroll
        for (int i = 0; i < 4; ++i) h.v[i] = clamped_swiglu(gate.v[i], up.v[i], a.limit);
        h = hadamard128(h * load_quad(suh_down), lane);
        const float scale = row_scale(__reduce_max_sync(kFullWarp, largest_bits(h)));
        HalfRows::put(scratch.intermediate + static_cast<int64_t>(owner) * a.w2.k + block * 128, 1, 0,
                      lane * 4, h * scale);
        if (lane == 0) scratch.intermediate_scale[owner * i_blocks + block] = reciprocal_of_power(scale);
    }
}

template <int K, Codebook C, int Products>
__global__ void __launch_bounds__(kThreads, 4)
moe_down(const MoeArguments a, const DecodeScratch scratch, int split, int k_part, int cap) {
    using Work = StreamOf<K, C, 1, 1, Products>;
    extern __shared__ __align__(16) unsigned char shared[];
    __shared__ RowGroup<Work::kRows> group;
    __shared__ float scales[Work::kRows];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int block = blockIdx.x, pair = blockIdx.y, part = blockIdx.z;

    allow_next_kernel();
    const int64_t id = expert_of(a, pair);
    const int expert = local_expert(a, id);
    const int n_blocks = a.w2.n / 128, i_blocks = a.w2.k / 128;
    if (expert < 0) {
        // A token none of whose experts live here gets zeros from its first pair.
        wait_for_previous_kernel();
        if (pair % a.top_k != 0 || part != 0) return;
        for (int j = 1; j < a.top_k; ++j) {
            if (local_expert(a, expert_of(a, pair + j)) >= 0) return;
        }
        if (warp == 0) {
            store_quad(a.out, static_cast<Type>(a.out_type),
                       static_cast<int64_t>(pair / a.top_k) * a.w2.n + block * 128 + lane * 4, Quad{});
        }
        return;
    }
    const int rows = gather_rows(a, pair, id, cap, group, warp, lane);
    if (rows == 0) return;

    const int k_begin = part * k_part;
    const int k_size = min(k_part, a.w2.k - k_begin);
    const int64_t row_words = static_cast<int64_t>(a.w2.n / 16) * Work::kTileWords;
    const typename Work::Share share(warp, k_size / (16 * Work::kStepsPerStage));
    uint32_t* ring = reinterpret_cast<uint32_t*>(shared) + warp * kStages * Work::kStageWords;
    __half* activations = reinterpret_cast<__half*>(shared + Work::kRingBytes);
    const int stages = share.stage_end - share.stage_begin;
    const uint32_t* source =
        a.w2.trellis +
        (static_cast<int64_t>(expert) * (a.w2.k / 16) + k_begin / 16 + share.stage_begin * Work::kStepsPerStage) *
            row_words +
        (block * 8 + share.half * kTilesPerWarp) * Work::kTileWords;
    typename Work::Copier copier(shared_address(ring), source, static_cast<int>(row_words * 4), lane);
    Work::prefetch(copier, stages);
    wait_for_previous_kernel();
    __syncthreads();

    // Bring the blocks of a row, each stored with its own power of two, to the row's largest.
    for (int row = 0; row < rows; ++row) {
        const int owner = group.pair[row];
        const float* block_scales = scratch.intermediate_scale + owner * i_blocks + k_begin / 128;
        unsigned bits = 0;
        for (int b = lane; b < k_size / 128; b += 32) bits = max(bits, __float_as_uint(__ldcg(block_scales + b)));
        const float scale = __uint_as_float(__reduce_max_sync(kFullWarp, bits));
        if (threadIdx.x == 0) scales[row] = scale;
        const float inverse = reciprocal_of_power(scale);
        const uint4* source_row = reinterpret_cast<const uint4*>(
            scratch.intermediate + static_cast<int64_t>(owner) * a.w2.k + k_begin);
        for (int chunk = threadIdx.x; chunk < k_size / 8; chunk += kThreads) {
            const float ratio = __ldcg(block_scales + chunk / 16) * inverse;
            Work::Rows::put_eight(activations, rows, row, chunk, __ldcg(source_row + chunk), ratio);
        }
    }
    __syncthreads();

    Work work;
    work.run(ring, copier, activations + share.stage_begin * Work::kStepsPerStage * rows * 16,
             rows, stages, lane);
    float* reduce = reinterpret_cast<float*>(shared);
    work.put(reduce, share, lane);

    const __half* svh = static_cast<const __half*>(a.w2.svh) +
                        static_cast<int64_t>(expert) * a.w2.n + block * 128 + lane * 4;
    for (int row = warp; row < rows; row += kWarps) {
        const int owner = group.pair[row], token = owner / a.top_k;
        Quad q = hadamard128(Work::get(reduce, row, lane * 4) * scales[row], lane);
        q = q * load_quad(svh) * a.topk_weights[owner];
        const int64_t column = block * 128 + lane * 4;
        store_quad(scratch.down_parts, Type::kFloat,
                   (static_cast<int64_t>(owner) * split + part) * a.w2.n + column, q);
        const bool here = lane < a.top_k && local_expert(a, expert_of(a, token * a.top_k + lane)) >= 0;
        const unsigned local = __ballot_sync(kFullWarp, here);
        int last = 0;
        __syncwarp();
        if (lane == 0) {
            last = arrives_last(scratch.down_counters + token * n_blocks + block,
                                __popc(local) * split);
        }
        if (__shfl_sync(kFullWarp, last, 0) == 0) continue;
        const float* parts =
            scratch.down_parts + static_cast<int64_t>(token) * a.top_k * split * a.w2.n + column;
        const Quad sum = sum_parts(
            a.top_k * split, [&](int p) { return parts + static_cast<int64_t>(p) * a.w2.n; },
            [&](int p) { return (local >> (split == 1 ? p : p / split) & 1u) != 0; });
        store_quad(a.out, static_cast<Type>(a.out_type),
                   static_cast<int64_t>(token) * a.w2.n + column, sum);
    }
}

}  // namespace exl3
