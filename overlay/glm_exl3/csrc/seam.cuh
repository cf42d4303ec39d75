// The steps of the mHC seam: what a thread of a cluster does with the columns, streams and outputs it has.
#pragma once

#include "cluster.cuh"
#include "seam.h"

namespace exl3 {
namespace mhc {

constexpr int kStreams = 4, kMixes = kStreams * (2 + kStreams);
constexpr int kSeamWarps = 16, kSeamThreads = 32 * kSeamWarps;
constexpr int kUnit = 256;      // columns of a part
constexpr int kMostParts = 2;   // of a block
constexpr int kMostBlocks = 16, kPortableBlocks = 8;
constexpr int kWarpsOfStream = kSeamWarps / kStreams;
constexpr int kOutputs = kMixes / kWarpsOfStream;  // of a warp, which has one stream's columns
constexpr int kRow = 32;                           // floats of a row of sums: mixes, then the squares, then zeros
constexpr int kSent = (kMixes + 4) / 4;            // of them, in fours
constexpr unsigned kAll = 0xffffffffu;
static_assert(kOutputs == 6 && kSent * 4 > kMixes && kSent <= 8 && kMostBlocks <= kSeamWarps);

template <int Parts>
struct alignas(16) SeamShared {
    uint32_t streams[kStreams][Parts * kUnit / 2];  // new, pairs of bf16
    float own[Parts][kStreams][kRow];               // sums over a part's columns of a stream
    float mixes[kMostBlocks][kRow];                 // and of every block of the cluster
    float squares[kMostBlocks][kStreams * Parts];   // of the next block's input, of every block's warps
    uint64_t mixes_here, squares_here;
};

__device__ __forceinline__ float2 wide(uint32_t pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

__device__ __forceinline__ uint32_t rounded(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
}

// These stay before the wait for the previous kernel, where they are written.
template <typename T>
__device__ __forceinline__ T* settled(T* pointer) {
    asm volatile("" : "+l"(pointer));
    __builtin_assume(__isGlobal(pointer));
    return pointer;
}

__device__ __forceinline__ float4 load_constant(const float* from) {
    float4 v;
    asm volatile("ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];\n"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(from));
    return v;
}

// The same bits in every lane.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask >>= 1) x += __shfl_xor_sync(kAll, x, mask);
    return x;
}

// What is known of a thread and does not depend on the input.
struct SeamPlace {
    int64_t token;
    int rank, blocks;  // of the cluster
    int warp, lane;
    int stream, quarter;    // the stream of a warp, and which of the outputs
    int64_t hidden, first;  // columns, and the first of this block
    float part;             // of a column among all
};

template <int Parts>
__device__ __forceinline__ SeamPlace place_of_thread(const SeamArguments& a) {
    SeamPlace at;
    at.token = blockIdx.y;
    at.rank = blockIdx.x;
    at.blocks = gridDim.x;
    at.warp = threadIdx.x / 32;
    at.lane = threadIdx.x % 32;
    at.stream = at.warp / kWarpsOfStream;
    at.quarter = at.warp % kWarpsOfStream;
    at.hidden = a.hidden;
    at.first = static_cast<int64_t>(at.rank) * Parts * kUnit;
    at.part = reciprocal(static_cast<float>(a.hidden));
    return at;
}

// Zeros in place of blocks that a smaller cluster lacks, and one phase of each barrier.
template <int Parts>
__device__ __forceinline__ void prepare(SeamShared<Parts>& shared, int blocks) {
    const int t = threadIdx.x;
    static_assert(kMostBlocks * kRow == kSeamThreads && kMostBlocks * kStreams * Parts <= kSeamThreads);
    if (t >= blocks * kRow) shared.mixes[t / kRow][t % kRow] = 0.0f;
    if (t < Parts * kStreams * kRow) shared.own[t / kRow / kStreams][t / kRow % kStreams][t % kRow] = 0.0f;
    constexpr int kWarpSums = kStreams * Parts;
    if (t >= blocks * kWarpSums && t < kMostBlocks * kWarpSums) shared.squares[t / kWarpSums][t % kWarpSums] = 0.0f;
    if (t == 0) {
        const uint32_t mixes = shared_address(&shared.mixes_here), squares = shared_address(&shared.squares_here);
        barrier_init(mixes, 1);
        barrier_init(squares, 1);
        publish_barriers();
        barrier_expect(mixes, blocks * kSent * 16);
        barrier_expect(squares, blocks * kStreams * Parts * 4);
    }
    __syncwarp();
}

// A warp's rows of fn: four columns at 4 * lane and four 128 further, of one part.
__device__ __forceinline__ void load_weights(float4 (&weights)[kOutputs][2], const SeamArguments& a,
                                             const SeamPlace& at, int part) {
    const int64_t column = at.stream * at.hidden + at.first + part * kUnit + 4 * at.lane;
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
        const float* row = a.fn + (at.quarter * kOutputs + i) * kStreams * at.hidden + column;
        weights[i][0] = load_constant(row);
        weights[i][1] = load_constant(row + kUnit / 2);
    }
}

// Where a thread finds and leaves two columns, of one new stream: pairs of bf16, those of a part `kUnit / 2` apart.
struct SeamPointers {
    const uint32_t* x;
    const uint32_t* old[kStreams];
    uint32_t* made;
    const float* post;
    const float* comb;
};

__device__ __forceinline__ SeamPointers pointers_of_thread(const SeamArguments& a, const SeamPlace& at) {
    const int64_t row = at.hidden / 2, column = at.first / 2 + threadIdx.x % (kUnit / 2);
    const int64_t begin = at.token * kStreams * row + column;
    SeamPointers p;
    p.x = settled(static_cast<const uint32_t*>(a.x) + at.token * row + column);
#pragma unroll
    for (int s = 0; s < kStreams; ++s) p.old[s] = settled(static_cast<const uint32_t*>(a.streams) + begin + s * row);
    p.made = settled(static_cast<uint32_t*>(a.new_streams) + begin + at.stream * row);
    p.post = settled(a.post + at.token * kStreams + at.stream);
    p.comb = settled(a.comb + at.token * kStreams * kStreams + at.stream);
    return p;
}

// New streams of the block's columns, rounded, to memory and to the other warps.
template <int Parts>
__device__ __forceinline__ void advance(uint32_t* streams, const SeamPointers& p) {
    const float post = *p.post;
    float comb[kStreams];
    uint32_t output[Parts], old[Parts][kStreams];
#pragma unroll
    for (int s = 0; s < kStreams; ++s) comb[s] = p.comb[s * kStreams];
#pragma unroll
    for (int part = 0; part < Parts; ++part) {
        output[part] = p.x[part * kUnit / 2];
#pragma unroll
        for (int s = 0; s < kStreams; ++s) old[part][s] = p.old[s][part * kUnit / 2];
    }
#pragma unroll
    for (int part = 0; part < Parts; ++part) {
        float2 sum = wide(output[part]);
        sum.x *= post;
        sum.y *= post;
#pragma unroll
        for (int s = 0; s < kStreams; ++s) {
            const float2 value = wide(old[part][s]);
            sum.x += comb[s] * value.x;
            sum.y += comb[s] * value.y;
        }
        const uint32_t kept = rounded(sum.x, sum.y);
        p.made[part * kUnit / 2] = kept;
        streams[part * kUnit / 2 + threadIdx.x % (kUnit / 2)] = kept;
    }
}

// A warp's sums over its share of one part: six outputs, then the squares in the first warp of a stream.
__device__ __forceinline__ void multiply(float (&sums)[8], const float4 (&weights)[kOutputs][2],
                                         const uint32_t* streams, const SeamPlace& at) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const uint2 four = *reinterpret_cast<const uint2*>(streams + half * kUnit / 4 + 2 * at.lane);
        const float2 low = wide(four.x), high = wide(four.y);
#pragma unroll
        for (int i = 0; i < kOutputs; ++i) {
            const float4& w = weights[i][half];
            sums[i] += w.x * low.x + w.y * low.y + w.z * high.x + w.w * high.y;
        }
        if (at.quarter == 0) {
            sums[kOutputs] += low.x * low.x + low.y * low.y + high.x * high.x + high.y * high.y;
        }
    }
}

