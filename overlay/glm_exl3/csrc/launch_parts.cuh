// Host side of `linear_parts`, for one K and codebook.
#pragma once

#include "launch_decode.cuh"
#include "parts_decode.cuh"

namespace exl3 {

// The cut of k that `launch_linear` makes for up to eight tokens: a part alone and among others has the same bits.
inline Parts cut_alone(const Packed& w, int ring_bytes, int wanted) {
    const int k_blocks = w.k / 128, budget = kLinearBytes - ring_bytes;
    int split = split_for(w.n / 128, k_blocks, wanted);
    while (split < k_blocks && split < widest_split(w.n) &&
           kPartsTokens * ((k_blocks + split - 1) / split) * 256 > budget) {
        ++split;
    }
    return Parts(w.k, split);
}

template <int K, Codebook C>
PartsPlan plan_parts(const LinearPartsArguments& a) {
    PartsPlan p = {};
    p.x = a.x;
    p.out = a.out;
    p.x_type = a.x_type;
    p.out_type = a.out_type;
    p.tokens = a.tokens;
    p.k = a.w[0].k;
    p.count = a.count;
    p.stride = a.stride;
    p.limit = a.limit;
    p.dense = a.dense;
    p.dense_rows = a.dense == nullptr ? 0 : a.dense_rows;
    p.dense_column = a.dense_column;
    unsigned char* at = static_cast<unsigned char*>(a.workspace);
    const auto take = [&at](int64_t bytes) {
        unsigned char* start = at;
        at += aligned(bytes);
        return start;
    };
    int first = (p.dense_rows + kWarps - 1) / kWarps;
    for (int i = 0; i < a.count; ++i) {
        const Packed& w = a.w[i];
        const Parts cut = cut_alone(w, Stream<K, C, 1, 1>::kRingBytes, a.split_k[i]);
        PartsPlan::Part& part = p.part[i];
        part.w = w;
        part.counters = a.counters[i];
        part.scales = reinterpret_cast<float*>(take(a.tokens * widest_split(w.n) * 4));
        part.rotated = reinterpret_cast<__half*>(take(static_cast<int64_t>(a.tokens) * w.k * 2));
        part.sums = reinterpret_cast<float*>(take(static_cast<int64_t>(kPartsTokens) * w.n * cut.count * 4));
        part.column = a.column[i];
        part.first_block = first;
        part.split = cut.count;
        part.k_part = cut.size;
        first += w.n / 128 * cut.count;
    }
    return p;
}

template <int K, Codebook C, int Products>
int launch_parts(const LinearPartsArguments& a, cudaStream_t stream) {
    using Work = StreamOf<K, C, 1, 1, Products>;
    const PartsPlan p = plan_parts<K, C>(a);
    int blocks = p.part[0].first_block, longest = 0, most = 0;
    for (int i = 0; i < p.count; ++i) {
        blocks += p.part[i].w.n / 128 * p.part[i].split;
        longest = std::max(longest, p.part[i].k_part);
        most = std::max(most, p.part[i].split);
    }
    if (a.gated && p.part[0].split != p.part[1].split) return kUnsupported;
    const int bytes = std::max(Work::kRingBytes + p.tokens * longest * 2, Work::kReduceBytes);
    const dim3 grid(blocks);
    if constexpr (Products < 2) {
        if (p.tokens <= kFusedRotation) {
            if (a.gated) return launch(linear_parts<K, C, Products, false, true>, grid, bytes, stream, true, p);
            return launch(linear_parts<K, C, Products, false, false>, grid, bytes, stream, true, p);
        }
    }
    const dim3 cuts(most, p.tokens, p.count);
    if (const int error = launch(rotate_parts<typename Work::Rows>, cuts, 0, stream, false, p)) return error;
    if (a.gated) return launch(linear_parts<K, C, Products, true, true>, grid, bytes, stream, true, p);
    return launch(linear_parts<K, C, Products, true, false>, grid, bytes, stream, true, p);
}

template <int K, Codebook C>
int parts_instance(const LinearPartsArguments& a, cudaStream_t stream) {
    if constexpr (C == Codebook::kMul1) {
        if (by_integers(a.w[0].k)) {
            return a.tokens <= 4 ? launch_parts<K, C, 1>(a, stream) : launch_parts<K, C, 2>(a, stream);
        }
    }
    return launch_parts<K, C, 0>(a, stream);
}

}  // namespace exl3
