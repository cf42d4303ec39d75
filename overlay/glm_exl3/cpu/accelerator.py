"""Find out whether this machine has an accelerator, without initialising one.

Why this shape: a platform plug-in runs in every process, before vLLM decides what it runs on, and a
CUDA context made here would break forked workers. Device nodes and the driver library answer the
question without a context: the NVIDIA driver creates /dev/nvidia0 (and /dev/nvhost-gpu or
/dev/nvmap on integrated parts), AMD's /dev/kfd, Intel's and other drivers are seen by their torch
devices. A driver library without a device node (a build container) is not an accelerator.

What must stay true: a doubtful answer is yes, because a wrong yes changes nothing (vLLM's own
detection goes on), and a wrong no would run a GPU machine on its CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

DEVICE_NODES = (
    "dev/nvidia0",
    "dev/nvidiactl",
    "dev/nvhost-gpu",
    "dev/nvhost-ctrl-gpu",
    "dev/nvmap",
    "dev/dxg",
    "dev/kfd",
)
DEVICE_PATTERNS = ("dev/nvidia[0-9]*", "dev/accel/accel[0-9]*")


def device_nodes(root: Path = Path("/")) -> list[str]:
    """Accelerator device nodes below `root`."""
    found = [node for node in DEVICE_NODES if (root / node).exists()]
    for pattern in DEVICE_PATTERNS:
        found += [str(path.relative_to(root)) for path in root.glob(pattern)]
    return sorted(set(found))


def nvml_device_count() -> int:
    """Devices that NVML reports; 0 without the library, without a driver or without devices."""
    try:
        from vllm.third_party import pynvml
    except ImportError:
        return 0
    try:
        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001 - NVML raises its own classes; all mean "no usable device"
        return 0
    try:
        return int(pynvml.nvmlDeviceGetCount())
    except Exception:  # noqa: BLE001
        return 0
    finally:
        pynvml.nvmlShutdown()


def found(root: Path = Path("/"), count_nvml: Callable[[], int] = nvml_device_count) -> str | None:
    """What accelerator was seen, in words, or None."""
    nodes = device_nodes(root)
    if nodes:
        return "device node " + nodes[0]
    count = count_nvml()
    if count:
        return f"{count} NVML devices"
    return None
