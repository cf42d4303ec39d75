"""Engines of the real size with random weights, and what is measured in each (`e2e.inside`).

Several measurements share one start, because a start takes 40 s. `full` is the 3.04-bpw model with
all 45 layers; `cut` its first 12 layers (three dense, three MLA) for comparisons of one layer's
work; `pair` the 4-bpw model over two ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from e2e.draft_rows import ADAPTIVE, schedule
from h200.job import Job, python

Measure = dict[str, Any]
READY = ("library", "folders")
WARM = ("caches", "flashinfer", "warm")
"""What every engine comes after: DFlash2 would else compile FlashInfer's module for minutes."""

BASE: Mapping[str, Any] = {
    "load_format": "exl3_dummy",
    "language_model_only": True,
    "skip_tokenizer_init": True,
    "max_model_len": 40960,
    "max_num_batched_tokens": 8192,
    "max_num_seqs": 16,
    "gpu_memory_utilization": 0.95,
}
SERIAL = {"VLLM_DISABLE_SHARED_EXPERTS_STREAM": "1"}
APART = {"GLM_EXL3_TOGETHER": "none"}
FUSED = {"GLM_EXL3_FUSED_OPS": "mhc,kda,router,dense"}
"""With the router's one launch, which `auto` leaves out."""
LATE = {"GLM_EXL3_EARLY_LAUNCH": "0"}
HALVES = {"GLM_EXL3_INTEGER_PRODUCTS": "0"}
UNGATED = {"GLM_EXL3_FUSED_OPS": "mhc,kda,dense"}
"""Without the gate's rows, which `auto` takes."""


def decode(*requests: int, context: int = 1024, tokens: int = 64) -> list[Measure]:
    return [
        {"kind": "decode", "requests": n, "context": context, "tokens": tokens} for n in requests
    ]


def prefill(*contexts: int) -> list[Measure]:
    return [{"kind": "prefill", "context": context} for context in contexts]


def profile(*requests: int, context: int = 1024) -> list[Measure]:
    return [{"kind": "profile", "requests": n, "context": context, "tokens": 8} for n in requests]


def dflash(*lengths: int) -> dict[str, Any]:
    """DFlash2 with `lengths` drafts a step; with several the adaptive scheduler picks one."""
    speculation: dict[str, Any] = {
        "method": "dflash", "model": "{work}/drafter", "num_speculative_tokens": lengths[-1],
    }  # fmt: skip
    if len(lengths) == 1:
        return {"speculative_config": speculation}
    speculation["num_speculative_tokens_per_batch_size"] = schedule(lengths)
    return {"speculative_config": speculation, "scheduler_cls": ADAPTIVE}


def verified(drafts: int, measures: list[Measure]) -> list[Measure]:
    """`measures` with so many drafts in every step."""
    return [{**one, "drafts": drafts} for one in measures]


def engine(
    name: str,
    model: str,
    measure: list[Measure],
    expect_s: int,
    priority: int,
    env: Mapping[str, str] | None = None,
    needs: tuple[str, ...] = (),
    after: tuple[str, ...] = (),
    **more: Any,
) -> Job:
    """A job of one engine on one GPU."""
    return Job(
        name,
        python("e2e.inside", "{out}/{name}.job.json", "{out}/{name}.json"),
        expect_s,
        2 * expect_s + 60,
        priority,
        env=env or {},
        needs=(*READY, *needs),
        after=(*WARM, *after),
        data={"engine": {**BASE, "model": f"{{work}}/{model}", **more}, "measure": measure},
    )


LONG = 131072
LENGTHS = (2, 4, 7)
STEP = [*decode(1, 4, 16), *profile(1)]
EVERY = [*decode(1, 2, 4, 8, 16), *profile(1)]

FULL = (
    engine(
        "full.step", "full",
        [*decode(1, 16), *profile(1, 16), *prefill(32768), *decode(2, 4, 8)], 120, 20,
    ),
    engine("full.ungated", "full", EVERY, 75, 21, UNGATED),
    engine("full.halves", "full", EVERY, 75, 21, HALVES),
    engine(
        "full.verify7", "full",
        [*verified(7, [*decode(1, 3), *profile(1)]),
         *(row for k in LENGTHS[:-1] for row in verified(k, decode(1, 3))),
         *verified(7, prefill(32768))],
        190, 26, max_num_seqs=4, **dflash(*LENGTHS),
    ),
    engine(
        "full.long", "full",
        [{"kind": "together", "requests": 2, "context": LONG, "tokens": 16}, *decode(1)],
        110, 27, max_model_len=LONG + 8192, max_num_seqs=4, gpu_memory_utilization=0.97,
        max_num_batched_tokens=4096, **dflash(7),
    ),
    engine(
        "full.fused", "full", [*EVERY, *prefill(32768)], 90, 28,
        FUSED,
    ),
    engine(
        "full.window", "full", [*decode(1), *prefill(65536, LONG)], 120, 34,
        max_model_len=1048576, gpu_memory_utilization=0.97, max_num_seqs=4,
    ),
    engine("full.apart", "full", STEP, 75, 22, APART),
    engine("full.steer", "full", decode(1, 16), 70, 62, {
        "PYTHONPATH": "{work}/site",
        "GLM_EXL3_STEER_VECTOR": "{work}/edits/vector.gguf", "GLM_EXL3_STEER_ALPHA": "2"},
        needs=("site",), after=("edits",)),
)  # fmt: skip

