#include "decode_instances.cuh"

namespace exl3 {

template int gate_up_instance<3, Codebook::kMul1>(const MoeArguments&, cudaStream_t);
template int down_instance<3, Codebook::kMul1>(const MoeArguments&, cudaStream_t);
template int linear_instance<3, Codebook::kMul1>(const LinearArguments&, cudaStream_t);

}  // namespace exl3
