"""The trellis encoder as one CUDA kernel, with the exact results of `glm_exl3.ref.encode`.

One block encodes one tile, both passes. The cost of state s is best[s >> K] + (table[s] - x)^2, so
only `best`, 65536 >> K floats, has to be kept from step to step; it fits in shared memory, and the
state costs are made anew when they are read. Back-pointers go to global memory (one byte a head and
step). Arithmetic follows the contract of `ref.encode`: fp32, no fused multiply-add, the lowest q
and the lowest state among equals. The kernel is compiled at first use by CuPy (NVRTC), without
other headers. K = 3..8 (K = 2 would need more shared memory than is asked for here).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from glm_exl3.format.layout import TILE_ELEMENTS, Codebook
from glm_exl3.ref.codebook import STATES, codebook_table
from glm_exl3.ref.encode import encode_tiles

THREADS = 1024
KERNEL_BITS = range(3, 9)

SOURCE = r"""
#include <cuda_fp16.h>
#define HEADS (65536 >> K)
#define BRANCHES (1 << K)
#define STEPS 256

__device__ __forceinline__ float step_cost(float best, __half value, float x) {
    float d = __fsub_rn(__half2float(value), x);
    return __fadd_rn(best, __fmul_rn(d, d));
}

__device__ void forward(const float* tile, int shift, const __half* table, float* best, int fixed,
                        unsigned char* pointers, int* final_state) {
    float* now = best;
    float* next = best + HEADS;
    for (int head = threadIdx.x; head < HEADS; head += blockDim.x) {
        bool open = fixed < 0 || (fixed & (HEADS - 1)) == head;
        now[head] = open ? 0.0f : __int_as_float(0x7f800000);
        pointers[head] = fixed >= 0 && open ? fixed >> (16 - K) : 0;
    }
    __syncthreads();
    for (int step = 1; step < STEPS; step++) {
        float x = tile[(step - 1 + shift) & 255];
        for (int head = threadIdx.x; head < HEADS; head += blockDim.x) {
            float least = __int_as_float(0x7f800000);
            int chosen = 0;
            for (int q = 0; q < BRANCHES; q++) {
                int state = q * HEADS + head;
                float cost = step_cost(now[state >> K], table[state], x);
                if (cost < least) { least = cost; chosen = q; }
            }
            next[head] = least;
            pointers[step * HEADS + head] = chosen;
        }
        __syncthreads();
        float* swap = now; now = next; next = swap;
    }
    if (fixed >= 0) return;
    __shared__ unsigned long long lowest;
    if (threadIdx.x == 0) lowest = ~0ull;
    __syncthreads();
    float x = tile[(STEPS - 1 + shift) & 255];
    unsigned long long mine = ~0ull;
    for (int state = threadIdx.x; state < 65536; state += blockDim.x) {
        float cost = step_cost(now[state >> K], table[state], x);
        unsigned long long key = ((unsigned long long)__float_as_uint(cost) << 32) | state;
        if (key < mine) mine = key;
    }
    atomicMin(&lowest, mine);
    __syncthreads();
    *final_state = (int)(lowest & 0xffff);
    __syncthreads();
}

extern "C" __global__ void encode(const float* tiles, const __half* table, unsigned char* scratch,
                                  int* states) {
    extern __shared__ float best[];
    __shared__ int closing;
    const float* tile = tiles + blockIdx.x * 256;
    unsigned char* pointers = scratch + (size_t)blockIdx.x * STEPS * HEADS;
    int last = 0;
    forward(tile, 128, table, best, -1, pointers, &last);
    if (threadIdx.x == 0) {
        int state = last;
        for (int step = STEPS - 1; step > 127; step--) {
            int head = state >> K;
            state = head | (pointers[step * HEADS + head] << (16 - K));
        }
        closing = state;
    }
    __syncthreads();
    int fixed = closing;
    forward(tile, 0, table, best, fixed, pointers, &last);
    if (threadIdx.x == 0) {
        int state = fixed;
        for (int step = STEPS - 1; step >= 0; step--) {
            states[blockIdx.x * 256 + step] = state;
            int head = state >> K;
            state = head | (pointers[step * HEADS + head] << (16 - K));
        }
    }
}
"""


@cache
def _kernel(bits: int) -> Any:
    """The compiled kernel for one K."""
    import cupy

    options = (f"-DK={bits}", "--fmad=false", "-std=c++17")
    kernel = cupy.RawKernel(SOURCE, "encode", options=options)
    kernel.max_dynamic_shared_size_bytes = shared_bytes(bits)
    return kernel


def shared_bytes(bits: int) -> int:
    """Dynamic shared memory of a block: two copies of `best`."""
    return 2 * 4 * (STATES >> bits)


@cache
def _table(codebook: Codebook, device: torch.device) -> torch.Tensor:
    return codebook_table(codebook).to(torch.float16).to(device)


def encode(tiles: torch.Tensor, bits: int, codebook: Codebook) -> torch.Tensor:
    """tiles [..., 256] -> states int32 [..., 256], as `ref.encode.encode_tiles`; CUDA or CPU."""
    if not tiles.is_cuda or bits not in KERNEL_BITS:
        return encode_tiles(tiles, bits, codebook)
    import cupy

    flat = tiles.reshape(-1, TILE_ELEMENTS).float().contiguous()
    states = torch.empty(flat.shape, dtype=torch.int32, device=flat.device)
    scratch = torch.empty(
        (flat.shape[0], TILE_ELEMENTS, STATES >> bits), dtype=torch.uint8, device=flat.device
    )
    arguments = tuple(x.data_ptr() for x in (flat, _table(codebook, flat.device), scratch, states))
    with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
        _kernel(bits)((flat.shape[0],), (THREADS,), arguments, shared_mem=shared_bytes(bits))
    return states.reshape(tiles.shape)


def check(device: torch.device) -> None:
    """Compare the kernel with the reference on random tiles; raises if a state differs."""
    generator = torch.Generator().manual_seed(0)
    for bits in (3, 4, 6):
        tiles = torch.randn(6, TILE_ELEMENTS, generator=generator).to(device)
        for codebook in (Codebook.MCG, Codebook.MUL1):
            if not torch.equal(encode(tiles, bits, codebook), encode_tiles(tiles, bits, codebook)):
                raise RuntimeError(f"the encoding kernel differs from the reference at K={bits}")
