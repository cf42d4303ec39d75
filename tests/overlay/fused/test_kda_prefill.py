"""Prefill of a KDA layer by its own convolutions: what the parent gets to FlashKDA, uncopied."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.models.glm5next.common import kda
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

from glm_exl3.fused import kda_prefill, kda_step
from glm_exl3.models.attention import PackedLinearAttention
from glm_exl3.ref import conv

HEADS, WIDTH, BLOCKS, PADDED = 2, 8, 6, 12
STARTS, SLOTS = (0, 4, 11), (3, 1)  # the second request goes on
P, COUNT = HEADS * WIDTH, STARTS[-1]


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def convolve(x: torch.Tensor, weight: torch.Tensor, bias: None, **call: Any) -> torch.Tensor:
    """`causal_conv1d_fn` by the reference, with the strides of the real one's output."""
    assert call["activation"] == "silu"
    starts, out = call["query_start_loc"].tolist(), torch.empty_like(x)
    for request, slot in enumerate(call["cache_indices"].tolist()):
        run = slice(starts[request], starts[request + 1])
        state = call["conv_states"][slot]
        before = state * call["has_initial_state"][request]
        out[:, run], after = conv.prefill(x[:, run], before, weight, bias)
        state.copy_(after)
    return out


def gather(state: torch.Tensor, slots: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    return state[slots.long()] * known[:, None, None, None]


def scatter(state: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    state[slots.long()] = rows


class Layer(SimpleNamespace):
    """What is asked of vLLM's layer; FlashKDA is a sum that keeps what it was called with."""

    def __init__(self, *, dim_first: bool = False) -> None:
        weights = [drawn(P, 1, 4).float() * (i + 1) for i in range(3)]
        q, k, v = (SimpleNamespace(weight=weight, bias=None) for weight in weights)
        states = drawn(BLOCKS, 3, 3 * P), drawn(BLOCKS, HEADS, WIDTH, WIDTH).float()
        if dim_first:
            states = states[0].transpose(-1, -2).contiguous(), states[1]
        super().__init__(
            prefix="layer", kda_safe_gate=True, kda_lower_bound=-5.0, kv_cache=states,
            local_num_heads=HEADS, head_dim=WIDTH, local_projection_size=P,
            q_conv1d=q, k_conv1d=k, v_conv1d=v, _merged_conv_weight=None,
            _conv_state_dim_first=dim_first, kda_prefill_backend="flashkda", calls=[],
        )  # fmt: skip

    def _flashkda_prefill(self, **call: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.append({name: value for name, value in call.items() if name != "out"})
        call["out"].copy_(call["q"] + 2 * call["k"] + 3 * call["v"] + call["g"])
        return call["out"], call["initial_state"] + 1


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> GDNAttentionMetadata:
    """Of the step in progress, with the kernels of either way replaced."""
    found = GDNAttentionMetadata(
        num_prefills=2, num_prefill_tokens=COUNT, num_decodes=0, num_decode_tokens=0,
        num_spec_decodes=0, num_spec_decode_tokens=0, num_actual_tokens=COUNT,
        has_initial_state=torch.tensor([False, True]),
        non_spec_query_start_loc=torch.tensor(STARTS, dtype=torch.int32),
        non_spec_state_indices_tensor=torch.tensor(SLOTS, dtype=torch.int32),
    )  # fmt: skip
    context = SimpleNamespace(attn_metadata={"layer": found})
    for module in (kda, kda_step):
        monkeypatch.setattr(module, "get_forward_context", lambda: context)
    for module in (kda, kda_prefill):
        monkeypatch.setattr(module, "causal_conv1d_fn", convolve)
        monkeypatch.setattr(module, "gather_initial_states", gather)
        monkeypatch.setattr(module, "scatter_states", scatter)
    monkeypatch.setattr(kda_prefill, "FEWEST_TOKENS", 1)
    return found


def inputs() -> tuple[torch.Tensor, ...]:
    """qkv as part of wider rows, gate, beta and room for the output; one token is padding."""
    projected = drawn(PADDED, 3 * P + 5)
    core = torch.zeros(1, PADDED, HEADS, WIDTH, dtype=torch.bfloat16)
    return projected[:, : 3 * P], drawn(1, PADDED, HEADS, WIDTH), drawn(1, PADDED, HEADS), core


def test_vllms_convolution_has_the_same_bits_one_by_one(interpreted: Callable[..., str]) -> None:
    assert all(json.loads(interpreted("interpreted_kda_prefill.py")).values())


@pytest.mark.parametrize("dim_first", [False, True])
def test_it_does_what_the_parent_does(metadata, dim_first: bool) -> None:
    ours, theirs = Layer(dim_first=dim_first), Layer(dim_first=dim_first)
    found, wanted = inputs(), inputs()
    assert kda_prefill.attend(ours, *found)
    kda.Glm5NextLinearAttention._forward(theirs, *wanted)
    assert torch.equal(found[3], wanted[3])
    assert found[3][:, :COUNT].abs().min() > 0
    assert not found[3][:, COUNT:].any()
    for mine, parents in zip(ours.kv_cache, theirs.kv_cache, strict=True):
        assert torch.equal(mine, parents)
    [call], [parents_call] = ours.calls, theirs.calls
    assert call.keys() == parents_call.keys()
    for name, value in call.items():
        same = value is None if parents_call[name] is None else torch.equal(
            value, parents_call[name]
        )  # fmt: skip
        assert same, name


def test_q_k_and_v_are_dense(metadata) -> None:
    ours, theirs = Layer(), Layer()
    kda_prefill.attend(ours, *inputs())
    kda.Glm5NextLinearAttention._forward(theirs, *inputs())
    assert all(ours.calls[0][name].is_contiguous() for name in "qkv")
    assert not any(theirs.calls[0][name].is_contiguous() for name in "qkv")


def untouched(layer: Layer, step: tuple[torch.Tensor, ...]) -> bool:
    before = [state.clone() for state in layer.kv_cache]
    taken = kda_prefill.attend(layer, *step)
    same = all(torch.equal(*pair) for pair in zip(before, layer.kv_cache, strict=True))
    return not taken and same and not layer.calls and not step[3].any()


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_prefills", 0), ("spec_sequence_masks", torch.tensor([True, False]))],
)
def test_other_steps_are_the_parents(metadata, name: str, value: object) -> None:
    setattr(metadata, name, value)
    assert untouched(Layer(), inputs())


def test_few_tokens_and_the_other_kernel_are_the_parents(metadata, monkeypatch) -> None:
    other = Layer()
    other.kda_prefill_backend = "triton"
    assert untouched(other, inputs())
    monkeypatch.setattr(kda_prefill, "FEWEST_TOKENS", COUNT + 1)
    assert untouched(Layer(), inputs())


def test_steps_without_metadata_and_captures_are_the_parents(metadata, monkeypatch) -> None:
    stranger = Layer()
    stranger.prefix = "another"
    assert untouched(stranger, inputs())
    capture = SimpleNamespace(current=lambda: object())
    monkeypatch.setattr(kda_prefill, "BreakableCUDAGraphCapture", capture)
    assert untouched(Layer(), inputs())


@pytest.mark.parametrize(("fused", "parents"), [(None, 1), (False, 1), (True, 0)])
def test_the_layer_asks_first(monkeypatch, fused: bool | None, parents: int) -> None:
    seen: list[tuple] = []
    monkeypatch.setattr(kda.Glm5NextLinearAttention, "_forward", lambda _, *step: seen.append(step))
    layer = PackedLinearAttention.__new__(PackedLinearAttention)
    torch.nn.Module.__init__(layer)
    layer._fused_prefill = None if fused is None else lambda *_: fused
    step = inputs()
    layer._forward(*step)
    assert len(seen) == parents
