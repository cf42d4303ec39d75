"""Routed experts against the reference in float64."""

from __future__ import annotations

import math

import pytest
import torch
from gpu_cases import (
    FAST_RATES,
    LIMIT,
    MCG,
    MOE_TOLERANCE,
    MUL1,
    OTHER_RATES,
    error,
    moe_in_double,
    random_stacks,
    run_moe,
)

from glm_exl3.ops.matrix import Exl3Stack
from glm_exl3.ops.tuning import Step
from kernels.inputs import Routed, random_routing

WARPS = Step("tiled", product="warp")


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 9, 16, 33, 64, 128, 129, 400])
@pytest.mark.parametrize(("codebook", "last_dim"), FAST_RATES)
def test_fast_rates(backend, generator, codebook, last_dim, tokens, same):
    """640 and 384 are odd numbers of 128: tails for kernels that take 256 columns."""
    stacks = random_stacks(generator, 16, 640, 384, last_dim, codebook, same_suh=same)
    call = random_routing(tokens, 640, 16, 8, generator)
    found = run_moe(backend, call, *stacks)
    assert found.dtype is torch.bfloat16
    assert error(found, moe_in_double(call, *stacks)) < MOE_TOLERANCE


@pytest.mark.parametrize("tokens", [1, 8, 100, 2048, 16384])
@pytest.mark.parametrize(("codebook", "last_dim"), [(MCG, 64), (MUL1, 48)])
def test_shapes_of_the_model(backend, generator, codebook, last_dim, tokens):
    stacks = random_stacks(generator, 24, 4096, 2048, last_dim, codebook)
    call = random_routing(tokens, 4096, 24, 8, generator)
    assert error(run_moe(backend, call, *stacks), moe_in_double(call, *stacks)) < MOE_TOLERANCE


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("tokens", [129, 400, 1500])
@pytest.mark.parametrize(("codebook", "last_dim"), FAST_RATES)
def test_tiles_of_warps_serve_every_architecture(
    backend, generator, codebook, last_dim, tokens, same
):
    """1,500 tokens on 8 experts fill tiles of 128 rows and leave shorter ones."""
    stacks = random_stacks(generator, 8, 640, 384, last_dim, codebook, same_suh=same)
    prepared = backend.prepare_moe(*stacks)
    call = random_routing(tokens, 640, 8, 3, generator)
    arguments = (call.x, call.ids, call.weights, *prepared, LIMIT)
    found = backend.moe(*arguments, how=WARPS)
    assert error(found, moe_in_double(call, *stacks)) < MOE_TOLERANCE
    assert torch.equal(found, backend.moe(*arguments, how=WARPS))


def test_tiles_of_warps_leave_out_experts_of_other_ranks(backend, generator):
    stacks = random_stacks(generator, 3, 256, 256, 64, MCG)
    expert_map = torch.tensor([-1, 2, -1, 0, 1, -1], dtype=torch.int32, device="cuda")
    call = random_routing(300, 256, 6, 2, generator)
    found = backend.moe(call.x, call.ids, call.weights, *stacks, LIMIT, expert_map, how=WARPS)
    assert error(found, moe_in_double(call, *stacks, expert_map=expert_map)) < MOE_TOLERANCE


@pytest.mark.parametrize("tokens", [1, 5, 200])
@pytest.mark.parametrize(("codebook", "last_dim"), OTHER_RATES)
def test_other_rates_take_the_general_way(backend, generator, codebook, last_dim, tokens):
    stacks = random_stacks(generator, 4, 256, 128, last_dim, codebook)
    call = random_routing(tokens, 256, 4, 2, generator)
    assert error(run_moe(backend, call, *stacks), moe_in_double(call, *stacks)) < MOE_TOLERANCE


