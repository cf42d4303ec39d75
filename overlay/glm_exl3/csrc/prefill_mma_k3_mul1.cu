#include "prefill_mma.cuh"

namespace exl3 {

template int mma_gate_up_instance<3, Codebook::kMul1>(const MoeArguments&, const PrefillScratch&,
                                                   cudaStream_t);
template int mma_down_instance<3, Codebook::kMul1>(const MoeArguments&, const PrefillScratch&, cudaStream_t);

}  // namespace exl3
