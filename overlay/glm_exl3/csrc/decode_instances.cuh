// One (K, codebook) of the decode kernels; each translation unit decode_k*_*.cu names one.
#pragma once

#include "launch_decode.cuh"

namespace exl3 {

template <int K, Codebook C>
int gate_up_instance(const MoeArguments& a, cudaStream_t stream) {
    return launch_gate_up<K, C>(a, stream);
}

template <int K, Codebook C>
int down_instance(const MoeArguments& a, cudaStream_t stream) {
    return launch_down<K, C>(a, stream);
}

template <int K, Codebook C>
int linear_instance(const LinearArguments& a, cudaStream_t stream) {
    if (a.tokens <= 8 || !has_wide_shared()) return launch_linear<K, C, 1>(a, stream);
    if (a.tokens <= 16) return launch_linear<K, C, 2>(a, stream);
    return launch_linear<K, C, 4>(a, stream);
}

}  // namespace exl3
