// The mHC seam: a cluster of blocks per token, each with 256 or 512 columns of all streams. Nothing here is wide:
// the time is a chain of latencies, so fn lies in registers before the input is there, sums travel between blocks
// as stores that count on the receiver's barrier, and every block adds them up for itself in the same order.
#include "launch_decode.cuh"
#include "seam.cuh"

namespace exl3 {
namespace mhc {

constexpr int kSpreadTokens = 5;  // up to so many 16 blocks a token are faster than 8

// No block may end while another stores into its shared memory: the warps that stay wait for all such stores.
template <int Parts>
__global__ void __launch_bounds__(kSeamThreads, 1) mhc_seam_kernel(const SeamArguments a) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    constexpr int kCollapsing = kStreams * Parts;  // warps
    static_assert(Parts <= kMostParts && kCollapsing < kSeamWarps);
    __shared__ SeamShared<Parts> shared;
    const SeamPlace at = place_of_thread<Parts>(a);
    prepare(shared, at.blocks);
    cluster_arrive();
    float4 weights[kOutputs][2];
    load_weights(weights, a, at, 0);
    const float scale = at.lane < kMixes ? __ldg(a.scale + min(at.lane / kStreams, 2)) : 0.0f;
    const float base = at.lane < kMixes ? __ldg(a.base + at.lane) : 0.0f;
    const bool collapsing = at.warp < kCollapsing;
    const uint32_t* norm = static_cast<const uint32_t*>(a.norm_weight) + at.first / 2 + threadIdx.x;
    const uint32_t norm_weight = collapsing ? __ldg(norm) : 0u;
    const SeamPointers pointers = pointers_of_thread(a, at);
    const SeamPeers peers = peers_of_thread(shared, at);
    allow_next_kernel();
    cluster_wait();
    wait_for_previous_kernel();
    advance<Parts>(shared.streams[at.stream], pointers);
    __syncthreads();
    const int number = at.lane / 4;
#pragma unroll
    for (int part = 0; part < Parts; ++part) {
        if (part > 0) load_weights(weights, a, at, part);
        float sums[8] = {};
        multiply(sums, weights, &shared.streams[at.stream][part * kUnit / 2], at);
        const float sum = transposed_sum(sums, at.lane);
        float* own = shared.own[part][at.stream];
        if (at.lane % 4 == 0 && number < kOutputs) own[at.quarter * kOutputs + number] = sum;
        if (at.lane == 4 * kOutputs && at.quarter == 0) own[kMixes] = sum;
    }
    __syncthreads();
    send_sums(shared, at, peers);
    __syncwarp();
    if (collapsing) {
        collapse(shared, a, at, peers, logit_of_lane(shared, a, at, scale, base), norm_weight);
    } else if (at.rank == 0 && at.warp == kSeamWarps - 1) {
        balance(a, at, logit_of_lane(shared, a, at, scale, base));
    }
#endif
}

template <int Parts>
int launch_seam(const SeamArguments& a, int blocks, cudaStream_t stream) {
    const auto kernel = mhc_seam_kernel<Parts>;
    if (blocks > kPortableBlocks) {
        const int error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
        if (error != 0) return error;
    }
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = blocks;
    attributes[0].val.clusterDim.y = 1;
    attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks, a.tokens);
    config.blockDim = dim3(kSeamThreads);
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = knob("GLM_EXL3_EARLY_LAUNCH", true) ? 2 : 1;
    return cudaLaunchKernelEx(&config, kernel, a);
}

// Clusters of 16 exist on datacentre chips only, and with more tokens two of them no longer run side by side.
int most_blocks(int wanted, int tokens) {
    const int major = device_attribute(cudaDevAttrComputeCapabilityMajor);
    const int most = major < 9 ? 0 : major <= 10 ? kMostBlocks : kPortableBlocks;
    if (wanted > 0) return std::min(wanted, most);
    return tokens <= kSpreadTokens ? most : std::min(most, kPortableBlocks);
}

}  // namespace mhc

int seam(const SeamArguments& a, cudaStream_t stream) {
    using namespace mhc;
    const int units = a.hidden / kUnit, blocks = std::min(units, most_blocks(a.blocks, a.tokens));
    if (blocks < 1 || a.hidden % kUnit != 0 || units > kMostBlocks || (units & (units - 1)) != 0 || a.tokens > 65535) {
        return kUnsupported;
    }
    if (a.tokens == 0) return 0;
    if (blocks == units) return launch_seam<1>(a, blocks, stream);
    return 2 * blocks == units ? launch_seam<2>(a, blocks, stream) : kUnsupported;
}

}  // namespace exl3
