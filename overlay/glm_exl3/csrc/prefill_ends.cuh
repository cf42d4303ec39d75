// What surrounds the prefill products: where a work item reads and what becomes of its sums.
#pragma once

#include "prefill.cuh"

namespace exl3 {

constexpr int kRowBlockBytes = 2 * kStageK;
constexpr int kEpilogueStride = 260;  // words; twice it is 8 mod 32 banks
constexpr int kEpilogueBytes = 64 * kEpilogueStride * 4;

// Where one work item reads: two column blocks of weights, `row_count` rows of one or two inputs.
struct PrefillSource {
    const unsigned char* weights[2];
    const unsigned char* rows[2];
    int64_t weight_row_bytes, row_block_bytes;
    int k, row_count;
};

// The part of a source both products share; returns the bytes of one packed matrix.
template <typename Product>
__device__ __forceinline__ int64_t common_source(PrefillSource& source, const Packed& w, const Tile& tile,
                                                 int64_t pairs) {
    source.k = w.k;
    source.row_count = tile.rows;
    source.row_block_bytes = pairs * kRowBlockBytes;
    source.weight_row_bytes = static_cast<int64_t>(w.n / 16) * Product::kTileWords * 4;
    return w.k / 16 * source.weight_row_bytes;
}

// Gate and up: had128, svh, clamped SwiGLU, the down projection's suh and had128, stored as half.
struct GateUpEnd {
    // Where item (tile, block) reads.
    __device__ __forceinline__ static int blocks(const MoeArguments& a) { return a.w13.n / 128; }

    template <typename Product>
    __device__ __forceinline__ static void sources(PrefillSource& source, const MoeArguments& a,
                                                   const PrefillScratch& s, const Tile& tile, int block,
                                                   int64_t pairs, int inputs) {
        const int64_t matrix_bytes = common_source<Product>(source, a.w13, tile, pairs);
        source.weights[0] = reinterpret_cast<const unsigned char*>(a.w13.trellis) +
                            tile.expert * 2 * matrix_bytes + block * Product::kStepBytes;
        source.weights[1] = source.weights[0] + matrix_bytes;
        source.rows[0] = reinterpret_cast<const unsigned char*>(s.rotated) +
                         static_cast<int64_t>(tile.first_row) * kRowBlockBytes;
        source.rows[1] = source.rows[0] + (inputs - 1) * pairs * a.w13.k * 2 * Product::kWidth;
    }

    __device__ __forceinline__ static void row(const MoeArguments& a, const PrefillScratch& s,
                                               const Tile& tile, int block, int row, int64_t pairs,
                                               const float* line, int lane) {
        const int64_t at = tile.first_row + row;
        const int column = block * 128 + lane * 4;
        const __half* svh = static_cast<const __half*>(a.w13.svh) +
                            static_cast<int64_t>(tile.expert) * 2 * a.w13.n + column;
        const __half* suh = static_cast<const __half*>(a.w2.suh) +
                            static_cast<int64_t>(tile.expert) * a.w2.k + column;
        const float gate_scale = s.row_scale[at];
        const float up_scale = a.same_suh ? gate_scale : s.row_scale[pairs + at];
        Quad gate = load_quad(line, Type::kFloat, lane * 4) * gate_scale;
        Quad up = load_quad(line, Type::kFloat, 128 + lane * 4) * up_scale;
        gate = hadamard128(gate, lane) * load_quad(svh);
        up = hadamard128(up, lane) * load_quad(svh + a.w13.n);
        Quad h;
#pragma unroll
        for (int i = 0; i < 4; ++i) h.v[i] = clamped_swiglu(gate.v[i], up.v[i], a.limit);
        h = hadamard128(h * load_quad(suh) * s.down_scale[tile.expert], lane);
        store_input(s.intermediate, takes_doubled(a.w2, s), pairs, at, row, column, h);
    }
};

// Down: had128, svh, routing weight, stored by pair for the combination.
struct DownEnd {
    __device__ __forceinline__ static int blocks(const MoeArguments& a) { return (a.w2.n + 255) / 256; }

    template <typename Product>
    __device__ __forceinline__ static void sources(PrefillSource& source, const MoeArguments& a,
                                                   const PrefillScratch& s, const Tile& tile, int block,
                                                   int64_t pairs, int) {
        const int64_t matrix_bytes = common_source<Product>(source, a.w2, tile, pairs);
        source.weights[0] = reinterpret_cast<const unsigned char*>(a.w2.trellis) +
                            tile.expert * matrix_bytes + 2 * block * Product::kStepBytes;
        const bool odd = 2 * block + 1 == a.w2.n / 128;  // a last lone block is read twice
        source.weights[1] = source.weights[0] + (odd ? 0 : Product::kStepBytes);
        source.rows[0] = source.rows[1] = reinterpret_cast<const unsigned char*>(s.intermediate) +
                                          static_cast<int64_t>(tile.first_row) * kRowBlockBytes;
    }

    __device__ __forceinline__ static void row(const MoeArguments& a, const PrefillScratch& s,
                                               const Tile& tile, int block, int row, int64_t,
                                               const float* line, int lane) {
        const int pair = s.row_pair[tile.first_row + row];
        const float scale = a.topk_weights[pair] / s.down_scale[tile.expert];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int column = (block * 2 + half) * 128 + lane * 4;
            if (column >= a.w2.n) return;
            const __half* svh = static_cast<const __half*>(a.w2.svh) +
                                static_cast<int64_t>(tile.expert) * a.w2.n + column;
            const Quad q = hadamard128(load_quad(line, Type::kFloat, half * 128 + lane * 4), lane);
            store_quad(s.routed, Type::kBFloat16, static_cast<int64_t>(pair) * a.w2.n + column,
                       q * load_quad(svh) * scale);
        }
    }
};

}  // namespace exl3
