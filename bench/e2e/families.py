"""Which part of the model a GPU kernel belongs to, by its name.

One ordered table: the first pattern that matches decides. Names are those of vLLM 0.33.0 on Hopper
and of this repository's kernels; what nothing matches is `other` and printed by name, so that a new
kernel shows instead of hiding in a sum.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

FAMILIES: tuple[tuple[str, str], ...] = (
    (
        "all-reduce",
        r"all_?reduce|cross_device_reduce|nccl|all_?gather|reduce_scatter|one_?shot|two_?shot|multimem",
    ),
    ("experts", r"moe_(gate_up|down|rotate)|prefill_(mma_)?kernel|route_kernel|down_scale_kernel"),
    ("experts", r"combine_kernel|rotate_pairs|moe_align"),
    ("dense GEMM", r"dense_rows"),
    ("recoded linears", r"_rows_kernel|dynamic_per_token_scaled|scaled_mm"),
    (
        "packed linears",
        r"linear_few|linear_parts|rotate_(tokens|parts)|dequant_kernel|hadamard|had_kernel",
    ),
    ("mHC", r"mhc|_seam_kernel|hc_(pre|post|prenorm|expand|contract)|prenorm_gemm|hyper"),
    (
        "KDA",
        r"kda|_inputs_kernel|causal_conv1d|fused_recurrent|chunk_|delta_rule|gather_initial|scatter_states",
    ),
    ("indexer", r"mqa_logits|kpool|indexer|fwht|top_k|topk_(ragged|per_row)|expand_pools|pool"),
    ("MLA", r"mla|flash_fwd|FlashAttn|pack_topk|BatchMLA|concat_and_cache|convert_req_index"),
    ("router", r"topk_sigmoid|grouped_topk|topk_gating|router|noaux|ll_bf16|sigmoid_topk"),
    ("activation", r"silu|swiglu|act_and_mul"),
    ("norms", r"rms_?norm|layer_norm|_norm_"),
    ("sampler", r"gumbel|argmax|sample|logprob|temperature|penalt|min_p|rejection"),
    ("runner", r"prepare|block_table|slot_mapping|gather_block|input_batch|post_update|combine_"),
    ("dense GEMM", r"gemm|gemv|nvjet|cutlass|splitK|cublas|sm90_xmma"),
    ("copies", r"Memcpy|Memset|copy_|CatArray|fill|FillFunctor|index_(copy|select)|gather"),
    ("elementwise", r"elementwise|vectorized|reduce_kernel|triton_(poi|red|per)"),
)
_COMPILED = tuple((family, re.compile(pattern, re.IGNORECASE)) for family, pattern in FAMILIES)


def family_of(kernel: str) -> str:
    """The family of one kernel name."""
    return next((family for family, pattern in _COMPILED if pattern.search(kernel)), "other")


@dataclass(frozen=True)
class KernelTime:
    """One kernel: name, launches and total time in microseconds."""

    name: str
    count: int
    total_us: float


def by_family(kernels: Iterable[KernelTime], steps: int) -> dict[str, dict[str, float]]:
    """Per family the time in microseconds and the launches of one step, longest first."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for kernel in kernels:
        entry = sums[family_of(kernel.name)]
        entry[0] += kernel.total_us / steps
        entry[1] += kernel.count / steps
    ordered = sorted(sums.items(), key=lambda item: -item[1][0])
    return {name: {"us": round(us, 2), "launches": round(n, 2)} for name, (us, n) in ordered}


@dataclass(frozen=True)
class Span:
    """One kernel at work: name, start and stop in microseconds, the stream it ran on."""

    name: str
    start: float
    stop: float
    stream: int | None = None


def wall_shares(spans: Iterable[Span]) -> dict[str, float]:
    """Microseconds by family that add up to the time in which any kernel ran.

    Where several kernels are on the GPU at once each gets an equal part of that time: a kernel that
    was started early and waits does not count whole, as it does in `by_family`.
    """
    spans = list(spans)
    edges = sorted(
        (at, begins, index)
        for index, span in enumerate(spans)
        for at, begins in ((span.start, True), (span.stop, False))
    )
    shares: dict[str, float] = defaultdict(float)
    running: set[int] = set()
    last = 0.0
    for at, begins, index in edges:
        for other in running:
            shares[family_of(spans[other].name)] += (at - last) / len(running)
        last = at
        if begins:
            running.add(index)
        else:
            running.discard(index)
    return dict(sorted(shares.items(), key=lambda item: -item[1]))
