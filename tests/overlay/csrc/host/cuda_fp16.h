// Just enough of CUDA's device functions to compile the codec for the host.
#pragma once

#include <cstdint>

#define __device__
#define __forceinline__ inline

struct __half {
    unsigned short bits;
};

inline __half __ushort_as_half(unsigned short bits) { return {bits}; }
__half __hadd(__half, __half);
__half __hfma(__half, __half, __half);

inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
    const uint64_t bytes = (uint64_t(high) << 32) | low;
    uint32_t out = 0;
    for (int i = 0; i < 4; ++i) {
        out |= uint32_t((bytes >> (8 * ((selector >> (4 * i)) & 7))) & 255) << (8 * i);
    }
    return out;
}

inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
    return uint32_t(((uint64_t(high) << 32) | low) >> (shift & 31));
}

inline uint32_t __dp2a_lo(uint32_t a, uint32_t b, uint32_t c) {
    return c + (a & 0xffff) * (b & 255) + (a >> 16) * ((b >> 8) & 255);
}

inline uint32_t __dp4a(uint32_t a, uint32_t b, uint32_t c) {
    for (int i = 0; i < 4; ++i) c += ((a >> (8 * i)) & 255) * ((b >> (8 * i)) & 255);
    return c;
}
