#include "prefill_product.cuh"

namespace exl3 {

template int prefill_gate_up_instance<2, Codebook::kMul1>(const MoeArguments&, const PrefillScratch&,
                                                        cudaStream_t);
template int prefill_down_instance<2, Codebook::kMul1>(const MoeArguments&, const PrefillScratch&,
                                                     cudaStream_t);

}  // namespace exl3
