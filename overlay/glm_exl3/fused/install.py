"""Put the fused ops of `ops.fused_names` into vLLM's out-of-tree registry.

Called before a model is built on a CUDA platform, once per process; anywhere else nothing happens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from glm_exl3.log import logger
from glm_exl3.ops import fused_names

_log = logger(__name__)
_installed: set[str] = set()


def _mhc() -> None:
    from vllm.model_executor.layers.mhc import MHCFusedPostPreOp

    from glm_exl3.fused.seam_op import SeamOp

    MHCFusedPostPreOp.register_oot(name="MHCFusedPostPreOp")(SeamOp)


def _router() -> None:
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear

    from glm_exl3.fused.router_op import RoutingGate

    GateLinear.register_oot(name="GateLinear")(RoutingGate)


def _gate() -> None:
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear

    from glm_exl3.fused.gate_op import RowsGate

    if "router" in fused_names.wanted():  # whose gate is this one's heir
        return
    GateLinear.register_oot(name="GateLinear")(RowsGate)


def _in_subclass() -> None:
    """Nothing to register: a class of `models` asks `installed`, `quant.dense` the setting."""


OPS: dict[str, Callable[[], None]] = {
    "mhc": _mhc,
    "kda": _in_subclass,
    "router": _router,
    "gate": _gate,
    "dense": _in_subclass,
}


def installed() -> frozenset[str]:
    """Names of the fused ops of this process."""
    return frozenset(_installed)


def install() -> tuple[str, ...]:
    """Register what is asked for and not registered yet; the names."""
    added = tuple(name for name in fused_names.wanted() if name not in _installed)
    for name in added:
        OPS[name]()
        _installed.add(name)
    if added:
        _log.info("fused ops: %s", ", ".join(added))
    return added


def join(model: Any) -> None:
    """Let the fused ops of this process find each other inside a model that was just built."""
    if "router" in _installed:
        from glm_exl3.fused.router_op import join_all

        _log.info("fused router: %d layers", join_all(model))
    if "dense" in _installed:
        from glm_exl3.quant.dense import adopt

        _log.info("dense rows: %d layers beside those with a configuration", adopt(model))
