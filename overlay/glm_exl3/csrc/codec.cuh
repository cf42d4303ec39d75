// The EXL3 codec in registers: ring of bits -> 16-bit states -> half-precision weights.
//
// One 16x16 tile is a ring of 256*K bits stored as 8*K 32-bit words, most significant bit first.
// Lane t of a warp owns elements 8t..8t+7, whose states end at ring bits 8K*t + K*(j+1). `Window`
// holds those 8K bits and the 16-K bits before them, shifted so that the last bit is bit 0.
#pragma once

#include <cstdint>

#include <cuda_fp16.h>

namespace exl3 {

enum class Codebook : int { kInst3 = 0, kMcg = 1, kMul1 = 2 };

constexpr uint32_t kMcgFactor = 0xCBAC1FEDu;
constexpr uint32_t kMul1Factor = 0x83DCD12Du;
constexpr uint32_t kInst3Factor = 89226354u;
constexpr uint32_t kInst3Offset = 64248484u;
constexpr uint32_t kPairMask = 0x8fff8fffu;
constexpr uint32_t kPairXor = 0x3b603b60u;

// mul1 value = (1024 + byte sum) * kMul1Scale + kMul1Bias, both constants exact in half precision.
constexpr float kMul1Scale = 0.006767272949f;  // half 0x1eee
constexpr float kMul1Bias = -10.3828125f;      // half 0xc931

template <Codebook C>
__device__ __forceinline__ uint32_t hash_state(uint32_t state) {
    if constexpr (C == Codebook::kMcg) return state * kMcgFactor;
    if constexpr (C == Codebook::kMul1) return state * kMul1Factor;
    return state * kInst3Factor + kInst3Offset;
}

// (a & b) ^ c and a * b + c with both constants in registers: given two literals the compiler
// splits the first into two instructions and turns the second into shifts on the busier pipe.
__device__ __forceinline__ uint32_t and_xor(uint32_t a, uint32_t b, uint32_t c) {
#ifdef __CUDA_ARCH__
    uint32_t d;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
#else
    return (a & b) ^ c;
#endif
}

__device__ __forceinline__ uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c) {
#ifdef __CUDA_ARCH__
    uint32_t d;
    asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
#else
    return a * b + c;
#endif
}

// 3inst and mcg: two halves whose sum is the weight.
__device__ __forceinline__ uint32_t pair_word(uint32_t hashed) {
    return and_xor(hashed, kPairMask, kPairXor);
}

// mul1: the half-precision number 1024 + (sum of the four bytes), in the low half.
__device__ __forceinline__ uint32_t byte_sum_half(uint32_t hashed) {
    return __dp4a(hashed, 0x01010101u, 0x6400u);
}

// Weight of a hashed state, rounded as the format defines it.
template <Codebook C>
__device__ __forceinline__ __half hashed_weight(uint32_t x) {
    if constexpr (C == Codebook::kMul1) {
        const __half sum = __ushort_as_half(static_cast<unsigned short>(byte_sum_half(x)));
        return __hfma(sum, __ushort_as_half(0x1eee), __ushort_as_half(0xc931));
    } else {
        const uint32_t w = pair_word(x);
        return __hadd(__ushort_as_half(static_cast<unsigned short>(w & 0xffffu)),
                      __ushort_as_half(static_cast<unsigned short>(w >> 16)));
    }
}

template <Codebook C>
__device__ __forceinline__ __half decode_state(uint32_t state) {
    return hashed_weight<C>(hash_state<C>(state));
}

// Which ring words a lane reads and by how much it shifts them; constant over a kernel.
template <int K>
struct LaneMap {
    static_assert(K >= 2 && K <= 6, "the register decoder covers two to six bits");
    static constexpr int kWords = 8 * K;
    static constexpr bool kThree = K >= 5;  // 7K+16 bits may span three words
    static constexpr bool kShift = K != 4;
    int last, middle, first;
    uint32_t shift;

    __device__ __forceinline__ explicit LaneMap(int lane) {
        const int end = 8 * K * (lane + 1);
        last = (end - 1) >> 5;
        middle = last == 0 ? kWords - 1 : last - 1;
        first = middle == 0 ? kWords - 1 : middle - 1;
        shift = static_cast<uint32_t>(-end) & 31u;
    }
};

struct Window {
    uint32_t high, low;
};

