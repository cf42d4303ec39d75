// Run-time rate and codebook to compile-time constants: the fast kernels exist for two to six bits,
// mcg and mul1.
#pragma once

#include <type_traits>

#include "api.h"
#include "codec.cuh"

namespace exl3 {

template <int K, typename Visit>
int with_codebook(int codebook, Visit visit) {
    using Bits = std::integral_constant<int, K>;
    if (codebook == static_cast<int>(Codebook::kMcg)) {
        return visit(Bits(), std::integral_constant<Codebook, Codebook::kMcg>());
    }
    if (codebook == static_cast<int>(Codebook::kMul1)) {
        return visit(Bits(), std::integral_constant<Codebook, Codebook::kMul1>());
    }
    return kUnsupported;
}

template <typename Visit>
int with_instance(int bits, int codebook, Visit visit) {
    switch (bits) {
        case 2: return with_codebook<2>(codebook, visit);
        case 3: return with_codebook<3>(codebook, visit);
        case 4: return with_codebook<4>(codebook, visit);
        case 5: return with_codebook<5>(codebook, visit);
        case 6: return with_codebook<6>(codebook, visit);
        default: return kUnsupported;
    }
}

}  // namespace exl3
