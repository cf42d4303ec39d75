#include "launch_parts.cuh"

namespace exl3 {

template int parts_instance<5, Codebook::kMcg>(const LinearPartsArguments&, cudaStream_t);

}  // namespace exl3
