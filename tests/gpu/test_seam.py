"""The mHC seam in one CUDA launch: against float64, at every size, early and late, in graphs."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from glm_exl3.fused import mhc_seam, seam_cuda
from glm_exl3.ops import ext
from glm_exl3.ref import mhc

PARAMETERS = mhc.HyperParameters(1e-5, 1e-6, 1e-6, 2.0, 20)
NORM_EPS = 1e-5
TOKENS = [1, 2, 3, 8, 16]
SOME_TOKENS = 5


class Constants(NamedTuple):
    """What is the model's; older than every launch that reads it."""

    fn: torch.Tensor
    scale: torch.Tensor
    base: torch.Tensor
    norm: torch.Tensor


@pytest.fixture(autouse=True)
def _clusters(backend):
    if not seam_cuda.has_kernel(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("needs an NVIDIA GPU whose blocks form clusters")


def normal(generator, *shape):
    return torch.randn(shape, device="cuda", generator=generator)


def constants_of(generator, hidden, magnitude=1.0):
    """Logits have a spread of about `magnitude`."""
    fn = normal(generator, 24, 4 * hidden) * (magnitude / (4 * hidden) ** 0.5)
    scale, base = normal(generator, 3).abs() + 0.5, normal(generator, 24) * 0.5
    norm = (1 + 0.1 * normal(generator, hidden)).bfloat16()
    torch.cuda.synchronize()
    return Constants(fn, scale, base, norm)


def inputs_of(generator, tokens, hidden, magnitude=1.0):
    """x, streams, post and comb."""
    x = (normal(generator, tokens, hidden) * magnitude).bfloat16()
    streams = (normal(generator, tokens, 4, hidden) * magnitude).bfloat16()
    post = normal(generator, tokens, 4, 1).sigmoid() * 2
    comb = mhc.sinkhorn(normal(generator, tokens, 4, 4), 20, 1e-6)
    return x, streams, post, comb


def run(inputs, constants, blocks=0):
    c = constants
    return seam_cuda.seam(*inputs, c.fn, c.scale, c.base, PARAMETERS, c.norm, NORM_EPS, blocks)


def same(found, wanted):
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def in_double(inputs, streams, constants):
    """New streams from the inputs; post, comb and input of the block from rounded new streams."""
    x, old, post, comb = (tensor.double() for tensor in inputs)
    new = comb.transpose(1, 2) @ old + post * x.unsqueeze(1)
    flat, c = streams.double().flatten(1), constants
    mixes = flat @ c.fn.double().T
    mixes *= torch.rsqrt(flat.square().mean(-1, keepdim=True) + PARAMETERS.rms_eps)
    logits = mixes * c.scale.double().repeat_interleave(torch.tensor([4, 4, 16]).cuda())
    pre, post, comb = (logits + c.base.double()).split([4, 4, 16], -1)
    pre = torch.sigmoid(pre) + PARAMETERS.pre_eps
    post = torch.sigmoid(post) * PARAMETERS.post_multiplier
    comb = mhc.sinkhorn(comb.reshape(-1, 4, 4), PARAMETERS.iterations, PARAMETERS.sinkhorn_eps)
    mixed = (pre.unsqueeze(1) @ streams.double()).squeeze(1)
    inverse = torch.rsqrt(mixed.square().mean(-1, keepdim=True) + NORM_EPS)
    return new, post.unsqueeze(-1), comb, mixed * inverse * c.norm.double()


def check(inputs, constants, blocks=0, logits=1.0):
    found = run(inputs, constants, blocks)
    wanted = in_double(inputs, found[0], constants)
    new, post, comb, block_input = (tensor.double() for tensor in found)
    size = max(float(tensor.abs().max()) for tensor in inputs[:2])
    torch.testing.assert_close(new, wanted[0], rtol=2**-8, atol=1e-5 * size)
    torch.testing.assert_close(post, wanted[1], rtol=2e-5 * logits, atol=1e-6)
    torch.testing.assert_close(comb, wanted[2], rtol=1e-4 * logits, atol=1e-6)
    # Rounded twice to bf16; where the streams cancel, as far off as their gates.
    torch.testing.assert_close(block_input, wanted[3], rtol=2**-7, atol=2e-4 * logits)
    assert same(run(inputs, constants, blocks), found)
    return found


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("hidden", seam_cuda.HIDDEN_SIZES)
def test_it_computes_the_reference(generator, hidden, tokens):
    inputs, constants = inputs_of(generator, tokens, hidden), constants_of(generator, hidden)
    assert mhc_seam.path_for(inputs[1], constants.norm) == mhc_seam.CUDA
    found = check(inputs, constants)
    c = constants
    assert same(
        mhc_seam.seam(*inputs, c.fn, c.scale, c.base, PARAMETERS, c.norm, NORM_EPS), found
    )  # fmt: skip


@pytest.mark.parametrize(("hidden", "blocks"), [(512, 1), (1024, 2), (2048, 4), (4096, 8)])
def test_blocks_of_twice_the_columns(generator, hidden, blocks):
    """What many tokens take, and devices whose clusters end at eight blocks; the same bits."""
    inputs, constants = inputs_of(generator, SOME_TOKENS, hidden), constants_of(generator, hidden)
    check(inputs, constants, blocks)
    assert same(run(inputs, constants, blocks), run(inputs, constants, 2 * blocks))


@pytest.mark.parametrize("magnitude", [1e-3, 1e3])
@pytest.mark.parametrize("logits", [0.0, 30.0])
def test_extreme_streams_and_logits(generator, magnitude, logits):
    inputs = inputs_of(generator, SOME_TOKENS, 4096, magnitude)
    check(inputs, constants_of(generator, 4096, logits), logits=max(1.0, logits))


def test_zero_streams(generator):
    inputs = [torch.zeros_like(tensor) for tensor in inputs_of(generator, 2, 1024)]
    found = check(inputs, constants_of(generator, 1024))
    assert not found[0].any() and not found[3].any()


def test_more_tokens_than_are_asked_for(generator):
    check(inputs_of(generator, 100, 4096), constants_of(generator, 4096))


def test_each_column_and_output_meets_its_own_weight(generator):
    """One column of one stream is one and one weight of each output: logits are its place."""
    hidden = 4096
    constants = constants_of(generator, hidden, 0.0)
    places = torch.randint(4 * hidden, (24,), device="cuda", generator=generator)
    weights = torch.linspace(-1, 1, 24, device="cuda") / hidden**0.5
    constants.fn[torch.arange(24, device="cuda"), places] = weights
    torch.cuda.synchronize()
    x = torch.zeros(24, hidden, device="cuda", dtype=torch.bfloat16)
    streams = torch.zeros(24, 4 * hidden, device="cuda", dtype=torch.bfloat16)
    streams[torch.arange(24, device="cuda"), places] = 1
    post = torch.zeros(24, 4, 1, device="cuda")
    comb = torch.eye(4, device="cuda").repeat(24, 1, 1)
    check((x, streams.view(24, 4, hidden), post, comb), constants)


def test_a_token_does_not_depend_on_its_neighbours(generator):
    inputs, constants = inputs_of(generator, 16, 4096), constants_of(generator, 4096)
    together = run(inputs, constants)
    for tokens in (1, 2, 5):
        alone = run([tensor[:tokens] for tensor in inputs], constants)
        assert same(alone, [tensor[:tokens] for tensor in together])
    last = run([tensor[15:] for tensor in inputs], constants)
    assert same(last, [tensor[15:] for tensor in together])


def chained(start, constants, buffers):
    """A call for each of `constants`, on two sets of buffers in turn, no other launch between."""
    numbers = (PARAMETERS.rms_eps, PARAMETERS.pre_eps, PARAMETERS.sinkhorn_eps)
    numbers += (PARAMETERS.post_multiplier, NORM_EPS, PARAMETERS.iterations, 0)
    for step, own in enumerate(constants):
        made = buffers[step % 2]
        ext.operators().seam(*start, *own, *numbers, *made)
        start = (made[3], *made[:3])
    return made


@pytest.mark.parametrize("tokens", [1, 16])
def test_launching_early_changes_nothing(generator, monkeypatch, tokens):
    """A read or write before the end of the call ahead would show in a graph of nothing else."""
    constants = [constants_of(generator, 4096) for _ in range(30)]
    start = inputs_of(generator, tokens, 4096)
    wanted = (start[1], start[2], start[3], start[0])
    for own in constants:
        wanted = run((wanted[3], *wanted[:3]), own)
    for early in ("0", "1"):
        monkeypatch.setenv("GLM_EXL3_EARLY_LAUNCH", early)
        buffers = [[torch.empty_like(tensor) for tensor in wanted] for _ in range(2)]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = chained(start, constants, buffers)
        for _ in range(5):
            graph.replay()
            torch.cuda.synchronize()
            assert same(found, wanted)


def test_a_graph_replays_it_with_other_inputs(generator):
    inputs, constants = inputs_of(generator, 4, 4096), constants_of(generator, 4096)
    run(inputs, constants)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = run(inputs, constants)
        second = run((first[3], *first[:3]), constants)
    for _ in range(3):
        for held, new in zip(inputs, inputs_of(generator, 4, 4096), strict=True):
            held.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        wanted = run(inputs, constants)
        assert same(first, wanted)
        assert same(second, run((wanted[3], *wanted[:3]), constants))


def test_two_streams_at_once(generator):
    calls = [
        (inputs_of(generator, tokens, 4096), constants_of(generator, 4096)) for tokens in (2, 3)
    ]
    wanted = [run(*call) for call in calls]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in calls]
    found = [[], []]
    for _ in range(50):
        for stream, call, results in zip(streams, calls, found, strict=True):
            with torch.cuda.stream(stream):
                results.append(run(*call))
    torch.cuda.synchronize()
    for results, right in zip(found, wanted, strict=True):
        assert all(same(result, right) for result in results)


def test_what_it_cannot_read_is_refused(generator):
    inputs, constants = inputs_of(generator, 1, 512), constants_of(generator, 512)
    with pytest.raises(RuntimeError, match="fn must be contiguous"):
        run(inputs, constants._replace(fn=constants.fn[:23]))
    moved = torch.cat([constants.fn.flatten(), constants.fn[0, :1]])[1:].view(24, -1)
    with pytest.raises(RuntimeError, match="16 bytes"):
        run(inputs, constants._replace(fn=moved))
    with pytest.raises(RuntimeError, match="hidden size 384"):
        run(inputs_of(generator, 1, 384), constants_of(generator, 384))


def test_other_hidden_sizes_take_another_kernel(generator):
    for hidden, path in ((128, mhc_seam.TRITON), (384, None), (8192, mhc_seam.TRITON)):
        inputs, constants = inputs_of(generator, 1, hidden), constants_of(generator, hidden)
        assert mhc_seam.path_for(inputs[1], constants.norm) == path
