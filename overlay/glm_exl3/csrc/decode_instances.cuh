// One (K, codebook) of the decode kernels; each translation unit decode_k*_*.cu names one.
#pragma once

#include "launch_decode.cuh"

namespace exl3 {

template <int K, Codebook C>
int gate_up_instance(const MoeArguments& a, cudaStream_t stream) {
    if constexpr (C == Codebook::kMul1) {
        if (by_integers(a.w13.k)) return launch_gate_up<K, C, 1>(a, stream);
    }
    return launch_gate_up<K, C, 0>(a, stream);
}

template <int K, Codebook C>
int down_instance(const MoeArguments& a, cudaStream_t stream) {
    if constexpr (C == Codebook::kMul1) {
        if (by_integers(a.w2.k)) return launch_down<K, C, 1>(a, stream);
    }
    return launch_down<K, C, 0>(a, stream);
}

template <int K, Codebook C>
int linear_instance(const LinearArguments& a, cudaStream_t stream) {
    if (a.tokens <= 8 || !has_wide_shared()) {
        if constexpr (C == Codebook::kMul1) {
            if (by_integers(a.w.k)) {
                return a.tokens <= 4 ? launch_linear<K, C, 1, 1>(a, stream) : launch_linear<K, C, 1, 2>(a, stream);
            }
        }
        return launch_linear<K, C, 1, 0>(a, stream);
    }
    if (a.tokens <= 16) return launch_linear<K, C, 2, 0>(a, stream);
    return launch_linear<K, C, 4, 0>(a, stream);
}

}  // namespace exl3
