"""Attention references against torch's and against each other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from glm_exl3.ref import attention


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_sparse_attention_sees_only_valid_rows():
    q, rows = draw(3, 2, 8), draw(3, 5, 8, seed=1)
    valid = torch.tensor([[1, 1, 0, 0, 0], [1, 0, 1, 0, 1], [0, 0, 0, 0, 0]], dtype=torch.bool)
    out = attention.sparse_mqa(q, rows, valid, 0.5, 6)
    for token in range(2):
        kept = rows[token][valid[token]]
        weights = torch.softmax(q[token] @ kept.t() * 0.5, dim=-1)
        torch.testing.assert_close(out[token], weights @ kept[:, :6])
    assert torch.equal(out[2], torch.zeros(2, 6))


def test_masked_attention_equals_sparse_attention():
    q, rows = draw(4, 2, 8), draw(9, 8, seed=2)
    valid = draw(4, 9, seed=3) > 0
    valid[:, 0] = True
    sparse = attention.sparse_mqa(q, rows.expand(4, 9, 8), valid, 0.3, 8)
    torch.testing.assert_close(attention.masked_mqa(q, rows, valid, 0.3, 8), sparse)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 3])
def test_grouped_query_equals_torch(causal, window):
    q, k, v = draw(4, 6, 8), draw(7, 2, 8, seed=4), draw(7, 2, 8, seed=5)
    mask = attention.visible(4, 7, causal=causal, window=window)
    keys, values = (x.repeat_interleave(3, dim=1).transpose(0, 1) for x in (k, v))
    expected = F.scaled_dot_product_attention(
        q.transpose(0, 1), keys, values, attn_mask=mask, scale=0.2
    )
    out = attention.grouped_query(q, k, v, mask, 0.2)
    torch.testing.assert_close(out, expected.transpose(0, 1))


def test_visibility_is_that_of_the_last_positions():
    causal = attention.visible(2, 4, causal=True, window=2)
    assert causal.int().tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]
    both = attention.visible(2, 4, causal=False, window=2)
    assert both.int().tolist() == [[0, 1, 1, 1], [0, 0, 1, 1]]


def test_a_token_gets_the_same_bits_alone():
    q, rows = draw(5, 2, 8), draw(5, 6, 8, seed=6)
    valid = torch.ones(5, 6, dtype=torch.bool)
    together = attention.sparse_mqa(q, rows, valid, 0.5, 8)
    alone = attention.sparse_mqa(q[2:3], rows[2:3], valid[2:3], 0.5, 8)
    assert torch.equal(together[2:3], alone)
