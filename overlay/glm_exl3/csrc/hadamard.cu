// out = had128(x * pre) * post over the last dimension, one warp for each 128 elements.
#include "api.h"
#include "hadamard.cuh"

namespace exl3 {
namespace {

__global__ void __launch_bounds__(256) hadamard_kernel(const HadamardArguments a) {
    const int lane = threadIdx.x & 31;
    const int64_t block = static_cast<int64_t>(blockIdx.x) * 8 + (threadIdx.x >> 5);
    const int64_t at = block * 128 + lane * 4;
    if (at >= a.rows * a.width) return;
    const int column = static_cast<int>(at % a.width);
    Quad q = load_quad(a.x, static_cast<Type>(a.x_type), at);
    if (a.pre != nullptr) q = q * load_quad(static_cast<const __half*>(a.pre) + column);
    q = hadamard128(q, lane);
    if (a.post != nullptr) q = q * load_quad(static_cast<const __half*>(a.post) + column);
    store_quad(a.out, static_cast<Type>(a.out_type), at, q);
}

}  // namespace

int hadamard(const HadamardArguments& a, cudaStream_t stream) {
    if (a.width % 128 != 0) return kUnsupported;
    const int64_t blocks = a.rows * a.width / 128;
    if (blocks == 0) return 0;
    hadamard_kernel<<<static_cast<unsigned>((blocks + 7) / 8), 256, 0, stream>>>(a);
    return cudaGetLastError();
}

}  // namespace exl3
