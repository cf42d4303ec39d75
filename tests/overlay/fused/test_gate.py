"""The gate of routed experts by the kernel of bf16 rows: when, in which type, and what is left."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.envs
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear

from glm_exl3.fused import install
from glm_exl3.fused.gate_op import RowsGate
from glm_exl3.ops import ext, fused_names

EXPERTS, HIDDEN = 40, 128


def drawn(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(shape[0])
    return torch.randn(*shape, generator=generator).bfloat16()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call of the kernel was urgent; the parent answers None."""
    found: list[bool] = []

    def kernel(x: torch.Tensor, weight: torch.Tensor, urgent: bool, out: torch.Tensor) -> None:
        found.append(urgent)
        out.copy_(x.float() @ weight.float().T)

    monkeypatch.setattr(ext, "runs_on", lambda _: True)
    monkeypatch.setattr(ext, "operators", lambda: SimpleNamespace(dense_rows=kernel))
    monkeypatch.setattr(GateLinear, "forward", lambda self, x: None)
    return found


def gate(**more: Any) -> RowsGate:
    """A gate as vLLM makes it, without the parallel state that it needs for that."""
    made = RowsGate.__new__(RowsGate)
    torch.nn.Module.__init__(made)
    made.weight = torch.nn.Parameter(drawn(EXPERTS, HIDDEN), requires_grad=False)
    made.bias, made.is_unquantized, made.return_bias, made.out_dtype = None, True, True, None
    for name, value in more.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_logits_have_the_type_that_the_router_asks_for(
    asked: list[bool], dtype: torch.dtype | None
) -> None:
    x, made = drawn(3, HIDDEN), gate(out_dtype=dtype)
    logits, bias = made(x)
    assert bias is None and logits.dtype is (dtype or torch.bfloat16)
    wanted = x.float() @ made.weight.float().T
    torch.testing.assert_close(logits.float(), wanted.to(logits.dtype).float(), rtol=0, atol=0)
    assert torch.equal(gate(out_dtype=dtype, return_bias=False)(x), logits)
    assert asked == [True, True]


@pytest.mark.parametrize(
    ("tokens", "more"),
    [
        (17, {}),
        (0, {}),
        (1, {"is_unquantized": False}),
        (1, {"bias": torch.zeros(EXPERTS)}),
        (1, {"out_dtype": torch.float16}),
    ],
)
def test_the_rest_is_the_parents(asked: list[bool], tokens: int, more: dict[str, Any]) -> None:
    assert gate(**more)(drawn(max(tokens, 1), HIDDEN)[:tokens]) is None
    assert not asked


def test_batch_invariance_is_the_parents(
    asked: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm.envs, "VLLM_BATCH_INVARIANT", True)
    assert gate()(drawn(1, HIDDEN)) is None and not asked


@pytest.mark.parametrize(
    ("names", "wanted"),
    [(("gate",), "RowsGate"), (("router",), "RoutingGate"), (("gate", "router"), "RoutingGate")],
)
def test_one_gate_is_registered(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], wanted: str
) -> None:
    registered: list[str] = []

    def register(name: str) -> Any:
        assert name == "GateLinear"
        return lambda layer: registered.append(layer.__name__)

    monkeypatch.setattr(GateLinear, "register_oot", register)
    monkeypatch.setattr(install, "_installed", set())
    monkeypatch.setattr(fused_names, "wanted", lambda: names)
    assert install.install() == names
    assert registered == [wanted]
