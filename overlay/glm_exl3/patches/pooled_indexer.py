"""Run the pooled indexer without DeepGEMM.

vLLM's indexer scores pools with DeepGEMM, which begins at SM90, and rounds queries with a cast that
Triton has from SM89 on. Where the Triton indexer is chosen, its operator goes into vLLM's
out-of-tree registry; its metadata builder, its rounding and the padding of heads for DeepGEMM have
no extension point and replace three names. Elsewhere nothing changes.
"""

from __future__ import annotations

from glm_exl3 import envs
from glm_exl3.attention.install import architecture, triton_indexer
from glm_exl3.patches.record import Patch

BACKEND = "vllm.v1.attention.backends.mla.indexer:Glm5NextIndexerBackend"
TAIL = "vllm.v1.attention.backends.mla.indexer:KpoolTailMetadataBuilder"
FORWARD = "vllm.models.glm5next.common.attention:Indexer.forward"
OPERATOR = "vllm.models.glm5next.nvidia.sparse_indexer:SparseAttnIndexerKpool"


def apply() -> None:
    """Replace operator, builder and rounding where the Triton indexer is chosen."""
    found = architecture()
    if found is None or not triton_indexer(envs.ATTENTION.read(), found):
        return
    from vllm.models.glm5next.common import attention
    from vllm.models.glm5next.nvidia.sparse_indexer import SparseAttnIndexerKpool
    from vllm.v1.attention.backends.mla.indexer import Glm5NextIndexerBackend

    from glm_exl3.attention import indexer_op, pool_calls

    SparseAttnIndexerKpool.register_oot(name="SparseAttnIndexerKpool")(indexer_op.TritonPoolIndexer)
    Glm5NextIndexerBackend.get_builder_cls = staticmethod(indexer_op.builder_class)
    attention.fwht128_quant_fp8 = pool_calls.rotate
    attention._pad_indexer_heads = pool_calls.keep_heads


PATCH = Patch(
    id="pooled-indexer",
    summary="the pooled indexer runs in Triton on GPUs without DeepGEMM",
    targets=(BACKEND, TAIL, FORWARD, OPERATOR),
    stage="model",
    applies_to="==0.33.0",
    fingerprints={
        "0.33.0": {
            BACKEND: "456c240bfacb7f45",
            TAIL: "59e0ced28682ad77",
            FORWARD: "90b4135fedfd0eb8",
            OPERATOR: "c3f51f4c291a1195",
        }
    },
    upstream="none: upstream serves this model from SM90 on",
    remove_when="vLLM scores pooled keys without DeepGEMM",
    off_switch="GLM_EXL3_PATCH_POOLED_INDEXER",
    risk="crash: models with a pooled indexer cannot run below SM90 without it",
    apply=apply,
)
