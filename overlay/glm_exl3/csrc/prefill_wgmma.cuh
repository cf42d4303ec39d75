// The prefill products on Hopper: 256 output columns (128 gate and 128 up, or two blocks of the down
// projection) times the sorted rows of a tile, one block of four warpgroups on a multiprocessor.
//
// Each warp decodes its own tile of every k step into the A registers of a warpgroup multiply whose B operand,
// the rotated activations, all warpgroups share in swizzled shared memory. While one step multiplies, the
// next is decoded; bulk copies run ahead, and warps free a stage through a barrier of its own.
//
// Wide tiles hold up to 128 rows. Narrow ones, up to 48, are bound by decoding: there 3inst and mcg weights
// are not summed, their two halves take adjacent k slots against activations stored twice.
#pragma once

#include "prefill_ends.cuh"
#include "wgmma.cuh"

namespace exl3 {

constexpr int kPrefillThreads = 512;

// Who frees a stage: every lane, for what it read itself. One lane of each warp behind a barrier of the warp would
// do, but racecheck does not carry the other lanes' reads over that barrier (`kernels.one_lane` builds that).
#ifdef GLM_EXL3_ONE_LANE_FREES
constexpr int kFreeingLanes = 1;
#else
constexpr int kFreeingLanes = 32;
#endif

template <int K, Codebook C, int Inputs, bool Narrow>
struct PrefillProduct {
    static constexpr int kRows = Narrow ? kNarrowRows : kTileRows;
    static constexpr bool kPairs = Narrow && C != Codebook::kMul1;
    static constexpr int kSteps = 8;                     // k tiles a stage
    static constexpr int kWidth = kPairs ? 2 : 1;         // halves per activation
    static constexpr int kInputBlocks = 2 * kWidth;       // 64-half blocks a row has per stage
    static constexpr int kBlockBytes = kRows * 128;
    static constexpr int kTileWords = 8 * K;
    static constexpr int kStepBytes = 8 * kTileWords * 4;
    static constexpr int kWeightBytes = 2 * kSteps * kStepBytes;
    static constexpr int kFreeing = kPrefillThreads / 32 * kFreeingLanes;

    static constexpr int kInputBytes = Inputs * kInputBlocks * kBlockBytes;
    static constexpr int kStageBytes = (kInputBytes + kWeightBytes + 1023) / 1024 * 1024;
    static constexpr int kStages = kStageBytes * 4 <= 224 * 1024 ? 4 : 2;

    // Ring of stages; `turn` counts the stages of all work items so far. Barriers: full, then empty.
    struct Ring {
        uint32_t base, full, empty;
        int turn;

        __device__ __forceinline__ int slot(int s) const { return (turn + s) & (kStages - 1); }
        __device__ __forceinline__ uint32_t parity(int s) const { return (turn + s) / kStages & 1; }
    };

    // What one lane copies of every stage: lane 0 of each warp a line of weights, lane 1 of the first warps
    // a block of an input.
    struct Copy {
        const unsigned char* from;
        int64_t stride;
        int offset, bytes, total;

        __device__ __forceinline__ Copy(const PrefillSource& source, int warp, int lane) {
            constexpr int kBlocks = Inputs * kInputBlocks;
            const int row_bytes = source.row_count * 128;
            total = kBlocks * row_bytes + kWeightBytes;
            if (lane == 0) {
                from = source.weights[warp / kSteps] + (warp % kSteps) * source.weight_row_bytes;
                stride = kSteps * source.weight_row_bytes;
                offset = kInputBytes + warp * kStepBytes;
                bytes = kStepBytes;
            } else {
                const bool mine = lane == 1 && warp < kBlocks;
                from = source.rows[mine ? warp / kInputBlocks : 0] +
                       (warp % kInputBlocks) * source.row_block_bytes;
                stride = kInputBlocks * source.row_block_bytes;
                offset = warp * kBlockBytes;
                bytes = mine ? row_bytes : 0;
            }
        }
    };

    // Copies stage `s` once every warp has left the slot.
    __device__ __forceinline__ static void copy_stage(const Ring& ring, Copy& copy, int s) {
        const int slot = ring.slot(s);
        const uint32_t barrier = ring.full + slot * 8;
        if (ring.turn + s >= kStages) barrier_wait(ring.empty + slot * 8, ring.parity(s) ^ 1);
        if (threadIdx.x == 0) barrier_expect(barrier, copy.total);
        copy_bulk(ring.base + slot * kStageBytes + copy.offset, copy.from, copy.bytes, barrier);
        copy.from += copy.stride;
    }

