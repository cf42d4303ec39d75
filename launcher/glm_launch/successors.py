"""What became of the settings of other launchers for this model: a name here, or why there is none.

Users bring `.env` files of other stacks. A key that nobody reads is worse than an error when it
looks as if it did something, so each one is answered.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_PREFIX = re.compile(r"^(GLM53|EXL3)_")
SUCCESSORS = {
    "GLM53_MODEL_PRESET": "PRESET", "GLM53_PORT": "PORT", "GLM53_MODELS_DIR": "HF_HOME",
    "GLM53_CUDA_ARCH": "PRESET", "GLM53_EXTRA_ENV": "", "GLM53_PREFILL_CHUNK_SIZE":
    "MAX_NUM_BATCHED_TOKENS", "GLM53_MIXED_PREFILL_CHUNK": "MAX_NUM_BATCHED_TOKENS",
    "GLM53_HOST_MEM_HYGIENE": "MEM_FLOOR_GIB", "GLM53_KV_CAPACITY_LOG": "",
    "EXL3_OVERLAY_HOST": "BUILD", "EXL3_FUSED_MOE": "", "EXL3_AUTOSPLIT_MARGIN_MB":
    "GPU_MEM_UTIL", "FORCE_SYNC": "REFRESH_WEIGHTS", "PULL": "SKIP_PULL", "TP": "GPUS_PER_NODE",
    "NNODES": "WORKER_IP", "NFS_SHARE": "SHARED_WEIGHTS", "HEAD_GID": "NCCL_IB_GID_INDEX",
    "WORKER_GID": "NCCL_IB_GID_INDEX", "SOCKET_IFNAME": "HEAD_CX7_IF",
    "QUANTIZATION": "", "SKIP_SHIP": "SKIP_PULL",
}  # fmt: skip
NO_NEED = "kernels, caches and warm-up choose for themselves here"


def foreign(names: Iterable[str]) -> list[str]:
    """Those of `names` that belong to another stack by their prefix."""
    return sorted(name for name in names if _PREFIX.match(name))


def remark(key: str, origin: str, known: Iterable[str]) -> str:
    """What to say about a key that is no setting."""
    if SUCCESSORS.get(key):
        return f"{origin}: {key} is not read here; its successor is {SUCCESSORS[key]}"
    if _PREFIX.match(key) or key in SUCCESSORS:
        near = _near(_PREFIX.sub("", key), known)
        hint = f"its successor is {near}" if near else f"it has no successor: {NO_NEED}"
        return f"{origin}: {key} is not read here; {hint}"
    near = _near(key, known)
    hint = f"; did you mean {near}?" if near else ""
    return f"{origin}: no setting is called {key}; it is ignored{hint}"


def _near(key: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(key, list(known), n=1, cutoff=0.7)
    return found[0] if found else ""