@pytest.mark.parametrize("tokens", [1, 20, 200])
@pytest.mark.parametrize("last_dim", [64, 112])
def test_rates_may_differ_between_projections(backend, generator, last_dim, tokens):
    """With 112 the down projection has no fast kernel and both take the general way."""
    w13, _ = random_stacks(generator, 8, 256, 256, 48, MUL1)
    _, w2 = random_stacks(generator, 8, 256, 256, last_dim, MCG)
    call = random_routing(tokens, 256, 8, 4, generator)
    assert error(run_moe(backend, call, w13, w2), moe_in_double(call, w13, w2)) < MOE_TOLERANCE


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("tokens", [1, 8, 40, 200])
def test_fp16_inputs_and_both_kinds_of_ids(backend, generator, tokens, ids):
    stacks = random_stacks(generator, 16, 512, 256, 64, MCG)
    call = random_routing(tokens, 512, 16, 8, generator, torch.float16)
    call = Routed(call.x, call.ids.to(ids), call.weights)
    found = run_moe(backend, call, *stacks)
    assert found.dtype is torch.float16
    assert error(found, moe_in_double(call, *stacks)) < MOE_TOLERANCE


@pytest.mark.parametrize("tokens", [1, 8, 40, 200])
@pytest.mark.parametrize(
    ("limit", "outlier"), [(LIMIT, 1e4), (LIMIT, 50.0), (None, 50.0), (0.5, 1)]
)
def test_limits_and_outliers(backend, generator, tokens, limit, outlier):
    """A limit far below the outlier leaves next to nothing but the rounding of near-zero gates."""
    stacks = random_stacks(generator, 16, 512, 256, 64, MCG, same_suh=False)
    call = random_routing(tokens, 512, 16, 8, generator)
    call.x[0, 7] = outlier
    found, wanted = run_moe(backend, call, *stacks, limit), moe_in_double(call, *stacks, limit)
    assert error(found[:1], wanted[:1]) < MOE_TOLERANCE
    assert tokens == 1 or error(found[1:], wanted[1:]) < MOE_TOLERANCE


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("tokens", [1, 8, 40, 200])
@pytest.mark.parametrize(("codebook", "last_dim"), [(MCG, 64), (MUL1, 48)])
def test_what_is_no_number_stays_in_its_row(backend, generator, codebook, last_dim, tokens, bad):
    stacks = random_stacks(generator, 16, 512, 256, last_dim, codebook)
    call = random_routing(tokens, 512, 16, 4, generator)
    clean = run_moe(backend, call, *stacks)
    call.x[0, 300] = bad
    found = run_moe(backend, call, *stacks)
    assert found[0].isnan().all()
    assert torch.equal(found[1:], clean[1:])


@pytest.mark.parametrize("tokens", [1, 20, 200])
def test_an_expert_map_adds_local_experts_only(backend, generator, tokens):
    stacks = random_stacks(generator, 11, 512, 256, 64, MCG)
    expert_map = torch.full((64,), -1, dtype=torch.int32, device="cuda")
    expert_map[::6] = torch.arange(11, dtype=torch.int32, device="cuda")
    call = random_routing(tokens, 512, 64, 8, generator)
    call.ids[0] = torch.arange(1, 9, device="cuda").int()
    call.ids[0, 5] = 7
    found = run_moe(backend, call, *stacks, expert_map=expert_map)
    assert not found[0].any()
    if tokens > 1:
        wanted = moe_in_double(call, *stacks, expert_map=expert_map)
        assert error(found, wanted) < MOE_TOLERANCE


@pytest.mark.parametrize("tokens", [1, 20, 200])
def test_expert_shards_sum_to_the_whole(backend, generator, tokens):
    w13, w2 = random_stacks(generator, 12, 512, 256, 64, MCG)
    call = random_routing(tokens, 512, 12, 4, generator)
    total = torch.zeros(tokens, 512, dtype=torch.float64, device="cuda")
    for begin, end in ((0, 5), (5, 12)):
        expert_map = torch.full((12,), -1, dtype=torch.int32, device="cuda")
        expert_map[begin:end] = torch.arange(end - begin, dtype=torch.int32, device="cuda")
        part = [
            Exl3Stack(w.trellis[begin:end], w.suh[begin:end], w.svh[begin:end], MCG)
            for w in (w13, w2)
        ]
        total += run_moe(backend, call, *part, expert_map=expert_map).double()
    assert error(total, moe_in_double(call, w13, w2)) < MOE_TOLERANCE


