// The machine instructions by which the blocks of a cluster meet; compute capability 9 and later, nothing before.
#pragma once

#include "ptx.cuh"

namespace exl3 {

// Makes barriers that this thread set up known to the copies of other blocks, once the cluster has met.
__device__ __forceinline__ void publish_barriers() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
#endif
}

// All threads of the cluster arrive, and those that wait go on when all have; whole warps only. Nothing but
// published barriers is ordered by it.
__device__ __forceinline__ void cluster_arrive() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\n" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;\n" ::: "memory");
#endif
}

// Where block `rank` of the cluster has what lies at `shared` here.
__device__ __forceinline__ uint32_t shared_of_block(uint32_t shared, int rank) {
    uint32_t there = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(there) : "r"(shared), "r"(rank));
#endif
    return there;
}

// Stores into a block's shared memory that count, by their bytes, on a barrier of the same block.
__device__ __forceinline__ void store_async(uint32_t there, float value, uint32_t barrier_there) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];\n" ::"r"(there),
                 "r"(__float_as_uint(value)), "r"(barrier_there)
                 : "memory");
#endif
}

__device__ __forceinline__ void store_async(uint32_t there, float4 value, uint32_t barrier_there) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];\n" ::"r"(
            there),
        "r"(__float_as_uint(value.x)), "r"(__float_as_uint(value.y)), "r"(__float_as_uint(value.z)),
        "r"(__float_as_uint(value.w)), "r"(barrier_there)
        : "memory");
#endif
}

// As `barrier_wait`, for what other blocks of the cluster stored.
__device__ __forceinline__ void barrier_wait_cluster(uint32_t barrier, uint32_t parity) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile(
        "{.reg .pred done;\n"
        "again_%=: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again_%=;}\n" ::"r"(barrier), "r"(parity)
        : "memory");
#endif
}

}  // namespace exl3
