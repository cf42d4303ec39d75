// The 128-point Hadamard transform of one warp: lane l holds elements 4l..4l+3 in float32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace exl3 {

constexpr float kHadamardScale = 0.08838834764831845f;  // 1 / sqrt(128)
constexpr unsigned kFullWarp = 0xffffffffu;

struct Quad {
    float v[4];
};

__device__ __forceinline__ Quad hadamard4(const Quad& q) {
    const float a = q.v[0] + q.v[1], b = q.v[0] - q.v[1];
    const float c = q.v[2] + q.v[3], d = q.v[2] - q.v[3];
    return {{(a + c) * kHadamardScale, (b + d) * kHadamardScale, (a - c) * kHadamardScale,
             (b - d) * kHadamardScale}};
}

__device__ __forceinline__ Quad hadamard_step(Quad q, int step, int lane) {
    const float sign = (lane & step) ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float other = __shfl_xor_sync(kFullWarp, q.v[i], step);
        q.v[i] = fmaf(q.v[i], sign, other);
    }
    return q;
}

// Natural (Sylvester) order, scaled by 1/sqrt(128): its own inverse.
__device__ __forceinline__ Quad hadamard128(Quad q, int lane) {
    q = hadamard4(q);
#pragma unroll
    for (int step = 1; step < 32; step *= 2) q = hadamard_step(q, step, lane);
    return q;
}

// The same of several, in a loop over the steps: code that runs once takes as long to fetch as to run.
template <int Batch>
__device__ __forceinline__ void hadamard128(Quad (&q)[Batch], int lane) {
#pragma unroll
    for (int i = 0; i < Batch; ++i) q[i] = hadamard4(q[i]);
#pragma unroll 1
    for (int step = 1; step < 32; step *= 2) {
#pragma unroll
        for (int i = 0; i < Batch; ++i) q[i] = hadamard_step(q[i], step, lane);
    }
}

// Power of two that brings a largest magnitude of `bound` to [2^(target-1), 2^target]; 1 for zero.
__device__ __forceinline__ float power_of_two_scale(float bound, int target) {
    if (!(bound > 0.0f) || !(bound < 3.0e38f)) return 1.0f;
    const int exponent = static_cast<int>((__float_as_uint(bound) >> 23) & 255u) - 126;
    const int wanted = max(-120, min(120, target - exponent));
    return __uint_as_float(static_cast<uint32_t>(wanted + 127) << 23);
}

// Four consecutive numbers at element offset `index`, as floats. Types: 0 float, 1 half, 2 bfloat16.
enum class Type : int { kFloat = 0, kHalf = 1, kBFloat16 = 2 };

__device__ __forceinline__ Quad load_quad(const __half* source) {
    const uint2 raw = *reinterpret_cast<const uint2*>(source);
    const float2 a = __half22float2(*reinterpret_cast<const __half2*>(&raw.x));
    const float2 b = __half22float2(*reinterpret_cast<const __half2*>(&raw.y));
    return {{a.x, a.y, b.x, b.y}};
}

// Four consecutive numbers of sixteen bits, half or bfloat16: both conversions and a choice, no branch, so that
// the loads of several calls can be under way at once.
__device__ __forceinline__ Quad load_short_quad(const void* source, bool half, int64_t index) {
    const uint2 raw = *reinterpret_cast<const uint2*>(static_cast<const __half*>(source) + index);
    const float2 a = __half22float2(*reinterpret_cast<const __half2*>(&raw.x));
    const float2 b = __half22float2(*reinterpret_cast<const __half2*>(&raw.y));
    return {{half ? a.x : __uint_as_float(raw.x << 16), half ? a.y : __uint_as_float(raw.x & 0xffff0000u),
             half ? b.x : __uint_as_float(raw.y << 16), half ? b.y : __uint_as_float(raw.y & 0xffff0000u)}};
}

__device__ __forceinline__ Quad load_quad(const void* source, Type type, int64_t index) {
    if (type == Type::kFloat) {
        const float4 f = *reinterpret_cast<const float4*>(static_cast<const float*>(source) + index);
        return {{f.x, f.y, f.z, f.w}};
    }
    return load_short_quad(source, type == Type::kHalf, index);
}

__device__ __forceinline__ void store_quad(void* target, Type type, int64_t index, const Quad& q) {
    if (type == Type::kFloat) {
        *reinterpret_cast<float4*>(static_cast<float*>(target) + index) =
            make_float4(q.v[0], q.v[1], q.v[2], q.v[3]);
    } else if (type == Type::kHalf) {
        __half2 pair[2] = {__floats2half2_rn(q.v[0], q.v[1]), __floats2half2_rn(q.v[2], q.v[3])};
        *reinterpret_cast<uint2*>(static_cast<__half*>(target) + index) =
            *reinterpret_cast<uint2*>(pair);
    } else {
        __nv_bfloat162 pair[2] = {__floats2bfloat162_rn(q.v[0], q.v[1]),
                                  __floats2bfloat162_rn(q.v[2], q.v[3])};
        *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(target) + index) =
            *reinterpret_cast<uint2*>(pair);
    }
}

__device__ __forceinline__ Quad operator*(Quad a, const Quad& b) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a.v[i] *= b.v[i];
    return a;
}

__device__ __forceinline__ Quad operator*(Quad a, float b) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a.v[i] *= b;
    return a;
}

__device__ __forceinline__ Quad operator+(Quad a, const Quad& b) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a.v[i] += b.v[i];
    return a;
}

}  // namespace exl3
