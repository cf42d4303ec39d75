#include "launch_parts.cuh"

namespace exl3 {

template int parts_instance<4, Codebook::kMul1>(const LinearPartsArguments&, cudaStream_t);

}  // namespace exl3
