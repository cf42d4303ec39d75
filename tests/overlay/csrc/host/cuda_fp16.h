// Numbers of IEEE half precision on the host.
#pragma once

#include <cuda_runtime_api.h>

struct __half {
    unsigned short bits;
};
struct alignas(4) __half2 {
    __half x, y;
};

inline __half __ushort_as_half(unsigned short bits) { return {bits}; }

inline float __half2float(__half h) {
    const uint32_t magnitude = uint32_t(h.bits & 0x7fff) << 13;
    const bool finite = (h.bits & 0x7c00) != 0x7c00;
    const float value = finite ? __uint_as_float(magnitude) * 0x1p112f : __uint_as_float(magnitude | 0x7f800000u);
    return std::copysign(value, h.bits & 0x8000 ? -1.0f : 1.0f);
}

inline __half __float2half_rn(float value) {
    const float magnitude = std::fabs(value);
    const uint32_t bits = __float_as_uint(magnitude);
    uint32_t half;
    if (std::isnan(value)) return {0x7fff};
    if (magnitude >= 65520.0f) {
        half = 0x7c00;
    } else if (magnitude < 0x1p-14f) {
        half = static_cast<uint32_t>(std::nearbyint(magnitude * 0x1p24f));
    } else {
        half = ((bits + 0xfff + (bits >> 13 & 1)) >> 13) - (112 << 10);
    }
    return {static_cast<unsigned short>(half | (std::signbit(value) ? 0x8000 : 0))};
}

inline float2 __half22float2(__half2 h) { return {__half2float(h.x), __half2float(h.y)}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline __half2 __float2half2_rn(float value) { return __floats2half2_rn(value, value); }

// The product of two halves is a float.
inline __half __hmul(__half a, __half b) { return __float2half_rn(__half2float(a) * __half2float(b)); }
inline __half2 __hmul2(__half2 a, __half2 b) { return {__hmul(a.x, b.x), __hmul(a.y, b.y)}; }

// Of the codec's weights, which no kernel under test computes.
__half __hadd(__half, __half);
__half __hfma(__half, __half, __half);
