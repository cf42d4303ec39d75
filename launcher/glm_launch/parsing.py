"""Turn the text of a setting into its value: lists, limits, addresses, arguments.

Each function takes what pydantic hands it (text from the shell or `.env`, or a value already) and
raises `ValueError` with what is allowed.
"""

from __future__ import annotations

import ipaddress
import re
import shlex
from typing import Any

OWNED_FLAGS = {
    "--model": "MODEL",
    "--revision": "MODEL_REVISION",
    "--served-model-name": "SERVED_MODEL_NAME",
    "--speculative-config": "SPEC_METHOD",
    "--per-request-spec-decode-metrics": "REPLY_ACCEPTANCE",
    "--port": "PORT",
    "--host": "API_HOST",
    "--api-key": "VLLM_API_KEY",
    "--tensor-parallel-size": "RANKS",
    "-tp": "RANKS",
    "--nnodes": "RANKS",
    "-n": "RANKS",
    "--node-rank": "RANKS",
    "-r": "RANKS",
    "--headless": "RANKS",
    "--distributed-executor-backend": "EXECUTOR",
    "--master-addr": "HEAD_IP",
    "--master-port": "MASTER_PORT",
    "--max-model-len": "MAX_MODEL_LEN",
    "--max-num-seqs": "MAX_NUM_SEQS",
    "--max-num-batched-tokens": "MAX_NUM_BATCHED_TOKENS",
    "--gpu-memory-utilization": "GPU_MEM_UTIL",
    "--kv-cache-dtype": "KV_CACHE_DTYPE",
    "--kv-cache-memory-bytes": "KV_CACHE_MEMORY_BYTES",
    "--mamba-ssm-cache-dtype": "KDA_STATE_DTYPE",
    "--prefix-match-unit": "PREFIX_HIT_TOKENS",
    "--kv-offloading-size": "KV_PARKING_GIB",
    "--cudagraph-capture-sizes": "CUDAGRAPH_SIZES",
    "--enforce-eager": "ENFORCE_EAGER",
    "--limit-mm-per-prompt": "LIMIT_MM",
    "--skip-mm-profiling": "SKIP_MM_PROFILING",
    "--language-model-only": "LANGUAGE_MODEL_ONLY",
}
FORBIDDEN_FLAGS = {
    "--trust-remote-code": "it runs code from the checkpoint, and this model needs none",
}
_MM_LIMIT = re.compile(r"^(image|video)\s*=\s*(\d{1,4})$")


def split_list(value: Any) -> Any:
    """Split text at commas or blanks; anything else passes."""
    return tuple(re.split(r"[,\s]+", value.strip(", \t"))) if isinstance(value, str) else value


def host_address(value: str) -> str:
    """An IP address or a host name."""
    try:
        return str(ipaddress.ip_address(value))
    except ValueError:
        pass
    if re.fullmatch(r"(?=.{1,253}$)(?!.*\.\d+$)[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?", value):
        return value
    raise ValueError("must be an IP address or a host name")


def device_name(value: str) -> str:
    """A network or RDMA device, such as enp1s0f1np1 or rocep1s0f1:1."""
    if value and not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,30}(:\d{1,2})?", value):
        raise ValueError("must be the name of a device")
    return value


def multimodal_limits(value: Any) -> Any:
    """`image=8,video=1` as a mapping."""
    if not isinstance(value, str):
        return value
    limits: dict[str, int] = {}
    for part in split_list(value):
        match = _MM_LIMIT.match(part)
        if not match:
            raise ValueError("must look like image=8,video=1")
        limits[match[1]] = int(match[2])
    return limits


def split_shell(value: Any) -> Any:
    """Split text like a shell line; anything else passes."""
    if not isinstance(value, str):
        return value
    try:
        return tuple(shlex.split(value))
    except ValueError as error:
        raise ValueError(f"is not quoted like a shell line: {error}") from None


def extra_arguments(value: Any) -> Any:
    """Split like a shell and refuse what a setting owns or what must never be set."""
    arguments = split_shell(value)
    for argument in arguments:
        flag = argument.split("=", 1)[0]
        flag = flag.replace("_", "-") if flag.startswith("--") else flag
        if flag in OWNED_FLAGS:
            raise ValueError(f"must not hold {flag}: set {OWNED_FLAGS[flag]} instead")
        if flag in FORBIDDEN_FLAGS:
            raise ValueError(f"must not hold {flag}: {FORBIDDEN_FLAGS[flag]}")
    return arguments
