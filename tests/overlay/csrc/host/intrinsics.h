// Device functions that every translation unit of CUDA knows.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "fibers.h"

using std::max;
using std::min;

template <typename To, typename From>
To same_bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

inline float __uint_as_float(uint32_t bits) { return same_bits<float>(bits); }
inline uint32_t __float_as_uint(float value) { return same_bits<uint32_t>(value); }
inline int __float2int_rn(float value) { return static_cast<int>(std::nearbyint(value)); }
#define __expf(x) expf(x)  // the C library has declared a function of this name

inline int __popc(unsigned word) { return __builtin_popcount(word); }

inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
    const uint64_t bytes = (uint64_t(high) << 32) | low;
    uint32_t out = 0;
    for (int i = 0; i < 4; ++i) out |= uint32_t(bytes >> (8 * (selector >> (4 * i) & 7)) & 255) << (8 * i);
    return out;
}

inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
    return uint32_t(((uint64_t(high) << 32) | low) >> (shift & 31));
}

inline uint32_t __dp2a_lo(uint32_t a, uint32_t b, uint32_t c) {
    return c + (a & 0xffff) * (b & 255) + (a >> 16) * ((b >> 8) & 255);
}

template <typename Byte, typename Word>
Word dot_of_bytes(Word a, Word b, Word c) {
    for (int shift = 0; shift < 32; shift += 8) c += Word(Byte(a >> shift)) * Word(Byte(b >> shift));
    return c;
}
inline uint32_t __dp4a(uint32_t a, uint32_t b, uint32_t c) { return dot_of_bytes<uint8_t>(a, b, c); }
inline int __dp4a(int a, int b, int c) { return dot_of_bytes<int8_t>(a, b, c); }

template <typename T>
T __ldg(const T* from) {
    return *from;
}
template <typename T>
T __ldcg(const T* from) {
    return *from;
}

// Threads take turns only where they wait.
template <typename T>
T atomicAdd(T* at, T value) {
    const T before = *at;
    *at = before + value;
    return before;
}
template <typename T>
T atomicMax(T* at, T value) {
    const T before = *at;
    *at = std::max(before, value);
    return before;
}

inline void __syncthreads() { host::meet(host::whole_block); }

namespace host {
template <typename T>
Shown<T> show_all(unsigned mask, const T& mine) {
    if (mask != 0xffffffffu) stop("only whole warps are emulated, not a mask of", mask);
    return show(mine);
}
}  // namespace host

inline void __syncwarp(unsigned mask = 0xffffffffu) { host::show_all(mask, 0); }

template <typename T>
T __shfl_sync(unsigned mask, T value, int lane) {
    return host::show_all(mask, value)[lane & 31];
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int flip) {
    return host::show_all(mask, value)[host::lane() ^ flip];
}
inline unsigned __ballot_sync(unsigned mask, bool vote) {
    const auto votes = host::show_all(mask, vote);
    unsigned all = 0;
    for (int lane = 0; lane < 32; ++lane) all |= unsigned(votes[lane]) << lane;
    return all;
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
    const auto values = host::show_all(mask, value);
    for (int lane = 0; lane < 32; ++lane) value = std::max(value, values[lane]);
    return value;
}