@pytest.mark.parametrize("tokens", [1, 20, 200])
@pytest.mark.parametrize(("codebook", "last_dim"), [(MCG, 64), (MUL1, 48)])
def test_cuts_of_the_intermediate_sum_to_the_whole(backend, generator, codebook, last_dim, tokens):
    w13, w2 = random_stacks(generator, 8, 512, 640, last_dim, codebook)
    call = random_routing(tokens, 512, 8, 4, generator)
    total = torch.zeros(tokens, 512, dtype=torch.float64, device="cuda")
    for begin, end in ((0, 384), (384, 640)):
        tiles = slice(begin // 16, end // 16)
        gate_up = w13.trellis[:, :, :, tiles].contiguous(), w13.suh, w13.svh[..., begin:end]
        down = w2.trellis[:, tiles].contiguous(), w2.suh[:, begin:end].contiguous(), w2.svh
        part = (
            Exl3Stack(*(t.contiguous() for t in gate_up), codebook),
            Exl3Stack(*down, codebook),
        )
        total += run_moe(backend, call, *part).double()
    assert error(total, moe_in_double(call, w13, w2)) < MOE_TOLERANCE


@pytest.mark.parametrize("tokens", [8, 40, 700])
def test_one_fat_and_many_empty_experts(backend, generator, tokens):
    stacks = random_stacks(generator, 64, 256, 256, 64, MCG)
    call = random_routing(tokens, 256, 16, 4, generator)
    call.ids[:, 0] = 40
    found = run_moe(backend, call, *stacks, None)
    assert error(found, moe_in_double(call, *stacks, None)) < MOE_TOLERANCE


@pytest.mark.parametrize("tokens", [3, 300])
def test_one_expert_may_have_every_row(backend, generator, tokens):
    stacks = random_stacks(generator, 8, 256, 256, 64, MCG)
    call = random_routing(tokens, 256, 8, 1, generator)
    call.ids.fill_(5)
    assert error(run_moe(backend, call, *stacks), moe_in_double(call, *stacks)) < MOE_TOLERANCE


def test_prepare_joins_equal_scales_only(backend, generator):
    w13, w2 = random_stacks(generator, 4, 256, 128, 64, MCG, same_suh=False)
    assert backend.prepare_moe(w13, w2)[0] is w13
    joined = Exl3Stack(w13.trellis, w13.suh[:, :1].expand(-1, 2, -1).contiguous(), w13.svh, MCG)
    assert backend.prepare_moe(joined, w2)[0].suh.shape == (4, 1, 256)


def test_no_tokens(backend, generator):
    stacks = random_stacks(generator, 4, 256, 128, 64, MCG)
    call = random_routing(0, 256, 4, 2, generator)
    assert run_moe(backend, call, *stacks).shape == (0, 256)


def test_the_custom_operation_has_a_true_fake(generator):
    from glm_exl3.ops import library

    assert library
    w13, w2 = random_stacks(generator, 4, 256, 128, 64, MCG)
    call = random_routing(3, 256, 4, 2, generator)
    flat = [(w.trellis, w.suh, w.svh, w.codebook.value) for w in (w13, w2)]
    torch.library.opcheck(
        torch.ops.glm_exl3.exl3_moe.default,
        (call.x, call.ids, call.weights, *flat[0], *flat[1], LIMIT, None, "cuda"),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize("split", [0, 1, 2, 4])
@pytest.mark.parametrize("width", [1024, 2048])
@pytest.mark.parametrize("same", [True, False])
def test_where_inputs_are_rotated_changes_no_bit(backend, generator, width, split, same):
    """Few blocks rotate for themselves, more of them read what a launch of its own has rotated."""
    stacks = backend.prepare_moe(
        *random_stacks(generator, 16, 1024, width, 48, MUL1, same_suh=same)
    )  # fmt: skip
    call = random_routing(8, 1024, 16, 8, generator)
    call.x[3, 17] = 1e4
    how = Step("streamed", split_k=split)

    def outputs(tokens: int) -> torch.Tensor:
        few = (part[:tokens] for part in (call.x, call.ids, call.weights))
        return backend.moe(*few, *stacks, LIMIT, how=how)

    together = outputs(8)
    for tokens in range(1, 8):
        assert torch.equal(outputs(tokens), together[:tokens])
