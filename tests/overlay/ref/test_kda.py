"""KDA against transformers' recurrent form."""

from __future__ import annotations

import pytest
import torch

from glm_exl3.cpu import torchvision
from glm_exl3.ref import kda

HEADS, WIDTH = 3, 16


@pytest.fixture(scope="module")
def recurrent():
    torchvision.prepare()
    from transformers.models.glm5_next import modeling_glm5_next as modeling

    return modeling.recurrent_kimi_delta_attention


def sample(length: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    q, k, v = (draw(length, HEADS, WIDTH) for _ in range(3))
    gate = -5 * torch.sigmoid(draw(length, HEADS, WIDTH) * 3)
    return q, k, v, gate, torch.sigmoid(draw(length, HEADS)), draw(HEADS, WIDTH, WIDTH)


def reference(recurrent, q, k, v, gate, beta, state):
    out, final = recurrent(
        *(x[None] for x in (q, k, v)),
        g=gate[None],
        beta=beta[None],
        initial_state=state.transpose(1, 2)[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return out[0], final[0].transpose(1, 2)


@pytest.mark.parametrize("length", [1, 5, 16, 17, 50])
def test_chunks_equal_the_recurrent_form(recurrent, length):
    q, k, v, gate, beta, state = sample(length)
    expected, final = reference(recurrent, q, k, v, gate, beta, state)
    scaled = kda.normalise(q) * WIDTH**-0.5
    out, last = kda.chunked(scaled, kda.normalise(k), v, gate, beta, state)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(last, final, atol=2e-5, rtol=1e-4)


def test_chunks_stay_finite_at_the_gate_bound():
    q, k, v, gate, beta, state = sample(64)
    gate = torch.full_like(gate, -5.0)
    out, last = kda.chunked(kda.normalise(q), kda.normalise(k), v, gate, beta, state)
    assert out.isfinite().all()
    assert last.isfinite().all()


def test_steps_equal_the_recurrent_form(recurrent):
    q, k, v, gate, beta, state = sample(7, seed=3)
    expected, final = reference(recurrent, q, k, v, gate, beta, state)
    scaled, keys = kda.normalise(q) * WIDTH**-0.5, kda.normalise(k)
    outs = []
    for token in range(7):
        o, state = kda.step(
            state, scaled[token], keys[token], v[token], gate[token].exp(), beta[token]
        )
        outs.append(o)
    torch.testing.assert_close(torch.stack(outs), expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(state, final, atol=2e-5, rtol=1e-4)


def test_a_step_gives_the_same_bits_in_any_batch():
    q, k, v, gate, beta, _ = sample(4)
    states = torch.randn(4, HEADS, WIDTH, WIDTH)
    flat = (x.flatten(0, 1) for x in (states, q, k, v, gate.exp()))
    together, _ = kda.step(*flat, beta.flatten())
    alone, _ = kda.step(states[2], q[2], k[2], v[2], gate[2].exp(), beta[2])
    assert torch.equal(together.view(4, HEADS, WIDTH)[2], alone)


def test_the_gate_is_bounded_and_sloped_per_head():
    raw, bias = torch.randn(6, HEADS, WIDTH), torch.randn(HEADS * WIDTH)
    a_log = torch.tensor([0.0, 0.5, 1.0]).view(1, 1, HEADS, 1)
    gate = kda.bounded_gate(raw, a_log, bias, -5.0)
    head = -5 / (1 + torch.exp(-torch.tensor(0.5).exp() * (raw[:, 1] + bias[WIDTH : 2 * WIDTH])))
    torch.testing.assert_close(gate[:, 1], head)
    assert float(gate.min()) >= -5
    assert float(gate.max()) <= 0


def test_chunk_length_bounds_the_exponent():
    assert kda.chunk_length(-5.0) == 16
    assert kda.chunk_length(-100.0) == 1
