"""Dense bf16 projections whose few tokens this project's kernel multiplies (`ops.dense_rows`).

`dense` in `GLM_EXL3_FUSED_OPS` turns it on. Weights are created, loaded, edited and kept exactly as
vLLM's unquantised method does it; only the product differs. A bias, a linear back end that was
chosen by name and batch invariance are left to vLLM.
"""

from __future__ import annotations

import torch
from vllm import envs as vllm_envs
from vllm.model_executor.layers.linear import (
    LinearBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.utils import default_unquantized_gemm

from glm_exl3.ops import dense_rows


# vLLM finds the second loader by the name of the method's class.
@register_weight_loader_v2_supported_method
class DenseLinearMethod(UnquantizedLinearMethod):
    """A linear layer without quantisation."""

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [..., k] -> [..., outputs of this rank] in x.dtype."""
        plain = self._gemm_impl is default_unquantized_gemm and not vllm_envs.VLLM_BATCH_INVARIANT
        if bias is None and plain:
            return dense_rows.linear(x, layer.weight)
        return super().apply(layer, x, bias)


def unquantized_method() -> UnquantizedLinearMethod:
    """The method of a layer without packed matrices."""
    return DenseLinearMethod() if dense_rows.in_use() else UnquantizedLinearMethod()


def adopt(model: torch.nn.Module) -> int:
    """Serve bf16 layers that vLLM built without a configuration, the indexer's, too; how many.

    Gates of routed experts have products of their own and stay.
    """
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear

    found = 0
    for module in model.modules():
        if not isinstance(module, LinearBase) or isinstance(module, GateLinear):
            continue
        if type(module.quant_method) is UnquantizedLinearMethod and _is_matrix(module):
            module.quant_method = DenseLinearMethod()
            found += 1
    return found


def _is_matrix(layer: torch.nn.Module) -> bool:
    """A convolution's taps are no matrix, though vLLM keeps them in a linear layer."""
    weight = layer._parameters.get("weight")
    return weight is not None and weight.dim() == 2 and weight.dtype == torch.bfloat16
