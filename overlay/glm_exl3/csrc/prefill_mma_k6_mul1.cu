#include "prefill_mma.cuh"

namespace exl3 {

template int mma_gate_up_instance<6, Codebook::kMul1>(const MoeArguments&, const PrefillScratch&,
                                                   cudaStream_t);
template int mma_down_instance<6, Codebook::kMul1>(const MoeArguments&, const PrefillScratch&, cudaStream_t);

}  // namespace exl3