// Adds eight sums over the lanes; lane l is left with number l / 4.
__device__ __forceinline__ float transposed_sum(float (&sums)[8], int lane) {
#pragma unroll
    for (int count = 4, mask = 16; count > 0; count /= 2, mask /= 2) {
        const bool upper = lane & mask;
#pragma unroll
        for (int i = 0; i < count; ++i) {
            const float kept = upper ? sums[i + count] : sums[i];
            const float given = upper ? sums[i] : sums[i + count];
            sums[i] = kept + __shfl_xor_sync(kAll, given, mask);
        }
    }
    float sum = sums[0];
    sum += __shfl_xor_sync(kAll, sum, 2);
    return sum + __shfl_xor_sync(kAll, sum, 1);
}

// Where sums of this block go: those of its streams from warp w to block w of the cluster, a warp's squares from
// lane l to block l.
struct SeamPeers {
    uint32_t mixes, mixes_here, squares, squares_here;
};

template <int Parts>
__device__ __forceinline__ SeamPeers peers_of_thread(SeamShared<Parts>& shared, const SeamPlace& at) {
    const int of_warp = at.warp & (at.blocks - 1), of_lane = at.lane & (at.blocks - 1);
    const int four = 4 * (at.lane % (kRow / 4)), warp = at.warp % (kStreams * Parts);
    SeamPeers to;
    to.mixes = shared_of_block(shared_address(&shared.mixes[at.rank][four]), of_warp);
    to.mixes_here = shared_of_block(shared_address(&shared.mixes_here), of_warp);
    to.squares = shared_of_block(shared_address(&shared.squares[at.rank][warp]), of_lane);
    to.squares_here = shared_of_block(shared_address(&shared.squares_here), of_lane);
    return to;
}

