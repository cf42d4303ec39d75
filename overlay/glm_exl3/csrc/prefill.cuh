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

struct Tile {
    int expert, first_row, rows, unused;
};

struct PrefillScratch {
    int* tile_count;        // [1]
    Tile* tiles;            // [pairs / 128 + experts]
    int* row_pair;          // [pairs], pair of each sorted row
    int* row_expert;        // [pairs]
    int* expert_first;      // [experts], first sorted row
    float* row_scale;       // [inputs, pairs], inverse of the rotated row's power of two
    float* down_scale;      // [experts], power of two on the intermediate
    __half* rotated;        // [inputs, H/64, pairs, 64], swizzled
    __half* intermediate;   // [I/64, pairs, 64], swizzled
    __nv_bfloat16* routed;  // [pairs, H], by pair
};

inline PrefillScratch carve_prefill(void* workspace, int64_t pairs, int64_t hidden,
                                    int64_t intermediate, int64_t experts, int64_t inputs,
                                    int64_t* total) {
    unsigned char* at = static_cast<unsigned char*>(workspace);
    const auto take = [&at](int64_t bytes) {
        unsigned char* start = at;
        at += (bytes + 1023) / 1024 * 1024;
        return start;
    };
    PrefillScratch s;
    s.tile_count = reinterpret_cast<int*>(take(4));
    s.tiles = reinterpret_cast<Tile*>(take((pairs / kTileRows + experts) * sizeof(Tile)));
    s.row_pair = reinterpret_cast<int*>(take(pairs * 4));
    s.row_expert = reinterpret_cast<int*>(take(pairs * 4));
    s.expert_first = reinterpret_cast<int*>(take(experts * 4));
    s.row_scale = reinterpret_cast<float*>(take(inputs * pairs * 4));
    s.down_scale = reinterpret_cast<float*>(take(experts * 4));
    s.rotated = reinterpret_cast<__half*>(take(inputs * pairs * hidden * 2));
    s.intermediate = reinterpret_cast<__half*>(take(pairs * intermediate * 2));
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

// Largest intermediate magnitude the scale of the down input allows for: limit squared, or this.
constexpr float kUnlimitedActivation = 4096.0f;

}  // namespace exl3
