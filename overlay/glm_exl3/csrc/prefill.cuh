// Routed experts for many tokens, weight-stationary: what the route, rotation, product and combine
// kernels share.
//
// Rows are token-expert pairs sorted by expert. Everything the host does not know (rows per expert,
// tiles) stays in device memory; the product kernels are persistent and read the tile table.
#pragma once

#include "api.h"
#include "moe_decode.cuh"

namespace exl3 {

constexpr int kTileRows = 128;
constexpr int kStageK = 64;  // columns of an input that lie together
constexpr int kNarrowRows = 48;    // rows of a tile when experts have few
constexpr int kNarrowAverage = 40;  // up to so many rows per expert on average

// Whether the tiles are narrow: known without visiting the device.
constexpr bool has_narrow_tiles(int64_t pairs, int64_t experts) {
    return pairs <= kNarrowAverage * experts;
}

// The same number in a register of the whole warp, so that branches and addresses made from it are uniform.
__device__ __forceinline__ int uniform(int value) {
    return static_cast<int>(__reduce_max_sync(kFullWarp, static_cast<unsigned>(value)));
}

struct Tile {
    int expert, first_row, rows, unused;
};

struct PrefillScratch {
    int tile_rows;          // 128, or 48 for narrow tiles
    int* tile_count;        // [1]
    Tile* tiles;            // [pairs / tile_rows + experts]
    int* row_pair;          // [pairs], pair of each sorted row
    int* row_expert;        // [pairs]
    int* expert_first;      // [experts], first sorted row
    float* row_scale;       // [inputs, pairs], inverse of the rotated row's power of two
    float* down_scale;      // [experts], power of two on the intermediate
    // Inputs of the products, swizzled; twice as wide where narrow tiles meet pairs of halves.
    __half* rotated;        // [inputs, H/64, pairs, 64] or [inputs, H/32, pairs, 64]
    __half* intermediate;   // [I/64, pairs, 64] or [I/32, pairs, 64]
    __nv_bfloat16* routed;  // [pairs, H], by pair
};

inline PrefillScratch carve_prefill(void* workspace, int64_t pairs, int64_t hidden,
                                    int64_t intermediate, int64_t experts, int64_t inputs, bool narrow,
                                    int64_t* total) {
    unsigned char* at = static_cast<unsigned char*>(workspace);
    const auto take = [&at](int64_t bytes) {
        unsigned char* start = at;
        at += (bytes + 1023) / 1024 * 1024;
        return start;
    };
    PrefillScratch s;
    const int64_t width = narrow ? 2 : 1;
    s.tile_rows = narrow ? kNarrowRows : kTileRows;
    s.tile_count = reinterpret_cast<int*>(take(4));
    s.tiles = reinterpret_cast<Tile*>(take((pairs / s.tile_rows + experts) * sizeof(Tile)));
    s.row_pair = reinterpret_cast<int*>(take(pairs * 4));
    s.row_expert = reinterpret_cast<int*>(take(pairs * 4));
    s.expert_first = reinterpret_cast<int*>(take(experts * 4));
    s.row_scale = reinterpret_cast<float*>(take(inputs * pairs * 4));
    s.down_scale = reinterpret_cast<float*>(take(experts * 4));
    s.rotated = reinterpret_cast<__half*>(take(inputs * pairs * hidden * 2 * width));
    s.intermediate = reinterpret_cast<__half*>(take(pairs * intermediate * 2 * width));
    s.routed = reinterpret_cast<__nv_bfloat16*>(take(pairs * hidden * 2));
    *total = at - static_cast<unsigned char*>(workspace);
    return s;
}

// Stores a lane's four columns of one row in the order the matrix unit wants in shared memory: blocks
// of 64 columns, whose 16-byte chunks are permuted by the row's number in its tile. A tile's part of a
// block is then one contiguous copy.
__device__ __forceinline__ void store_swizzled(__half* target, int64_t rows, int64_t row, int in_tile,
                                               int column, const Quad& q) {
    const int chunk = ((column & 63) >> 3) ^ (in_tile & 7);
    const int64_t at = ((column >> 6) * rows + row) * 64 + chunk * 8 + (column & 7);
    store_quad(target, Type::kHalf, at, q);
}

// The same for a lane's eight columns, the first a multiple of eight.
__device__ __forceinline__ void store_swizzled_eight(__half* target, int64_t rows, int64_t row, int in_tile, int column,
                                                     const Quad& low, const Quad& high) {
    __half2 eight[4] = {__floats2half2_rn(low.v[0], low.v[1]), __floats2half2_rn(low.v[2], low.v[3]),
                        __floats2half2_rn(high.v[0], high.v[1]), __floats2half2_rn(high.v[2], high.v[3])};
    const int chunk = ((column & 63) >> 3) ^ (in_tile & 7);
    *reinterpret_cast<uint4*>(target + ((column >> 6) * rows + row) * 64 + chunk * 8) =
        *reinterpret_cast<uint4*>(eight);
}

// The same with every number twice, for weights that come as two halves: within sixteen columns first the
// even ones of the lower eight, then the odd ones, then those of the upper eight.
__device__ __forceinline__ void store_doubled(__half* target, int64_t rows, int64_t row, int in_tile,
                                              int column, const Quad& q) {
    __half* line = target + ((column >> 5) * rows + row) * 64 + (column & 7);
    const int chunk = (column & 31) >> 3 << 1;
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
        __half2 pair[2] = {__float2half2_rn(q.v[odd]), __float2half2_rn(q.v[odd + 2])};
        *reinterpret_cast<uint2*>(line + ((chunk + odd) ^ (in_tile & 7)) * 8) =
            *reinterpret_cast<uint2*>(pair);
    }
}

