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
    float* row_scale;       // [inputs, pairs], inverse of the rotated row's power of two
    float* down_scale;      // [experts], power of two on the intermediate
    __half* rotated;        // [inputs, pairs, H]
    __half* intermediate;   // [pairs, I]
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
    s.row_scale = reinterpret_cast<float*>(take(inputs * pairs * 4));
    s.down_scale = reinterpret_cast<float*>(take(experts * 4));
    s.rotated = reinterpret_cast<__half*>(take(inputs * pairs * hidden * 2));
    s.intermediate = reinterpret_cast<__half*>(take(pairs * intermediate * 2));
    s.routed = reinterpret_cast<__nv_bfloat16*>(take(pairs * hidden * 2));
    *total = at - static_cast<unsigned char*>(workspace);
    return s;
}

// Largest intermediate magnitude the scale of the down input allows for: limit squared, or this.
constexpr float kUnlimitedActivation = 4096.0f;

}  // namespace exl3
