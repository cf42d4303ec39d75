// The peer's entry points as `torch.ops.exl3_peer.*`, so that its kernels can be called without
// importing its package: that would build all of its 194 sources.
#include <torch/library.h>

#include "activation.cuh"
#include "hgemm.cuh"
#include "quant/exl3_gemm.cuh"
#include "quant/exl3_moe.cuh"
#include "quant/exl3_moe_coop.cuh"
#include "quant/hadamard.cuh"
#include "quant/reconstruct.cuh"

namespace {

using at::Tensor;
using Tables = std::vector<Tensor>;  // trellis, suh, svh addresses of gate, up and down

void gemm(const Tensor& a, const Tensor& trellis, Tensor out, const Tensor& suh, const Tensor& rotated,
          const Tensor& svh, bool mcg, bool mul1) {
    exl3_gemm(a, trellis, out, suh, rotated, svh, -1, mcg, mul1, 0);
}

void moe_few(const Tensor& x, const Tensor& ids, const Tensor& weights, Tables t, double bits, bool mcg,
             bool mul1, double limit, Tables scratch, Tensor out) {
    exl3_moe_coop(x, ids, weights, -1, -1, static_cast<int>(x.size(1)), t[0], t[1], t[2], t[3], t[4],
                  t[5], t[6], t[7], t[8], {}, {}, {}, bits, bits, bits, mcg, mul1, MOE_COOP_ACT_SILU,
                  limit, true, scratch[0], scratch[1], scratch[2], scratch[3], scratch[4], scratch[5],
                  scratch[6], out, {}, {});
}

void moe_rows(const Tensor& x, Tensor out, const Tensor& count, const Tensor& tokens,
              const Tensor& weights, Tables scratch, double bits, Tables t, bool mcg, bool mul1,
              double limit, int64_t active, int64_t low, int64_t high, int64_t tile) {
    exl3_moe(x, out, count, tokens, weights, scratch[0], scratch[1], scratch[2], scratch[3], 0, bits,
             bits, bits, t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8], mcg, mul1, mcg, mul1,
             mcg, mul1, limit, static_cast<int>(active), {}, {}, static_cast<int>(low),
             static_cast<int>(high), static_cast<int>(tile));
}

int64_t moe_rows_concurrency(int64_t device) {
    return exl3_moe_max_concurrency(static_cast<int>(device));
}

void decode_batch(Tensor out, const Tensor& trellis, const Tensor& suh, const Tensor& svh, double bits,
                  bool mcg, bool mul1) {
    reconstruct_had_batch(out, trellis, suh, svh, bits, mcg, mul1);
}

void decode(Tensor out, const Tensor& trellis, double bits, bool mcg, bool mul1) {
    reconstruct(out, trellis, bits, mcg, mul1);
}

void decode_rotated(Tensor out, const Tensor& trellis, const Tensor& suh, const Tensor& svh,
                    double bits, bool mcg, bool mul1, int64_t first) {
    reconstruct_had_slice(out, trellis, suh, svh, bits, mcg, mul1, first);
}

void activation(const Tensor& gate, const Tensor& up, Tensor out, double limit) {
    silu_mul(gate, up, out, limit);
}

void product(Tensor a, Tensor b, Tensor c) { hgemm_recon(a, b, c); }

void product_batch(Tensor a, Tensor b, Tensor c) { hgemm_batched(a, b, c); }

void rotate(const Tensor& x, Tensor out, const std::optional<Tensor>& pre,
            const std::optional<Tensor>& post) {
    had_r_128(x, out, pre, post, 1.0);
}

}  // namespace

TORCH_LIBRARY(exl3_peer, m) {
    m.def("gemm", &gemm);
    m.def("moe_few", &moe_few);
    m.def("moe_rows", &moe_rows);
    m.def("moe_rows_concurrency", &moe_rows_concurrency);
    m.def("decode", &decode);
    m.def("decode_rotated", &decode_rotated);
    m.def("decode_batch", &decode_batch);
    m.def("activation", &activation);
    m.def("product", &product);
    m.def("product_batch", &product_batch);
    m.def("rotate", &rotate);
}
