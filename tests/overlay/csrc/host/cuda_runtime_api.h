// Stands in for the CUDA runtime when kernels are compiled for the host: a launch runs block after block at once.
//
// Before each block all shared memory is NaN; right behind what the launch asked for it must be so afterwards.
#pragma once

#include <link.h>

#include <map>

#include "intrinsics.h"

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
// One block at a time may have them, and the launch finds them all in one place.
#define __shared__ thread_local

struct alignas(8) uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

using cudaStream_t = void*;
using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0, cudaErrorInvalidValue = 1;

enum cudaDeviceAttr {
    cudaDevAttrComputeCapabilityMajor,
    cudaDevAttrMultiProcessorCount,
    cudaDevAttrMaxSharedMemoryPerMultiprocessor,
    cudaDevAttrMaxSharedMemoryPerBlockOptin,
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization, cudaLaunchAttributePriority };

struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    struct {
        int programmaticStreamSerializationAllowed, priority;
    } val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute* attrs;
    unsigned numAttrs;
};

namespace exl3 {
constexpr int kSharedBytes = 227 * 1024;
inline thread_local unsigned char shared[kSharedBytes] __align__(16);  // what kernels declare `extern`
}  // namespace exl3

namespace host {

constexpr int kGuardBytes = 1024;  // behind what a kernel may write
inline size_t dynamic_bytes = 0;  // of `shared`, that the running kernel may use
inline std::map<const void*, int> allowed_bytes;

// The program's thread-local memory: dynamic and static shared memory of all kernels.
inline int poison_statics(dl_phdr_info* program, size_t, void*) {
    for (int i = 0; i < program->dlpi_phnum; ++i) {
        const auto& segment = program->dlpi_phdr[i];
        if (segment.p_type == PT_TLS) std::memset(program->dlpi_tls_data, 0xff, segment.p_memsz);
    }
    return 1;  // libraries follow
}

inline void run_alone(const std::function<void()>& kernel) {
    dl_iterate_phdr(poison_statics, nullptr);
    run_block(kernel);
    const int end = std::min<int>(dynamic_bytes + kGuardBytes, exl3::kSharedBytes);
    for (int at = dynamic_bytes; at < end; ++at) {
        if (exl3::shared[at] != 0xff) stop("a write to shared memory beyond what the launch asked for, at byte", at);
    }
}

}  // namespace host

inline cudaError_t cudaGetDevice(int* device) { return *device = 0; }

inline cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) {
    *lowest = 0;
    *highest = -5;
    return cudaSuccess;
}

// Those of an H200.
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    switch (attribute) {
        case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
        case cudaDevAttrMultiProcessorCount: *value = 132; break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = exl3::kSharedBytes + 1024; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = exl3::kSharedBytes; break;
    }
    return cudaSuccess;
}

template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute, int bytes) {
    if (bytes > exl3::kSharedBytes) return cudaErrorInvalidValue;
    host::allowed_bytes[reinterpret_cast<const void*>(kernel)] = bytes;
    return cudaSuccess;
}

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const Arguments&... arguments) {
    const auto allowed = host::allowed_bytes.find(reinterpret_cast<const void*>(kernel));
    const size_t most = allowed == host::allowed_bytes.end() ? 48 * 1024 : allowed->second;
    const dim3 grid = config->gridDim;
    if (config->dynamicSmemBytes > most || config->blockDim.x != host::kThreads) return cudaErrorInvalidValue;
    host::dynamic_bytes = config->dynamicSmemBytes;
    gridDim = {grid.x, grid.y, grid.z};
    const unsigned blocks = grid.x * grid.y * grid.z;
    for (unsigned i = 0; i < blocks; ++i) {
        const unsigned at = host::backwards ? blocks - 1 - i : i;
        blockIdx = {at % grid.x, at / grid.x % grid.y, at / grid.x / grid.y};
        host::run_alone([&] { kernel(arguments...); });
    }
    return cudaSuccess;
}
