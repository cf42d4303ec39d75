// The machine instructions the kernels use that CUDA C++ has no words for.
#pragma once

#include <cstdint>

namespace exl3 {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void copy_async_16(uint32_t shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(shared), "l"(global));
}

__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;\n"); }

template <int Pending>
__device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(Pending) : "memory");
}

// 16 bytes of global memory that nobody writes meanwhile and this multiprocessor reads once: they leave its cache to
// what is read again. Stays before a later wait, as memory instructions after one stay behind it.
__device__ __forceinline__ uint4 load_once_16(const void* global) {
    uint4 q;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(q.x), "=r"(q.y), "=r"(q.z), "=r"(q.w)
                 : "l"(global));
    return q;
}

// d += a(16x16, row) * b(16x8, column): half inputs, float accumulators.
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                            uint32_t a3, uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// d += a(16x32, row) * b(32x8, column): bytes, unsigned and signed, 32-bit accumulators.
__device__ __forceinline__ void mma_u8_s8(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                          uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same as the first with bfloat16 inputs.
__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;\n" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// Each half of a pair doubled, by a product with one: permutes would load the busier pipe.
__device__ __forceinline__ void double_halves(uint32_t pair, uint32_t& first, uint32_t& second) {
    asm("{.reg .b16 l, h; .reg .b32 a, b, one;\n"
        "mov.b32 {l, h}, %2; mov.b32 a, {l, l}; mov.b32 b, {h, h}; mov.b32 one, 0x3c003c00;\n"
        "mul.rn.f16x2 %0, a, one; mul.rn.f16x2 %1, b, one;}"
        : "=r"(first), "=r"(second)
        : "r"(pair));
}

// Four 8x8 blocks of halves; lane l names row l % 8 of block l / 8 (16 bytes in shared memory).
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared)
                 : "memory");
}

// Bulk copies that complete on a barrier in shared memory; compute capability 9 and later.
__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;\n" ::"r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes)
                 : "memory");
#endif
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile(
        "{.reg .pred done;\n"
        "again_%=: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra again_%=;}\n" ::"r"(barrier), "r"(parity)
        : "memory");
#endif
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];\n" ::"r"(barrier) : "memory");
#endif
}

__device__ __forceinline__ void copy_bulk(uint32_t shared, const void* global, uint32_t bytes,
                                          uint32_t barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(
            shared),
        "l"(global), "r"(bytes), "r"(barrier)
        : "memory");
#endif
}

// Orders the caller's memory operations, and those a barrier ordered before them, as seen by the whole device; less
// than __threadfence, which also puts all fences of the device into one order.
__device__ __forceinline__ void fence_device() { asm volatile("fence.acq_rel.gpu;\n" ::: "memory"); }

// Programmatic dependent launch: no-ops before compute capability 9.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}

__device__ __forceinline__ void allow_next_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}

}  // namespace exl3
