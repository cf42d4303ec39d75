// The weight-streaming product for mul1 on integer matrix instructions, up to eight rows.
//
// A mul1 weight is the sum of the four bytes of its hash, less 510, but for a scale: the hash as it
// is serves as four unsigned bytes in neighbouring k slots against the activation four times, which
// saves adding, converting and packing. Activations are `IntegerRows`: their two planes stand in
// two columns of the product. All sums are exact, so neither order nor neighbours change them; with
// at most 16,384 rows of a matrix they stay within 32 bits.
#pragma once

#include "stream.cuh"

namespace exl3 {

// Weight = (byte sum - kMul1Middle) * kMul1Scale + kMul1Rest.
constexpr int kMul1Middle = 510;
constexpr float kMul1Rest = (1024 + kMul1Middle) * kMul1Scale + kMul1Bias;

// `Products` of eight columns serve four rows each.
template <int K, int Products, int Matrices>
struct IntegerStream : StreamShape<K, 4 * Products, Matrices> {
    using Shape = StreamShape<K, 4 * Products, Matrices>;
    using Shape::kReduceStride, Shape::kTileWords;
    using typename Shape::Copier, typename Shape::Share;
    using Rows = IntegerRows;

    int acc[kTilesPerWarp][Products][4];
    int sums[Products];  // of the lane's elements of its column

    // `activations`: [k tile][rows][32 bytes], `rows` of them, from the warp's first k tile.
    __device__ __forceinline__ void run(const uint32_t* ring, Copier& copier, const __half* activations,
                                        int rows, int stages, int lane) {
        const LaneMap<K> map(lane);
        const uint32_t* column[Products];
#pragma unroll
        for (int n = 0; n < Products; ++n) {
            const int plane = min(n * 8 + (lane >> 2), 2 * rows - 1);
            column[n] = reinterpret_cast<const uint32_t*>(activations) + plane * 4 + (lane & 3);
            sums[n] = 0;
#pragma unroll
            for (int t = 0; t < kTilesPerWarp; ++t)
#pragma unroll
                for (int i = 0; i < 4; ++i) acc[t][n][i] = 0;
        }
        const int tile_words = rows * 8;
        Shape::for_each_step(ring, copier, stages, [&](const uint32_t* tiles) {
            uint32_t b[Products][4];
#pragma unroll
            for (int n = 0; n < Products; ++n) {
                const uint32_t four = *column[n];
                column[n] += tile_words;
                sums[n] = __dp4a(static_cast<int>(four), 0x01010101, sums[n]);
#pragma unroll
                for (int i = 0; i < 4; ++i) b[n][i] = __byte_perm(four, 0u, 0x1111 * i);
            }
#pragma unroll
            for (int t = 0; t < kTilesPerWarp; ++t) {
                uint32_t x[8];
                lane_hashes<Codebook::kMul1, K>(load_window<K>(tiles + t * kTileWords, map), x);
#pragma unroll
                for (int n = 0; n < Products; ++n) {
                    mma_u8_s8(acc[t][n], x[0], x[4], x[1], x[5], b[n][0], b[n][1]);
                    mma_u8_s8(acc[t][n], x[2], x[6], x[3], x[7], b[n][2], b[n][3]);
                }
            }
        });
    }

    // Leaves the sums of all warps in `reduce`; every thread of the block calls it after `run`.
    __device__ __forceinline__ void put(float* reduce, const Share& share, int lane) const {
        Shape::put_slices(reduce, share, [&](float* buffer, auto) { put_slice(buffer, share, lane); });
    }

    // Row n * 4 + lane % 4: its high plane is the even column of the lane's sums, its low one the odd.
    __device__ __forceinline__ void put_slice(float* buffer, const Share& share, int lane) const {
        float* lines = buffer + (lane & 3) * kReduceStride + share.matrix * 128 + share.half * 64 + (lane >> 2);
#pragma unroll
        for (int n = 0; n < Products; ++n) {
            int all = sums[n];
            all += __shfl_xor_sync(kFullWarp, all, 1);
            all += __shfl_xor_sync(kFullWarp, all, 2);
            const int high_sum = __shfl_sync(kFullWarp, all, (lane & 3) * 8);
            const int low_sum = __shfl_sync(kFullWarp, all, (lane & 3) * 8 + 4);
            const float rest = join(high_sum, low_sum) * kMul1Rest;
#pragma unroll
            for (int t = 0; t < kTilesPerWarp; ++t) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int high = acc[t][n][2 * i] - kMul1Middle * high_sum;
                    const int low = acc[t][n][2 * i + 1] - kMul1Middle * low_sum;
                    lines[n * 4 * kReduceStride + t * 16 + i * 8] = fmaf(join(high, low), kMul1Scale, rest);
                }
            }
        }
    }

    __device__ __forceinline__ static float join(int high, int low) {
        return fmaf(static_cast<float>(high), 256.0f, static_cast<float>(low));
    }
};

// The product of one kernel: of integers where `Products` is not 0, else of halves.
template <int K, Codebook C, int NT, int Matrices, int Products>
using StreamOf = std::conditional_t<Products == 0, Stream<K, C, NT, Matrices>, IntegerStream<K, Products, Matrices>>;

}  // namespace exl3
