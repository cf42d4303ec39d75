"""Attention layers that keep the quantisation configuration.

vLLM builds the attention of this architecture without one, because the checkpoints it knows store
attention in bf16. EXL3 checkpoints may pack it, and in bf16 it costs more bytes per token than the
routed experts. These subclasses only hand the configuration through; a module without a trellis
gets vLLM's unquantised method from it, so a checkpoint with dense attention loads as before. Layers
whose weight vLLM reads directly (`kv_b_proj`, `wk_weights_proj`) are never packed in either family.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.models.glm5next.common.attention import Glm5NextMLAAttention
from vllm.models.glm5next.common.kda import Glm5NextLinearAttention

from glm_exl3.fused.install import installed
from glm_exl3.quant.config import Exl3Config


def exl3_config(vllm_config: Any) -> Exl3Config | None:
    """The EXL3 configuration of an engine, or None when it serves something else."""
    config = vllm_config.quant_config
    return config if isinstance(config, Exl3Config) else None


class PackedMLAAttention(Glm5NextMLAAttention):
    """Sparse MLA with the engine's quantisation configuration."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        config = exl3_config(vllm_config)
        if config is not None:
            kwargs["quant_config"] = config
        super().__init__(vllm_config, *args, **kwargs)


class PackedLinearAttention(Glm5NextLinearAttention):
    """KDA with the engine's quantisation configuration.

    The parent clears the configuration while its own base class is built and reads `quant_config`
    for its projections afterwards; the property answers with the one seen before.
    """

    def __init__(self, config: Any, vllm_config: Any, prefix: str = "") -> None:
        object.__setattr__(self, "_exl3_config", exl3_config(vllm_config))
        super().__init__(config=config, vllm_config=vllm_config, prefix=prefix)
        self._fused_step: Callable[..., torch.Tensor | None] | None = None
        self._fused_prefill: Callable[..., bool] | None = None
        if "kda" in installed():
            from glm_exl3.fused import kda_prefill, kda_step

            self._fused_step, self._fused_prefill = kda_step.step, kda_prefill.attend

    def forward(self, hidden_states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Attention output `[T, H]`; a plain decode step may take the fused way."""
        output = None if self._fused_step is None else self._fused_step(self, hidden_states)
        return super().forward(hidden_states, positions) if output is None else output

    def _forward(
        self,
        qkv_proj_states: torch.Tensor,
        g1: torch.Tensor,
        beta: torch.Tensor,
        core_attn_out: torch.Tensor,
    ) -> None:
        """Attention between projections and norm, written into `core_attn_out`; a long prefill may
        take the fused way. The parent's method brings its own break of graph capture."""
        step = (qkv_proj_states, g1, beta, core_attn_out)
        if self._fused_prefill is None or not self._fused_prefill(self, *step):
            super()._forward(*step)

    @property
    def quant_config(self) -> Any:
        kept = self.__dict__.get("_exl3_config")
        return self.__dict__.get("_plain_quant_config") if kept is None else kept

    @quant_config.setter
    def quant_config(self, value: Any) -> None:
        self.__dict__["_plain_quant_config"] = value