    // Frees stage `s` as far as this warp goes, behind all its reads.
    __device__ __forceinline__ static void leave_stage(const Ring& ring, int s, int lane) {
        __syncwarp();
        if (lane < kFreeingLanes) barrier_arrive(ring.empty + ring.slot(s) * 8);
    }

    // The lane's eight weights as A registers: of two products, or of one in the first four.
    __device__ __forceinline__ static void decode(const Window& window, uint32_t (&a)[8]) {
        if constexpr (kPairs) {
            uint32_t x[8];
            lane_hashes<C, K>(window, x);
            constexpr int kOrder[8] = {0, 4, 1, 5, 2, 6, 3, 7};
#pragma unroll
            for (int j = 0; j < 8; ++j) a[j] = pair_word(x[kOrder[j]]);
        } else {
            uint32_t whole[4];
            whole_weights<C, K>(window, whole);
#pragma unroll
            for (int j = 0; j < 4; ++j) a[j] = whole[j];
        }
    }

    template <int N>
    __device__ __forceinline__ static void product(float (&acc)[N / 2], const uint32_t (&a)[8],
                                                   uint64_t input, int step) {
        uint32_t first[4] = {a[0], a[1], a[2], a[3]};
        if constexpr (kPairs) {
            uint32_t second[4] = {a[4], a[5], a[6], a[7]};
            const uint64_t operand = input + step / 2 * (kBlockBytes / 16) + step % 2 * 4;
            Wgmma<N>::run(acc, first, operand);
            Wgmma<N>::run(acc, second, operand + 2);
        } else {
            Wgmma<N>::run(acc, first, input + step / 4 * (kBlockBytes / 16) + step % 4 * 2);
        }
    }

    template <int N>
    __device__ __forceinline__ static void multiply(unsigned char* shared, Ring& ring,
                                                    const PrefillSource& source, float (&acc)[N / 2]) {
        const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
        const LaneMap<K> map(lane);
        const int stages = source.k / (16 * kSteps);
        const int block = warp >> 3, input = Inputs == 2 ? block : 0;
        const int weight_offset = kInputBytes + block * kSteps * kStepBytes +
                                  (warp & 7) * kTileWords * 4;
#pragma unroll
        for (int i = 0; i < N / 2; ++i) acc[i] = 0.0f;
        Copy copy(source, warp, lane);
        const bool copies = copy.bytes > 0;
        if (copies) {
            const int ready = min(stages, kStages);
#pragma unroll 1
            for (int s = 0; s < ready; ++s) copy_stage(ring, copy, s);
        }
        __syncwarp();
        uint32_t a[2][8];
#pragma unroll 1
        for (int s = 0; s < stages; ++s) {
            const int slot = ring.slot(s);
            barrier_wait(ring.full + slot * 8, ring.parity(s));
            const uint32_t* weights =
                reinterpret_cast<const uint32_t*>(shared + slot * kStageBytes + weight_offset);
            const uint64_t operand =
                swizzled_operand(uniform(ring.base + slot * kStageBytes + input * kInputBlocks * kBlockBytes));
            Window window = load_window<K>(weights, map);
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                decode(window, a[step & 1]);
                if (step + 1 < kSteps) window = load_window<K>(weights + (step + 1) * (kStepBytes / 4), map);
                wgmma_fence();
                product<N>(acc, a[step & 1], operand, step);
                wgmma_commit();
                wgmma_wait<1>();
                // The products of the stage before are done, so this warp has no use for it any more.
                if (step == 0 && s > 0) leave_stage(ring, s - 1, lane);
                if (step == 4 && s > 0 && copies && s - 1 + kStages < stages) {
                    copy_stage(ring, copy, s - 1 + kStages);
                }
            }
        }
        wgmma_wait<0>();
        leave_stage(ring, stages - 1, lane);
        ring.turn += stages;
        __syncthreads();
    }

    // Columns of 64 rows (half `part` of the tile) to shared memory as [row][256].
    template <int N>
    __device__ __forceinline__ static void spread(float* lines, const float (&acc)[N / 2], int part) {
        const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
        const int column = warp * 16 + (lane >> 2);
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
            if (j / 8 != part) continue;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = (j % 8) * 8 + (lane & 3) * 2 + (i & 1);
                lines[row * kEpilogueStride + column + (i >> 1) * 8] = acc[j * 4 + i];
            }
        }
    }
};

}  // namespace exl3
