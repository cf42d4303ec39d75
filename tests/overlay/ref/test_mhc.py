"""Hyper-connections against transformers' module and the written-out definition."""

from __future__ import annotations

import pytest
import torch

from glm_exl3.cpu import torchvision
from glm_exl3.ref import mhc

STREAMS, HIDDEN, TOKENS = 4, 32, 5


@pytest.fixture(scope="module")
def connection():
    torchvision.prepare()
    from transformers import Glm5NextTextConfig
    from transformers.models.glm5_next import modeling_glm5_next as modeling

    config = Glm5NextTextConfig(hidden_size=HIDDEN, hc_mult=STREAMS, rms_norm_eps=1e-5)
    module = modeling.Glm5NextTextHyperConnection(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        module.fn.copy_(torch.randn(module.fn.shape, generator=generator) * 0.1)
        module.base.copy_(torch.randn(module.base.shape, generator=generator))
        module.scale.copy_(torch.rand(3, generator=generator) + 0.5)
    return module


def parameters(module) -> mhc.HyperParameters:
    return mhc.HyperParameters(1e-5, module.hc_eps, module.hc_eps, 2.0, module.hc_sinkhorn_iters)


def test_weights_and_collapse_are_those_of_transformers(connection):
    streams = torch.randn(TOKENS, STREAMS, HIDDEN, generator=torch.Generator().manual_seed(1))
    post, comb, collapsed = connection(streams[None])
    pre, ours_post, ours_comb = mhc.mixing_weights(
        streams, connection.fn, connection.scale, connection.base, parameters(connection)
    )
    torch.testing.assert_close(ours_post[..., 0], post[0])
    torch.testing.assert_close(ours_comb, comb[0])
    torch.testing.assert_close(mhc.collapse(streams, pre), collapsed[0])


def test_the_mix_is_doubly_stochastic():
    comb = mhc.sinkhorn(torch.randn(7, STREAMS, STREAMS), 20, 1e-6)
    torch.testing.assert_close(comb.sum(-2), torch.ones(7, STREAMS), atol=1e-4, rtol=0)
    torch.testing.assert_close(comb.sum(-1), torch.ones(7, STREAMS), atol=2e-2, rtol=0)


def test_collapse_applies_the_norm_weight():
    streams = torch.randn(TOKENS, STREAMS, HIDDEN)
    pre, weight = torch.rand(TOKENS, STREAMS), torch.rand(HIDDEN)
    plain = (pre[..., None] * streams).sum(1)
    expected = plain / (plain.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(mhc.collapse(streams, pre, weight, 1e-5), expected)


def test_expand_mixes_with_the_transposed_weights():
    streams, output = torch.randn(TOKENS, STREAMS, HIDDEN), torch.randn(TOKENS, HIDDEN)
    post, comb = torch.rand(TOKENS, STREAMS, 1), torch.rand(TOKENS, STREAMS, STREAMS)
    expected = torch.zeros_like(streams)
    for target in range(STREAMS):
        for source in range(STREAMS):
            expected[:, target] += comb[:, source, target, None] * streams[:, source]
        expected[:, target] += post[:, target] * output
    torch.testing.assert_close(mhc.expand(output, streams, post, comb), expected)