__device__ __forceinline__ void add(float4& sum, const float4& four) {
    sum.x += four.x;
    sum.y += four.y;
    sum.z += four.z;
    sum.w += four.w;
}

// Two parts of a block are added as two blocks with one each would be, so a token has the same bits either way.
template <int Parts>
__device__ __forceinline__ void send_sums(const SeamShared<Parts>& shared, const SeamPlace& at, const SeamPeers& to) {
    if (at.warp >= at.blocks || at.lane >= kSent) return;
    float4 sums[Parts];
#pragma unroll
    for (int part = 0; part < Parts; ++part) {
        sums[part] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int s = 0; s < kStreams; ++s) {
            add(sums[part], *reinterpret_cast<const float4*>(&shared.own[part][s][4 * at.lane]));
        }
        if (part > 0) add(sums[0], sums[part]);
    }
    store_async(to.mixes, sums[0], to.mixes_here);
}

// Lane l's logit of output l, from the sums of all blocks.
template <int Parts>
__device__ __forceinline__ float logit_of_lane(SeamShared<Parts>& shared, const SeamArguments& a, const SeamPlace& at,
                                               float scale, float base) {
    barrier_wait_cluster(shared_address(&shared.mixes_here), 0);
    float sums[kMostBlocks];
#pragma unroll
    for (int r = 0; r < kMostBlocks; ++r) sums[r] = shared.mixes[r][at.lane];
#pragma unroll
    for (int stride = 1; stride < kMostBlocks; stride *= 2) {
#pragma unroll
        for (int r = 0; r < kMostBlocks; r += 2 * stride) sums[r] += sums[r + stride];
    }
    const float squares = __shfl_sync(kAll, sums[0], kMixes) * (at.part / kStreams);
    return sums[0] * rsqrtf(squares + a.rms_eps) * scale + base;
}

// The next block's input, two columns a thread: the streams weighted by the first gates, then RMSNorm.
template <int Parts>
__device__ __forceinline__ void collapse(SeamShared<Parts>& shared, const SeamArguments& a, const SeamPlace& at,
                                         const SeamPeers& to, float logit, uint32_t norm_weight) {
    const float gate = reciprocal(1.0f + expf(-logit));
    if (at.rank == 0 && at.warp == 0 && at.lane / kStreams == 1) {
        a.post_out[at.token * kStreams + at.lane % kStreams] = gate * a.post_multiplier;
    }
    float2 mixed = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int s = 0; s < kStreams; ++s) {
        const float pre = __shfl_sync(kAll, gate, s) + a.pre_eps;
        const float2 value = wide(shared.streams[s][threadIdx.x]);
        mixed.x += pre * value.x;
        mixed.y += pre * value.y;
    }
    mixed = wide(rounded(mixed.x, mixed.y));
    const float squares = warp_sum(mixed.x * mixed.x + mixed.y * mixed.y);
    if (at.lane < at.blocks) store_async(to.squares, squares, to.squares_here);
    barrier_wait_cluster(shared_address(&shared.squares_here), 0);
    float total = 0.0f;
