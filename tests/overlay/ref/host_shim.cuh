// Stands in for the CUDA runtime when the peer's device headers are compiled as host C++: the types and
// intrinsics that its decoder uses, each as its documented arithmetic. Test code only.
#pragma once

#include <cstdint>
#include <cstring>

#define __device__
#define __forceinline__ inline
#define USE_ROCM 1

struct half {
    _Float16 value;
};
struct half2 {
    half x, y;
};
using __half = half;
using FragB = half2[2];

inline std::uint16_t bits_of(half h) {
    std::uint16_t bits;
    std::memcpy(&bits, &h, sizeof bits);
    return bits;
}
inline half half_of(std::uint16_t bits) {
    half h;
    std::memcpy(&h, &bits, sizeof bits);
    return h;
}
inline half rounded(double exact) { return {static_cast<_Float16>(exact)}; }

struct half_uint16 {
    half as_half;
    explicit half_uint16(std::uint16_t bits) : as_half(half_of(bits)) {}
};
struct half2_uint32 {
    half2 as_half2;
    explicit half2_uint32(std::uint32_t bits)
        : as_half2{half_of(static_cast<std::uint16_t>(bits)),
                   half_of(static_cast<std::uint16_t>(bits >> 16))} {}
};

inline half __ushort_as_half(std::uint16_t bits) { return half_of(bits); }
inline float __half2float(half h) { return static_cast<float>(h.value); }
inline half __low2half(half2 h) { return h.x; }
inline half __high2half(half2 h) { return h.y; }
inline half2 __half2half2(half h) { return {h, h}; }
inline half2 __halves2half2(half a, half b) { return {a, b}; }
inline half2 __lows2half2(half2 a, half2 b) { return {a.x, b.x}; }
inline half2 __highs2half2(half2 a, half2 b) { return {a.y, b.y}; }
inline half __hadd(half a, half b) {
    return rounded(static_cast<double>(a.value) + static_cast<double>(b.value));
}
inline half2 __hadd2(half2 a, half2 b) { return {__hadd(a.x, b.x), __hadd(a.y, b.y)}; }
inline half __hfma(half a, half b, half c) {
    return rounded(static_cast<double>(a.value) * static_cast<double>(b.value) +
                   static_cast<double>(c.value));
}
inline half2 __hfma2(half2 a, half2 b, half2 c) {
    return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}
inline std::uint32_t __dp4a(std::uint32_t a, std::uint32_t b, std::uint32_t sum) {
    for (int byte = 0; byte < 32; byte += 8) {
        sum += ((a >> byte) & 0xff) * ((b >> byte) & 0xff);
    }
    return sum;
}
inline std::uint32_t __funnelshift_r(std::uint32_t low, std::uint32_t high, int shift) {
    const std::uint64_t joined = (static_cast<std::uint64_t>(high) << 32) | low;
    return static_cast<std::uint32_t>(joined >> (shift & 31));
}
inline std::uint32_t bfe64(std::uint32_t low, std::uint32_t high, int offset, int length) {
    const std::uint64_t joined = (static_cast<std::uint64_t>(high) << 32) | low;
    return static_cast<std::uint32_t>((joined >> offset) & ((1ull << length) - 1));
}
inline std::uint32_t exl3_lop3_6a(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
    return (a & b) ^ c;
}
#define FSHF_IMM(out, low, high, shift) (out) = __funnelshift_r(low, high, shift)
#define BFE16_IMM(out, in, shift) (out) = ((in) >> (shift)) & 0xffff
