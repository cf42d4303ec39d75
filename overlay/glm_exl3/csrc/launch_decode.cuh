// Host side of the decode kernels: shapes to grids, for one K and codebook.
#pragma once

#include <algorithm>
#include <cstdlib>

#include "linear_decode.cuh"
#include "moe_decode.cuh"
#include "rotate_decode.cuh"

namespace exl3 {

constexpr int kBlocksPerLaunch = 528;  // four blocks on each of 132 multiprocessors
constexpr int kLinearBytes = 64 * 1024;  // with which three fit; twice it for groups of 16 and 32
constexpr int kEnoughBlocks = 3 * kBlocksPerLaunch;
constexpr int kFusedRotation = 2;  // up to so many tokens every block rotates for itself
constexpr int kBlockBytes = 54 * 1024;  // shared memory with which four blocks fit there

inline int64_t aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// How many ways to cut k: as often as possible if the column blocks are few, else up to four times,
// until the last, partly filled round of blocks weighs little.
inline int split_for(int blocks, int k_blocks, int wanted) {
    const int most = std::min(k_blocks, widest_split(blocks * 128));
    if (wanted > 0) return std::min(wanted, most);
    if (blocks * 8 <= kBlocksPerLaunch) return most;
    int split = 1;
    while (split < 4 && split * 2 <= most && blocks * split < kEnoughBlocks) split *= 2;
    return split;
}

// Raises the dynamic shared memory limit once per kernel and device.
template <typename Kernel>
int allow_shared(Kernel kernel, int bytes) {
    if (bytes <= 32 * 1024) return 0;  // the default limit, less static shared memory
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

// Of the current device: processes may serve several kinds.
inline int device_attribute(cudaDeviceAttr attribute) {
    int device = 0, value = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&value, attribute, device);
    return value;
}

inline bool supports_dependent_launch() {
    return device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9;
}

// Whether a knob of `glm_exl3.envs` is 1, not 0; read at every launch, so once per captured graph.
inline bool knob(const char* name, bool unless_set) {
    const char* value = std::getenv(name);
    return value == nullptr || (*value != '0' && *value != '1') ? unless_set : *value == '1';
}

// Shared memory of a small grid's block: so much that no multiprocessor takes more blocks than an even spread gives
// it, also where another stream's kernels fill most of them.
inline int spread_bytes(int bytes, dim3 grid) {
    const int blocks = static_cast<int>(grid.x * grid.y * grid.z);
    const int each = (blocks - 1) / device_attribute(cudaDevAttrMultiProcessorCount) + 1;
    if (each > 3) return bytes;
    const int whole = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    return std::max(bytes, (whole / (each + 1) + 127) / 128 * 128);
}

// The number of the highest priority of streams, which are the lowest numbers.
inline int highest_priority() {
    int lowest = 0, highest = 0;
    cudaDeviceGetStreamPriorityRange(&lowest, &highest);
    return highest;
}

// `urgent`: its blocks come before those of other streams' kernels that wait for a multiprocessor as well.
template <typename... Parameters, typename... Arguments>
int launch_as(bool urgent, void (*kernel)(Parameters...), dim3 grid, int bytes, cudaStream_t stream, bool dependent,
              Arguments... arguments) {
    if (const int error = allow_shared(kernel, bytes)) return error;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    cudaLaunchAttribute attributes[2] = {};
    config.attrs = attributes;
    if (dependent && supports_dependent_launch() && knob("GLM_EXL3_EARLY_LAUNCH", true)) {
        cudaLaunchAttribute& early = attributes[config.numAttrs++];
        early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        early.val.programmaticStreamSerializationAllowed = 1;
    }
    if (urgent) {
        cudaLaunchAttribute& first = attributes[config.numAttrs++];
        first.id = cudaLaunchAttributePriority;
        first.val.priority = highest_priority();
    }
    return cudaLaunchKernelEx(&config, kernel, arguments...);
}

template <typename... Parameters, typename... Arguments>
int launch(void (*kernel)(Parameters...), dim3 grid, int bytes, cudaStream_t stream, bool dependent,
           Arguments... arguments) {
    return launch_as(false, kernel, grid, bytes, stream, dependent, arguments...);
}

// Whether a block may have the shared memory that groups of 16 and 32 tokens take.
inline bool has_wide_shared() {
    return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) >= 2 * kLinearBytes;
}

inline DecodeScratch carve(const MoeArguments& a) {
    const int64_t pairs = static_cast<int64_t>(a.tokens) * a.top_k;
    const int64_t hidden = a.w13.k, intermediate = a.w13.n;
    unsigned char* at = static_cast<unsigned char*>(a.workspace);
    const auto take = [&at](int64_t bytes) {
        unsigned char* start = at;
        at += aligned(bytes);
        return start;
    };
    DecodeScratch s = {};
    s.gate_counters = a.counters;
    s.down_counters = a.counters + pairs * (intermediate / 128);
    s.intermediate_scale = reinterpret_cast<float*>(take(pairs * (intermediate / 128) * 4));
    s.intermediate = reinterpret_cast<__half*>(take(pairs * intermediate * 2));
    const int split = moe_split(a.tokens, a.w13.n, a.split_k);
    s.down_parts = reinterpret_cast<float*>(take(pairs * hidden * split * 4));
    const int64_t lines = pairs * (a.same_suh ? 1 : 2);
    s.rotated = reinterpret_cast<__half*>(take(lines * hidden * 2));
    s.rotated_scale = reinterpret_cast<float*>(take(lines * split * 4));
    s.gate_parts = reinterpret_cast<float*>(at);
    return s;
}

