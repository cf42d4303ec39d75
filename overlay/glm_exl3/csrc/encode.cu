// Tail-biting Viterbi encoder, bit-equal to the arithmetic contract of `glm_exl3.ref.encode`.
//
// A block keeps the codebook in shared memory and works on as many tiles at once as fill its threads.
// One thread owns eight neighbouring heads of a tile: their predecessors' table entries are one
// 16-byte load and, from three bits on, they share one entry of `best`. Every step's `best` goes to
// global memory; the way back recomputes the few costs it needs, so no back-pointers exist.
#include <algorithm>

#include "api.h"
#include "codec.cuh"

namespace exl3 {
namespace {

constexpr int kEncodeThreads = 512;
constexpr int kElements = 256;
constexpr int kStates = 65536;
constexpr int kTableBytes = kStates * 2;
constexpr float kInfinity = __builtin_huge_valf();

template <int K>
struct Encoder {
    static constexpr int kHeads = kStates >> K;
    static constexpr int kGroups = kHeads / 8;  // threads a tile can use
    static constexpr int kTiles = kGroups < kEncodeThreads ? kEncodeThreads / kGroups : 1;
    static constexpr int kTileThreads = kEncodeThreads / kTiles;
    static constexpr bool kSharedTable = K >= 3;
    static constexpr int kBestBytes = 2 * kTiles * kHeads * 4;
    // One bit: only one buffer of `best` fits; the next one is read back from global memory.
    static constexpr bool kSharedBest = K >= 2;
    static constexpr int kBytes =
        (kSharedTable ? kTableBytes : 0) + (kSharedBest ? kBestBytes : 0);
    static constexpr int64_t kHistory = int64_t(kElements + 1) * kHeads;  // floats a tile
    static constexpr int kTailShift = 16 - K;

    __device__ static float cost(float value, float x, float best) {
        const float d = __fsub_rn(value, x);
        return __fadd_rn(__fmul_rn(d, d), best);
    }

    __device__ static void costs_of(const __half* table, const float* best, int q, int head, float x,
                                    float (&out)[8]) {
        const uint4 raw = *reinterpret_cast<const uint4*>(table + (q << kTailShift) + head);
        const __half2* pairs = reinterpret_cast<const __half2*>(&raw);
        const int from = ((q << kTailShift) + head) >> K;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float2 value = __half22float2(pairs[j]);
            out[2 * j] = cost(value.x, x, best[from + ((2 * j) >> K)]);
            out[2 * j + 1] = cost(value.y, x, best[from + ((2 * j + 1) >> K)]);
        }
    }

    // Fills history[1..256] from history[0]; `rotate` turns the tile by half.
    __device__ static void forward(const __half* table, float* shared_best, float* history,
                                   const float* x, int rotate, int thread) {
        float* read = kSharedBest ? shared_best : history;
        if (kSharedBest) {
            for (int h = thread; h < kHeads; h += kTileThreads) read[h] = history[h];
        }
        __syncthreads();
        for (int step = 0; step < kElements; ++step) {
            const float value = x[(step + rotate) & (kElements - 1)];
            float* next_history = history + int64_t(step + 1) * kHeads;
            float* write = kSharedBest ? shared_best + ((step + 1) & 1) * kTiles * kHeads : next_history;
            for (int group = thread; group < kGroups; group += kTileThreads) {
                float least[8];
#pragma unroll
                for (int j = 0; j < 8; ++j) least[j] = kInfinity;
#pragma unroll 4
                for (int q = 0; q < (1 << K); ++q) {
                    float now[8];
                    costs_of(table, read, q, group * 8, value, now);
#pragma unroll
                    for (int j = 0; j < 8; ++j) least[j] = fminf(least[j], now[j]);
                }
                const float4 a = make_float4(least[0], least[1], least[2], least[3]);
                const float4 b = make_float4(least[4], least[5], least[6], least[7]);
                float4* to = reinterpret_cast<float4*>(next_history + group * 8);
                to[0] = a;
                to[1] = b;
                if (kSharedBest) {
                    reinterpret_cast<float4*>(write + group * 8)[0] = a;
                    reinterpret_cast<float4*>(write + group * 8)[1] = b;
                }
            }
            read = write;
            __syncthreads();
        }
    }

    // The lowest state of least cost[255], from the tile's first thread's point of view in `key`.
    __device__ static void least_end(const __half* table, const float* history, float x,
                                     unsigned long long* key, int thread) {
        const float* best = history + int64_t(kElements - 1) * kHeads;
        unsigned long long mine = ~0ull;
        for (int state = thread; state < kStates; state += kTileThreads) {
            const float c = cost(__half2float(table[state]), x, best[state >> K]);
            const unsigned long long k =
                (static_cast<unsigned long long>(__float_as_uint(c)) << 32) | unsigned(state);
            mine = k < mine ? k : mine;
        }
        atomicMin(key, mine);
        __syncthreads();
    }