__device__ __forceinline__ void store_input(__half* target, bool doubled, int64_t rows, int64_t row,
                                            int in_tile, int column, const Quad& q) {
    if (doubled) {
        store_doubled(target, rows, row, in_tile, column, q);
    } else {
        store_swizzled(target, rows, row, in_tile, column, q);
    }
}

// Whether the products with `w` take every activation twice.
__host__ __device__ __forceinline__ bool takes_doubled(const Packed& w, const PrefillScratch& s) {
    return s.tile_rows == kNarrowRows && w.codebook != static_cast<int>(Codebook::kMul1);
}

    // The lane's eight weights of a tile, each rounded as the format says, as the A registers of a product.
    template <Codebook C, int K>
__device__ __forceinline__ void whole_weights(const Window& window, uint32_t (&a)[4]) {
        uint32_t x[8], pair[4];
        lane_hashes<C, K>(window, x);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if constexpr (C == Codebook::kMul1) {
                const uint32_t sums =
                    multiply_add(byte_sum_half(x[2 * j + 1]), 0x10000u, byte_sum_half(x[2 * j]));
                const __half2 value = __hfma2(*reinterpret_cast<const __half2*>(&sums),
                                              __half2half2(__ushort_as_half(0x1eee)),
                                              __half2half2(__ushort_as_half(0xc931)));
                pair[j] = *reinterpret_cast<const uint32_t*>(&value);
            } else {
                const uint32_t even = pair_word(x[2 * j]), odd = pair_word(x[2 * j + 1]);
                const __half2 e = *reinterpret_cast<const __half2*>(&even);
                const __half2 o = *reinterpret_cast<const __half2*>(&odd);
                const __half2 first = __hadd2(__low2half2(e), __high2half2(e));
                const __half2 second = __hadd2(__low2half2(o), __high2half2(o));
                const __half2 value = __lows2half2(first, second);
                pair[j] = *reinterpret_cast<const uint32_t*>(&value);
            }
        }
        a[0] = pair[0];
        a[1] = pair[2];
        a[2] = pair[1];
        a[3] = pair[3];
    }

// Largest intermediate magnitude the scale of the down input allows for: limit squared, or this.
constexpr float kUnlimitedActivation = 4096.0f;

}  // namespace exl3