template <int K>
__device__ __forceinline__ Window load_window(const uint32_t* tile, const LaneMap<K>& map) {
    Window w;
    const uint32_t low = tile[map.last];
    const uint32_t high = tile[map.middle];
    if constexpr (!LaneMap<K>::kShift) {
        w.low = low;
        w.high = high;
    } else {
        w.low = __funnelshift_r(low, high, map.shift);
        if constexpr (LaneMap<K>::kThree) {
            w.high = __funnelshift_r(high, tile[map.first], map.shift);
        } else {
            w.high = high >> map.shift;
        }
    }
    return w;
}

// The high half of a word. Dot products run on the multiply pipe, permutes on the logic pipe;
// `Dot` says which of the two is to do it, so that callers can balance them.
template <bool Dot>
__device__ __forceinline__ uint32_t high_half(uint32_t word) {
    if constexpr (Dot) return __dp2a_lo(word, 0x0100u, 0u);
    return __byte_perm(word, 0u, 0x4432);
}

// The sixteen bits of `word` that end `Shift` bits above its last one. A left shift compiles to a
// multiply, so the work is one instruction on each pipe, or two multiplies with `Dot`.
template <int Shift, bool Dot>
__device__ __forceinline__ uint32_t sixteen_bits(uint32_t word) {
    static_assert(Shift >= 0 && Shift <= 16, "the sixteen bits lie within the word");
    if constexpr (Shift == 0) return Dot ? __dp2a_lo(word, 0x0001u, 0u) : word & 0xffffu;
    if constexpr (Shift == 8) return __byte_perm(word, 0u, 0x4421);
    if constexpr (Shift == 16) return high_half<Dot>(word);
    return high_half<Dot>(word << (16 - Shift));
}

template <Codebook C, int K, int J>
__device__ __forceinline__ uint32_t lane_state(const Window& w) {
    constexpr int kShift = (7 - J) * K;
    constexpr bool kDot = C != Codebook::kMul1 && J % 2 == 1;
    if constexpr (kShift <= 16) return sixteen_bits<kShift, kDot>(w.low);
    if constexpr (kShift > 16 && kShift <= 32) {
        return sixteen_bits<kShift - 16, kDot>(__funnelshift_r(w.low, w.high, 16));
    }
    if constexpr (kShift > 32) return sixteen_bits<kShift - 32, kDot>(w.high);
}

template <Codebook C, int K, int J>
__device__ __forceinline__ uint32_t lane_hash(const Window& w) {
    return hash_state<C>(lane_state<C, K, J>(w));
}

// Hashes of the lane's eight elements.
template <Codebook C, int K>
__device__ __forceinline__ void lane_hashes(const Window& w, uint32_t (&x)[8]) {
    if constexpr (K == 4) {
        // Windows four bits apart share shifts: each lies on a byte of `w` or of `w` >> 4. A word
        // with the state s_j in its low half has s_{j-4} above it, so its hash is that of s_j plus
        // that of s_{j-4} moved up by sixteen, and the mask is a multiply-add.
        const uint32_t history = w.high & 0xfffu;
        const uint32_t low4 = __funnelshift_r(w.low, history, 4);
        x[0] = hash_state<C>(multiply_add(history, 16u, w.low >> 28));
        x[1] = hash_state<C>(__byte_perm(w.low, history, 0x6643));
        x[2] = hash_state<C>(high_half<C != Codebook::kMul1>(low4));
        x[3] = hash_state<C>(high_half<C != Codebook::kMul1>(w.low));
        x[4] = hash_state<C>(__byte_perm(low4, 0u, 0x4421));
        x[5] = hash_state<C>(__byte_perm(w.low, 0u, 0x4421));
        if constexpr (C == Codebook::kInst3) {
            x[6] = hash_state<C>(low4 & 0xffffu);
            x[7] = hash_state<C>(w.low & 0xffffu);
        } else {
            x[6] = multiply_add(x[2], 0xffff0000u, hash_state<C>(low4));
            x[7] = multiply_add(x[3], 0xffff0000u, hash_state<C>(w.low));
        }
    } else {
        x[0] = lane_hash<C, K, 0>(w);
        x[1] = lane_hash<C, K, 1>(w);
        x[2] = lane_hash<C, K, 2>(w);
        x[3] = lane_hash<C, K, 3>(w);
        x[4] = lane_hash<C, K, 4>(w);
        x[5] = lane_hash<C, K, 5>(w);
        x[6] = lane_hash<C, K, 6>(w);
        x[7] = lane_hash<C, K, 7>(w);
    }
}

}  // namespace exl3