#pragma unroll
    for (int i = at.lane; i < kMostBlocks * kStreams * Parts; i += 32) {
        total += shared.squares[i / (kStreams * Parts)][i % (kStreams * Parts)];
    }
    const float inverse = rsqrtf(warp_sum(total) * at.part + a.norm_eps);
    const float2 weight = wide(norm_weight);
    static_cast<uint32_t*>(a.block_input)[(at.token * at.hidden + at.first) / 2 + threadIdx.x] =
        rounded(mixed.x * inverse * weight.x, mixed.y * inverse * weight.y);
}

// Reciprocals of four numbers in two divisions, the slowest of the steps below.
__device__ __forceinline__ void invert(float (&inverse)[kStreams], const float (&x)[kStreams]) {
#pragma unroll
    for (int i = 0; i < kStreams; i += 2) {
        const float both = reciprocal(x[i] * x[i + 1]);
        inverse[i] = both * x[i + 1];
        inverse[i + 1] = both * x[i];
    }
}

// `ref.mhc.sinkhorn` of the logits in lanes 8 to 23, by one warp whose lanes do the same. The matrix stays; a row
// or column is divided by its sum plus eps in a factor, whose reciprocal is the sum without it plus eps of it.
__device__ __forceinline__ void balance(const SeamArguments& a, const SeamPlace& at, float logit) {
    float highest = fmaxf(logit, __shfl_xor_sync(kAll, logit, 1));
    highest = fmaxf(highest, __shfl_xor_sync(kAll, highest, 2));
    const float power = expf(logit - highest);
    float sum = power + __shfl_xor_sync(kAll, power, 1);
    sum += __shfl_xor_sync(kAll, sum, 2);
    const float share = power * reciprocal(sum) + a.sinkhorn_eps;
    float matrix[kStreams][kStreams];
#pragma unroll
    for (int i = 0; i < kStreams; ++i) {
#pragma unroll
        for (int j = 0; j < kStreams; ++j) {
            matrix[i][j] = __shfl_sync(kAll, share, 2 * kStreams + kStreams * i + j);
        }
    }
    float rows[kStreams] = {1.0f, 1.0f, 1.0f, 1.0f}, columns[kStreams] = {1.0f, 1.0f, 1.0f, 1.0f};
    float row_sums[kStreams] = {1.0f, 1.0f, 1.0f, 1.0f}, column_sums[kStreams] = {1.0f, 1.0f, 1.0f, 1.0f};
    for (int step = 0; step < a.iterations; ++step) {
        if (step > 0) {
#pragma unroll
            for (int i = 0; i < kStreams; ++i) {
                row_sums[i] *= a.sinkhorn_eps;
#pragma unroll
                for (int j = 0; j < kStreams; ++j) row_sums[i] = fmaf(matrix[i][j], columns[j], row_sums[i]);
            }
            invert(rows, row_sums);
        }
#pragma unroll
        for (int j = 0; j < kStreams; ++j) {
            column_sums[j] *= a.sinkhorn_eps;
#pragma unroll
            for (int i = 0; i < kStreams; ++i) column_sums[j] = fmaf(matrix[i][j], rows[i], column_sums[j]);
        }
        invert(columns, column_sums);
    }
    if (at.lane != 0) return;
    float4* out = reinterpret_cast<float4*>(a.comb_out + at.token * kStreams * kStreams);
#pragma unroll
    for (int i = 0; i < kStreams; ++i) {
        out[i] = make_float4(rows[i] * matrix[i][0] * columns[0], rows[i] * matrix[i][1] * columns[1],
                             rows[i] * matrix[i][2] * columns[2], rows[i] * matrix[i][3] * columns[3]);
    }
}

}  // namespace mhc
}  // namespace exl3