    // One warp walks back from `last` at element 255 to element `stop`; returns the state there.
    __device__ static int trace(const __half* table, const float* history, const float* x, int rotate,
                                int last, int stop, int* states, int lane) {
        int state = last;
        if (states != nullptr && lane == 0) states[kElements - 1] = state;
        for (int step = kElements - 1; step > stop; --step) {
            const float value = x[(step - 1 + rotate) & (kElements - 1)];
            const float* best = history + int64_t(step - 1) * kHeads;
            unsigned long long least = ~0ull;
            for (int q = lane; q < (1 << K); q += 32) {
                const int from = (state >> K) | (q << kTailShift);
                const float c = cost(__half2float(table[from]), value, best[from >> K]);
                const unsigned long long k =
                    (static_cast<unsigned long long>(__float_as_uint(c)) << 32) | unsigned(q);
                least = k < least ? k : least;
            }
            for (int offset = 16; offset > 0; offset /= 2) {
                const unsigned long long other = __shfl_xor_sync(0xffffffffu, least, offset);
                least = other < least ? other : least;
            }
            state = (state >> K) | (static_cast<int>(least & 0xffffffffu) << kTailShift);
            if (states != nullptr && lane == 0) states[step - 1] = state;
        }
        return state;
    }
};

template <int K>
__global__ void __launch_bounds__(kEncodeThreads, 1) encode_kernel(const EncodeArguments a) {
    using E = Encoder<K>;
    extern __shared__ __align__(16) unsigned char encode_shared[];
    __shared__ float x[E::kTiles][kElements];
    __shared__ unsigned long long key[E::kTiles];
    __shared__ int closing[E::kTiles];
    const __half* table = static_cast<const __half*>(a.table);
    if (E::kSharedTable) {
        __half* copy = reinterpret_cast<__half*>(encode_shared);
        for (int i = threadIdx.x; i < kStates / 8; i += kEncodeThreads) {
            reinterpret_cast<uint4*>(copy)[i] = static_cast<const uint4*>(a.table)[i];
        }
        table = copy;
    }
    const int slot = threadIdx.x / E::kTileThreads, thread = threadIdx.x % E::kTileThreads;
    const bool walks = thread < 32;
    float* best = reinterpret_cast<float*>(encode_shared + (E::kSharedTable ? kTableBytes : 0)) +
                  slot * E::kHeads;
    float* history = a.workspace + (int64_t(blockIdx.x) * E::kTiles + slot) * E::kHistory;

    for (int64_t first = int64_t(blockIdx.x) * E::kTiles; first < a.tiles;
         first += int64_t(gridDim.x) * E::kTiles) {
        const int64_t tile = min(first + slot, a.tiles - 1);  // spare slots repeat the last tile
        const bool stores = first + slot < a.tiles;
        for (int i = thread; i < kElements; i += E::kTileThreads) x[slot][i] = a.x[tile * kElements + i];
        for (int h = thread; h < E::kHeads; h += E::kTileThreads) history[h] = 0.0f;
        if (thread == 0) key[slot] = ~0ull;
        __syncthreads();
        E::forward(table, best, history, x[slot], kElements / 2, thread);
        E::least_end(table, history, x[slot][kElements / 2 - 1], &key[slot], thread);
        if (walks) {
            const int state = E::trace(table, history, x[slot], kElements / 2,
                                       static_cast<int>(key[slot] & 0xffffffffu), kElements / 2 - 1,
                                       nullptr, thread);
            if (thread == 0) closing[slot] = state;
        }
        __syncthreads();
        const int head = closing[slot] & (E::kHeads - 1);
        for (int h = thread; h < E::kHeads; h += E::kTileThreads) {
            history[h] = h == head ? 0.0f : kInfinity;
        }
        __syncthreads();
        E::forward(table, best, history, x[slot], 0, thread);
        if (walks) {
            E::trace(table, history, x[slot], 0, closing[slot], 0,
                     stores ? a.states + tile * kElements : nullptr, thread);
        }
        __syncthreads();
    }
}

template <int K>
int launch_encode(const EncodeArguments& a, cudaStream_t stream) {
    using E = Encoder<K>;
    const auto kernel = encode_kernel<K>;
    if (const cudaError_t error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, E::kBytes)) {
        return error;
    }
    const int64_t wanted = (a.tiles + E::kTiles - 1) / E::kTiles;
    const int64_t room = a.workspace_floats / (E::kTiles * E::kHistory);
    if (room < 1) return kUnsupported;
    kernel<<<static_cast<unsigned>(std::min(wanted, room)), kEncodeThreads, E::kBytes, stream>>>(a);
    return cudaGetLastError();
}

}  // namespace

int64_t encode_workspace_floats(int64_t tiles, int bits, int blocks) {
    const int heads = kStates >> bits, groups = heads / 8;
    const int64_t each = groups < kEncodeThreads ? kEncodeThreads / groups : 1;
    const int64_t wanted = std::min<int64_t>((tiles + each - 1) / each, blocks);
    return wanted * each * (kElements + 1) * heads;
}

int encode(const EncodeArguments& a, cudaStream_t stream) {
    if (a.tiles == 0) return 0;
    switch (a.bits) {
        case 1: return launch_encode<1>(a, stream);
        case 2: return launch_encode<2>(a, stream);
        case 3: return launch_encode<3>(a, stream);
        case 4: return launch_encode<4>(a, stream);
        case 5: return launch_encode<5>(a, stream);
        case 6: return launch_encode<6>(a, stream);
        case 7: return launch_encode<7>(a, stream);
        case 8: return launch_encode<8>(a, stream);
        default: return kUnsupported;
    }
}

}  // namespace exl3
