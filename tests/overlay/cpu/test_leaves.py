"""Model leaves of the CPU engine: paged states, experts with the clamp, mHC."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from glm_exl3.cpu.leaves import kda, layers, mhc
from glm_exl3.ref import kda as kda_ref
from glm_exl3.ref import mhc as mhc_ref

HEADS, WIDTH = 2, 16


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def starts(*sizes: int) -> torch.Tensor:
    return torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0).int()


def arguments(tokens: int, seed: int = 0) -> dict[str, torch.Tensor]:
    return {
        "q": draw(1, tokens, HEADS, WIDTH, seed=seed),
        "k": draw(1, tokens, HEADS, WIDTH, seed=seed + 1),
        "v": draw(1, tokens, HEADS, WIDTH, seed=seed + 2),
        "g": draw(1, tokens, HEADS, WIDTH, seed=seed + 3),
        "beta": draw(1, tokens, HEADS, seed=seed + 4),
    }


GATE = {"a_log": torch.zeros(1, 1, HEADS, 1), "g_bias": draw(HEADS * WIDTH, seed=9)}


def test_prefill_of_two_requests_equals_each_alone():
    values = arguments(12)
    initial = draw(2, HEADS, WIDTH, WIDTH, seed=7)
    common = {"A_log": GATE["a_log"], "g_bias": GATE["g_bias"]}
    beta = values["beta"].sigmoid()
    parts = (values["q"], values["k"], values["v"], values["g"], beta)
    out, finals = kda.chunk_kda_with_fused_gate(
        *parts, initial_state=initial, cu_seqlens=starts(5, 7), **common
    )
    alone, final = kda.chunk_kda_with_fused_gate(
        *(x[:, 5:] for x in parts), initial_state=initial[1:], cu_seqlens=starts(7), **common
    )
    torch.testing.assert_close(out[:, 5:], alone)
    torch.testing.assert_close(finals[1], final[0])


def test_rejected_drafts_leave_no_trace_in_the_state():
    cache = draw(8, HEADS, WIDTH, WIDTH, seed=5) * 0.1
    table = torch.tensor([[1, 2, 3, 4]], dtype=torch.int32)
    first, second = arguments(4, seed=20), arguments(4, seed=40)
    for values, accepted in ((first, 1), (second, 2)):
        out, _ = kda.fused_recurrent_kda(
            **values,
            initial_state=cache,
            cu_seqlens=starts(4),
            ssm_state_indices=table,
            num_accepted_tokens=torch.tensor([accepted]),
            sigmoid_beta=True,
            **GATE,
        )
    kept = {name: torch.cat([first[name][:, :2], second[name]], dim=1) for name in first}
    state = draw(8, HEADS, WIDTH, WIDTH, seed=5)[1] * 0.1
    gate = kda_ref.bounded_gate(kept["g"][0], GATE["a_log"], GATE["g_bias"], -5.0)
    expected, _ = kda_ref.chunked(
        kda_ref.normalise(kept["q"][0]) * WIDTH**-0.5,
        kda_ref.normalise(kept["k"][0]),
        kept["v"][0],
        gate,
        kept["beta"][0].sigmoid(),
        state,
    )
    torch.testing.assert_close(out[0], expected[2:], atol=1e-5, rtol=1e-4)


def test_the_null_block_is_never_written():
    cache = torch.zeros(3, HEADS, WIDTH, WIDTH)
    kda.scatter_states(cache, draw(2, HEADS, WIDTH, WIDTH), torch.tensor([0, 2]))
    assert int(cache[0].count_nonzero()) == 0
    assert int(cache[2].count_nonzero()) > 0


def test_a_fresh_request_starts_from_zero():
    cache = draw(3, HEADS, WIDTH, WIDTH)
    cache[1] = float("nan")
    found = kda.gather_initial_states(cache, torch.tensor([1, 2]), torch.tensor([False, True]))
    assert torch.equal(found, torch.stack([torch.zeros_like(cache[2]), cache[2]]))


def test_convolution_steps_continue_a_prefill():
    channels, width = 6, 4
    weight, states = draw(channels, width), torch.zeros(4, channels, width)
    tokens = draw(9, channels, seed=3)
    whole = kda.causal_conv1d_fn(
        tokens.t(),
        weight,
        None,
        torch.zeros(4, channels, width),
        starts(9),
        torch.tensor([2]),
        torch.tensor([False]),
    )
    kda.causal_conv1d_fn(
        tokens[:6].t(), weight, None, states, starts(6), torch.tensor([2]), torch.tensor([False])
    )
    for token in range(6, 9):
        out = kda.causal_conv1d_update(
            tokens[token : token + 1], states, weight, None, "silu", torch.tensor([2])
        )
        torch.testing.assert_close(out[0], whole[:, token])


def test_experts_clamp_and_weigh():
    hidden, w13, w2 = draw(3, 8) * 4, draw(4, 12, 8, seed=1) * 4, draw(4, 8, 6, seed=2)
    ids, weights = torch.tensor([[0, 3], [2, 9], [1, 1]]), draw(3, 2, seed=3).abs()
    out = layers.routed_experts(hidden, w13, w2, weights, ids, 10.0)
    for token in range(3):
        expected = torch.zeros(8)
        for choice in range(2):
            expert = int(ids[token, choice])
            if expert > 3:
                continue
            gate, up = (w13[expert] @ hidden[token]).chunk(2)
            assert float(gate.abs().max()) > 10
            value = F.silu(gate.clamp(max=10)) * up.clamp(-10, 10)
            expected += weights[token, choice] * (w2[expert] @ value)
        torch.testing.assert_close(out[token], expected)


def test_the_mtp_input_masks_the_first_position():
    embeds, hidden = draw(2, 8), draw(2, 8, seed=1)
    ones = torch.ones(8)
    out = layers.fused_eh_norm(torch.tensor([0, 3]), embeds, hidden, ones, ones, 1e-6)
    assert int(out[0, :8].count_nonzero()) == 0
    torch.testing.assert_close(out[1, :8], mhc_ref.rms_norm(embeds[1], None, 1e-6))
    torch.testing.assert_close(out[:, 8:], mhc_ref.rms_norm(hidden, None, 1e-6))


def test_both_forms_of_sinkhorn_agree():
    logits = draw(5, 4, 4) * 2
    torch.testing.assert_close(
        mhc.sinkhorn(logits, 20, 1e-6), mhc_ref.sinkhorn(logits, 20, 1e-6), atol=1e-6, rtol=1e-5
    )