// As many rows of `row_bytes` as leave room for four blocks on a multiprocessor, one to `most`.
inline int row_cap(int most, int tokens, int ring_bytes, int row_bytes) {
    return std::max(1, std::min({most, tokens, (kBlockBytes - ring_bytes) / row_bytes}));
}

// k cut into parts of whole 128-blocks, all but the last equal.
struct Parts {
    int count, size;
    Parts(int k, int wanted) {
        const int blocks = k / 128, each = (blocks + wanted - 1) / wanted;
        size = each * 128;
        count = (blocks + each - 1) / each;
    }
};

// Whether a mul1 matrix of k rows is to be multiplied as integers, and may be: sums stay within 32 bits.
constexpr int kMostIntegerRows = 16384;
inline bool by_integers(int k) {
    // Measured there: H200.
    const bool measured = device_attribute(cudaDevAttrComputeCapabilityMajor) == 9;
    return k <= kMostIntegerRows && knob("GLM_EXL3_INTEGER_PRODUCTS", measured);
}

template <int K, Codebook C, int Products>
int launch_gate_up(const MoeArguments& a, cudaStream_t stream) {
    using Work = StreamOf<K, C, 1, 2, Products>;
    const int split = moe_split(a.tokens, a.w13.n, a.split_k);
    const Parts parts(a.w13.k, split);
    const int row_bytes = parts.size * 2 * (a.same_suh ? 1 : 2);
    const int cap = row_cap(Work::kRows, a.tokens, Work::kRingBytes, row_bytes);
    const dim3 grid(a.w13.n / 128, a.tokens * a.top_k, parts.count);
    const int bytes = spread_bytes(std::max(Work::kRingBytes + cap * row_bytes, Work::kReduceBytes), grid);
    const DecodeScratch scratch = carve(a);
    const dim3 lines(a.tokens * a.top_k, a.same_suh ? 1 : 2, parts.count);
    if (const int error =
            launch_as(true, moe_rotate<typename Work::Rows>, lines, 0, stream, true, a, scratch, parts.size)) {
        return error;
    }
    return launch_as(true, moe_gate_up<K, C, Products>, grid, bytes, stream, true, a, scratch, parts.count,
                  parts.size, cap);
}

template <int K, Codebook C, int Products>
int launch_down(const MoeArguments& a, cudaStream_t stream) {
    using Work = StreamOf<K, C, 1, 1, Products>;
    const Parts parts(a.w2.k, moe_split(a.tokens, a.w13.n, a.split_k));
    const int row_bytes = parts.size * 2;
    const int cap = row_cap(Work::kRows, a.tokens, Work::kRingBytes, row_bytes);
    const dim3 grid(a.w2.n / 128, a.tokens * a.top_k, parts.count);
    const int bytes = spread_bytes(std::max(Work::kRingBytes + cap * row_bytes, Work::kReduceBytes), grid);
    return launch_as(true, moe_down<K, C, Products>, grid, bytes, stream, true, a, carve(a), parts.count, parts.size,
                     cap);
}

template <int K, Codebook C, int NT, int Products>
int launch_linear(const LinearArguments& a, cudaStream_t stream) {
    using Work = StreamOf<K, C, NT, 1, Products>;
    const int groups = (a.tokens + Work::kRows - 1) / Work::kRows;
    const int rows = std::min(Work::kRows, a.tokens);
    const int blocks = a.w.n / 128, k_blocks = a.w.k / 128;
    int split = split_for(blocks, k_blocks, a.split_k);
    // Keep a full group's activations within a block's share of shared memory; by shape alone, so
    // that a token's bits do not depend on its neighbours.
    const int budget = kLinearBytes * (NT == 1 ? 1 : 2) - Work::kRingBytes;
    while (split < k_blocks && split < widest_split(a.w.n) &&
           8 * NT * ((k_blocks + split - 1) / split) * 256 > budget) {
        ++split;
    }
    const Parts parts(a.w.k, split);
    const int bytes = std::max(Work::kRingBytes + rows * parts.size * 2, Work::kReduceBytes);
    unsigned char* at = static_cast<unsigned char*>(a.workspace);
    LinearScratch s;
    s.counters = a.counters;
    s.scales = reinterpret_cast<float*>(at);
    at += aligned(a.tokens * widest_split(a.w.n) * 4);
    s.rotated = reinterpret_cast<__half*>(at);
    at += aligned(static_cast<int64_t>(a.tokens) * a.w.k * 2);
    s.parts = reinterpret_cast<float*>(at);
    const dim3 grid(blocks, groups, parts.count);
    if constexpr (Work::kRows <= 8 && Products < 2) {
        if (a.tokens <= kFusedRotation) {
            return launch(linear_few_tokens<K, C, NT, Products, false>, grid, bytes, stream, true, a, s, parts.count,
                          parts.size);
        }
    }
    if (const int error = launch(rotate_tokens<typename Work::Rows>, dim3(parts.count, a.tokens), 0, stream,
                                 false, a, s, Work::kRows, parts.size)) {
        return error;
    }
    return launch(linear_few_tokens<K, C, NT, Products, true>, grid, bytes, stream, true, a, s, parts.count,
                  parts.size);
}

}  // namespace exl3
