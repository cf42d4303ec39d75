// The peer's encoder as `torch.ops.exl3_encoder.*`: what its Python quantiser calls, nothing else.
#include <torch/library.h>

#include "quant/pack.cuh"
#include "quant/quantize.cuh"

namespace {

using at::Tensor;

std::tuple<bool, int64_t> scratch(int64_t device, int64_t bits, bool mcg, bool mul1, int64_t length) {
    return quantize_tiles_scratch(static_cast<int>(device), static_cast<int>(bits), mcg, mul1,
                                  static_cast<int>(length));
}

void encode(const Tensor& tiles, Tensor decoded, Tensor states, Tensor costs, Tensor edges,
            int64_t bits, bool mcg, bool mul1) {
    quantize_tiles(tiles, decoded, states, costs, edges, static_cast<int>(bits), mcg, mul1);
}

void pack(Tensor packed, const Tensor& states, int64_t bits) {
    pack_trellis(packed, states, static_cast<int>(bits));
}

}  // namespace

TORCH_LIBRARY(exl3_encoder, library) {
    library.def("scratch", scratch);
    library.def("encode", encode);
    library.def("pack", pack);
}
