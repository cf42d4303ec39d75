"""vLLM's attention back end over `sparse_mla`, and upstream's SM120 one over 528-byte rows.

What: `TritonSparseMla` for GPUs and row layouts that no kernel of vLLM serves; by name it runs on
every GPU from SM80. `Sm120Rows` is FlashInfer's SM120 kernel, which accepts rows of 528 bytes,
with our writer in place of the one that pads them to 656.

What must stay true: workspaces are vLLM's own and reach their final size in the profiling run;
nothing waits for the GPU, so a step can be captured.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SparseMLACommonImpl,
    SparseMLACommonMetadata,
    SparseMLACommonMetadataBuilder,
)
from vllm.platforms import current_platform
from vllm.utils.platform_utils import num_compute_units
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, MultipleOf
from vllm.v1.attention.backends.mla.flashinfer_mla_sparse import FlashInferMLASparseSM120Backend
from vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm120 import FlashInferMLASparseSM120Impl
from vllm.v1.attention.backends.mla.sparse_utils import align_blocks_to_rows
from vllm.v1.worker.workspace import current_workspace_manager

from glm_exl3.attention.cache_types import with_rows
from glm_exl3.attention.rows import write
from glm_exl3.attention.sparse_mla import Paged, attend, launch_tile, workspace_shapes
from glm_exl3.attention.tiles import largest_tile, splits_for
from glm_exl3.format.errors import GlmExl3Error
from glm_exl3.format.kv import BF16, FP8, LATENT, VLLM_NAMES, registered_layout

NAME = "GLM_TRITON_MLA_SPARSE"
DECODE_TOKENS = 128
SM120_ROWS = VLLM_NAMES[FP8.name]


class TritonSparseMla(AttentionBackend):
    """Names the parts; see the module docstring."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(VLLM_NAMES.values())

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_builder_cls() -> type[Any]:
        return TritonSparseMlaBuilder

    @staticmethod
    def get_impl_cls() -> type[Any]:
        return TritonSparseMlaImpl

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [LATENT]

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability.major >= 8

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return align_blocks_to_rows(with_rows(spec))


class TritonSparseMlaBuilder(SparseMLACommonMetadataBuilder):
    """vLLM's own metadata; every token takes the same kernel."""

    metadata_cls = SparseMLACommonMetadata
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._init_reorder_batch_threshold(DECODE_TOKENS, supports_spec_as_decode=True)

    @staticmethod
    def determine_chunked_prefill_workspace_size(vllm_config: Any) -> int:
        """No prefill runs densely here, so the workspace for it stays at one block."""
        return vllm_config.cache_config.block_size


class TritonSparseMlaImpl(SparseMLACommonImpl):
    """Writes rows and attends over the chosen ones."""

    supports_dense_mha_prefill = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.supports_quant_query_input = False
        dtype = kwargs["kv_cache_dtype"]
        self.layout = registered_layout(dtype) or BF16
        if self.qk_rope_head_dim or self.kv_lora_rank != LATENT:
            raise GlmExl3Error(
                code="attention-shape",
                seen=f"latents of {self.kv_lora_rank} and {self.qk_rope_head_dim} rotary features",
                why=f"the Triton back end is written for {LATENT} and none",
                fix="choose another back end for this model",
            )
        capability = current_platform.get_device_capability()
        self.architecture = capability.to_int() if capability is not None else 80
        self.processors = num_compute_units()

    def reserve_workspace(self) -> None:
        """The largest split launch: one program per multiprocessor."""
        tile = largest_tile(self.architecture, self.num_heads, self.layout)
        outputs, sums = workspace_shapes(self.processors, min(tile.heads, self.num_heads), 1)
        current_workspace_manager().get_simultaneous(
            (outputs, torch.float32), (sums, torch.float32)
        )

    def do_kv_cache_update(
        self, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, *_: Any
    ) -> None:
        if kv_cache.numel():
            write(kv_c_normed, kv_cache, slot_mapping.flatten(), self.layout)

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[Tensor, None]:
        queries = (q[0] if isinstance(q, tuple) else q).contiguous()
        tokens = queries.shape[0]
        tile = launch_tile(self.architecture, self.num_heads, self.layout, tokens)
        splits = splits_for(tokens, self.num_heads, tile, self.processors)
        paged = Paged(kv_c_and_k_pe_cache, attn_metadata.block_table, self.layout)
        out = attend(
            queries,
            paged,
            attn_metadata.req_id_per_token,
            self.topk_indices_buffer[:tokens],
            self.scale,
            tile,
            splits,
            current_workspace_manager().get_simultaneous,
        )
        return out, None


class Sm120Rows(FlashInferMLASparseSM120Backend):
    """Upstream's SM120 back end that also takes the plugin's fp8 rows."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = [
        *FlashInferMLASparseSM120Backend.supported_kv_cache_dtypes,
        SM120_ROWS,
    ]

    @staticmethod
    def get_impl_cls() -> type[Any]:
        return Sm120RowsImpl

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return super().customize_spec(with_rows(spec))

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: Any, kv_cache_dtype: Any, *rest: Any, **named: Any
    ) -> str | None:
        known = "fp8" if kv_cache_dtype == SM120_ROWS else kv_cache_dtype
        return super().supports_combination(head_size, dtype, known, *rest, **named)


class Sm120RowsImpl(FlashInferMLASparseSM120Impl):
    """Upstream's reader; rows of 528 bytes come from our writer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.own_rows = kwargs["kv_cache_dtype"] == SM120_ROWS
        if self.own_rows:
            kwargs["kv_cache_dtype"] = "fp8_ds_mla"
        super().__init__(*args, **kwargs)

    def do_kv_cache_update(
        self, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, *rest: Any
    ) -> None:
        if not self.own_rows:
            super().do_kv_cache_update(kv_c_normed, k_pe, kv_cache, slot_mapping, *rest)
        elif kv_cache.numel():
            write(kv_c_normed, kv_cache, slot_mapping.flatten(), FP8)