AB: Mapping[str, Mapping[str, str]] = {
    "plain": {},
    "mhc": {"GLM_EXL3_FUSED_OPS": "mhc"},
    "kda": {"GLM_EXL3_FUSED_OPS": "kda"},
    "router": {"GLM_EXL3_FUSED_OPS": "router"},
    "late": LATE,
    "serial-late": SERIAL | LATE,
}
BACKENDS: Mapping[str, dict[str, Any]] = {
    "flashinfer": {"attention_backend": "FLASHINFER_MLA_SPARSE_SM90"},
    "flashinfer-fp8": {
        "attention_backend": "FLASHINFER_MLA_SPARSE_SM90",
        "kv_cache_dtype": "fp8",
    },
    "flashattn": {"attention_backend": "FLASH_ATTN_MLA_SPARSE"},
    "flashmla": {"attention_backend": "FLASHMLA_SPARSE"},
    "flashmla-fp8": {"attention_backend": "FLASHMLA_SPARSE", "kv_cache_dtype": "fp8_ds_mla"},
}
ATTENTION = [
    *decode(1, context=32768), *decode(16, context=8192), *prefill(32768),
]  # fmt: skip


def cut() -> tuple[Job, ...]:
    """Comparisons on twelve layers."""
    knobs = [engine(f"cut.{n}", "cut", STEP, 40, 42, env) for n, env in AB.items()]
    host = [
        engine("cut.sync", "cut", decode(1, 16), 35, 43, async_scheduling=False),
        engine(
            "cut.process", "cut", decode(1, 16), 45, 43, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        ),
    ]
    backends = [
        engine(f"attention.{n}", "cut", ATTENTION, 60, 45, {"GLM_EXL3_ATTENTION": "vllm"}, **more)
        for n, more in BACKENDS.items()
    ]
    triton = {"GLM_EXL3_ATTENTION": "triton"}
    ours = [
        engine(f"attention.triton-{dtype}", "cut", ATTENTION, 60, 46, triton, kv_cache_dtype=dtype)
        for dtype in ("bfloat16", "glm_fp8")
    ]
    verify = [
        engine(f"verify.{k + 1}", "cut", [*decode(1, 4), *profile(1)], 50, 48, **dflash(k))
        for k in (2, 4, 7)
    ]
    wide = engine(
        "verify.16", "cut", [*decode(1), *profile(1)], 50, 49,
        {"GLM_EXL3_HYBRID_DRAFT": "1", "GLM_EXL3_DRAFTER_TOKENS": "7"}, **dflash(15),
    )  # fmt: skip
    return (*knobs, *host, *backends, *ours, *verify, wide)


NCCL = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}
TWO = {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher", "seed": 0}


def pair(
    name: str,
    measure: list[Measure],
    expect_s: int,
    priority: int,
    env: Mapping[str, str] | None = None,
    **more: Any,
) -> Job:
    """One process a rank on two GPUs, through torch's launcher; nothing uses NVLink multicast."""
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    inside = ("-m", "e2e.inside", "{out}/{name}.job.json", "{out}/{name}.json")
    return Job(
        name,
        python(*launcher, *inside),
        expect_s,
        2 * expect_s + 60,
        priority,
        gpus=2,
        env=NCCL | dict(env or {}),
        needs=READY,
        after=WARM,
        data={"engine": {**BASE, **TWO, "model": "{work}/pair", **more}, "measure": measure},
    )


PAIRS = (
    pair("pair.step",
         [*decode(1, 4, 16), *profile(1, 16), *prefill(32768), {"kind": "allreduce"}], 80, 25),
    pair("pair.verify7", [*decode(1), *profile(1)], 90, 27, **dflash(7)),
    pair("pair.nccl", [*decode(1, 16)], 60, 37, disable_custom_all_reduce=True),
    pair("pair.serial", [*decode(1, 16)], 75, 38, SERIAL),
)  # fmt: skip
JOBS = (*FULL, *cut(), *PAIRS)
