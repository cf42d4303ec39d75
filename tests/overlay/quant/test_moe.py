"""Routed experts: loading through vLLM's signatures, cuts, clamp, expert parallelism, refusals."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from glm_exl3.format.errors import FormatError
from glm_exl3.format.layout import Codebook
from glm_exl3.ref.moe import Exl3Stack, exl3_moe

HIDDEN, EXPERTS, LIMIT = 256, 4, 0.8
NAMES = [f"model.layers.1.mlp.experts.{e}" for e in range(EXPERTS)]
SHARDS = (("w1", "gate_proj", "w13"), ("w3", "up_proj", "w13"), ("w2", "down_proj", "w2"))


class Experts:
    """Random experts as checkpoint tensors and as the whole stacks of one rank."""

    def __init__(self, packed, width: int, bits13: float = 2, bits2: float = 3) -> None:
        self.width = width
        self.parts = {
            name: {
                "gate_proj": packed(HIDDEN, width, bits13),
                "up_proj": packed(HIDDEN, width, bits13),
                "down_proj": packed(width, HIDDEN, bits2),
            }
            for name in NAMES
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for name, parts in self.parts.items():
            for part, matrix in parts.items():
                found |= matrix.named(f"{name}.{part}")
        return found

    def stacks(self) -> tuple[Exl3Stack, Exl3Stack]:
        def stack(*parts: str) -> Exl3Stack:
            rows = [[self.parts[n][p].matrix for p in parts] for n in NAMES]

            def field(name: str) -> torch.Tensor:
                value = torch.stack([torch.stack([getattr(m, name) for m in r]) for r in rows])
                return value if len(parts) > 1 else value[:, 0]

            return Exl3Stack(field("trellis"), field("suh"), field("svh"), Codebook.MCG)

        return stack("gate_proj", "up_proj"), stack("down_proj")


class Layer(torch.nn.Module):
    """What the method sees of vLLM's RoutedExperts."""

    def __init__(self, expert_map: torch.Tensor | None = None) -> None:
        super().__init__()
        self.expert_map = expert_map
        self.swiglu_limit = LIMIT

    def _map_global_expert_id_to_local_expert_id(self, expert: int) -> int:
        return expert if self.expert_map is None else int(self.expert_map[expert])


def build(config, width: int, rank: int = 0, ranks: int = 1, expert_map=None, local=EXPERTS):
    from glm_exl3.quant.moe import Exl3MoEMethod

    moe = SimpleNamespace(
        num_logical_experts=EXPERTS, intermediate_size=width, tp_rank=rank, tp_size=ranks
    )
    method = Exl3MoEMethod(moe, config.facts, config.expert_names("model.layers.1.mlp.experts"))
    layer = Layer(expert_map)
    method.create_weights(layer, local, HIDDEN, width // ranks, torch.float32)
    return method, layer


def offer(layer: Layer, experts: Experts, skip: tuple[str, ...] = ()) -> list[bool]:
    answers = []
    for expert, name in enumerate(NAMES):
        for shard, part, stack in SHARDS:
            for leaf, value in experts.parts[name][part].tensors.items():
                if f"{name}.{part}.{leaf}" in skip:
                    continue
                param = getattr(layer, f"{stack}_{leaf}")
                answers.append(
                    param.weight_loader(
                        param,
                        value,
                        f"experts.routed_experts.{stack}_{leaf}",
                        expert_id=expert,
                        shard_id=shard,
                        return_success=True,
                    )
                )
    return answers


def routing() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    x = torch.randn(7, HIDDEN, generator=random)
    ids = torch.stack([torch.randperm(EXPERTS, generator=random)[:2] for _ in range(7)])
    return x, ids.to(torch.int32), torch.rand(7, 2, generator=random)


def want(experts: Experts) -> torch.Tensor:
    x, ids, weights = routing()
    return exl3_moe(x, ids, weights, *experts.stacks(), LIMIT)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("width", [512, 640])
def test_ranks_sum_to_the_whole(ranks: int, width: int, packed, exl3_config) -> None:
    experts = Experts(packed, width)
    config = exl3_config(experts.tensors())
    x, ids, weights = routing()
    total = torch.zeros_like(x)
    for rank in range(ranks):
        method, layer = build(config, width, rank, ranks)
        assert all(offer(layer, experts))
        method.process_weights_after_loading(layer)
        total += method.apply(layer, x, weights, ids)
    torch.testing.assert_close(total, want(experts), rtol=1e-3, atol=5e-4)


def test_the_clamp_is_reached_in_this_test(packed) -> None:
    experts = Experts(packed, 128)
    x, ids, weights = routing()
    free = exl3_moe(x, ids, weights, *experts.stacks(), None)
    assert (free - want(experts)).abs().max() > 0.05


def test_packed_stacks_give_the_same_as_decoded_ones(packed, exl3_config) -> None:
    from glm_exl3.quant.moe import LoadedExperts

    experts = Experts(packed, 128)
    x, ids, weights = routing()
    loaded = LoadedExperts(*experts.stacks(), "reference")
    torch.testing.assert_close(loaded.apply(x, ids, weights, LIMIT, None), want(experts))


def test_expert_parallel_ranks_sum_to_the_whole(packed, exl3_config) -> None:
    experts = Experts(packed, 256)
    config = exl3_config(experts.tensors())
    x, ids, weights = routing()
    total = torch.zeros_like(x)
    for mine in ((0, 3), (1, 2)):
        expert_map = torch.full((EXPERTS,), -1, dtype=torch.int32)
        expert_map[list(mine)] = torch.arange(2, dtype=torch.int32)
        method, layer = build(config, 256, expert_map=expert_map, local=2)
        answers = offer(layer, experts)
        assert answers.count(True) == 2 * len(answers) // EXPERTS
        method.process_weights_after_loading(layer)
        total += method.apply(layer, x, weights, ids)
    torch.testing.assert_close(total, want(experts), rtol=1e-3, atol=5e-4)


@pytest.mark.parametrize("leaf", ["trellis", "suh", "svh"])
def test_a_tensor_that_never_comes_is_named(leaf: str, packed, exl3_config) -> None:
    experts = Experts(packed, 128)
    method, layer = build(exl3_config(experts.tensors()), 128)
    name = f"{NAMES[2]}.up_proj.{leaf}"
    offer(layer, experts, skip=(name,))
    with pytest.raises(FormatError, match=name.replace(".", r"\.")) as error:
        method.process_weights_after_loading(layer)
    assert error.value.file


def test_a_tensor_that_comes_twice_is_refused(packed, exl3_config) -> None:
    experts = Experts(packed, 128)
    _, layer = build(exl3_config(experts.tensors()), 128)
    offer(layer, experts)
    with pytest.raises(FormatError, match="twice"):
        offer(layer, experts)


def test_experts_with_different_bits_are_refused(packed, exl3_config) -> None:
    experts = Experts(packed, 128)
    experts.parts[NAMES[1]]["gate_proj"] = packed(HIDDEN, 128, 3)
    experts.parts[NAMES[1]]["up_proj"] = packed(HIDDEN, 128, 3)
    config = exl3_config(experts.tensors())
    with pytest.raises(FormatError, match=r"experts\.1\.gate_proj\.trellis: K=3"):
        build(config, 128)


def test_gate_and_up_with_different_bits_are_refused(packed, exl3_config) -> None:
    experts = Experts(packed, 128)
    experts.parts[NAMES[1]]["up_proj"] = packed(HIDDEN, 128, 3)
    with pytest.raises(FormatError, match=r"experts\.1\.up_proj\.trellis"):
        exl3_config(experts.tensors())


def test_a_missing_expert_is_refused(packed, exl3_config) -> None:
    experts = Experts(packed, 128)
    tensors = {k: v for k, v in experts.tensors().items() if not k.startswith(NAMES[3])}
    config = exl3_config(tensors)
    with pytest.raises(FormatError, match="3 experts .* the model has 4"):
        build(config, 128)


def test_non_finite_scales_are_refused(packed, exl3_config) -> None:
    experts = Experts(packed, 128)
    _, layer = build(exl3_config(experts.tensors()), 128)
    bad = experts.parts[NAMES[0]]["down_proj"].tensors
    bad["svh"] = bad["svh"].clone()
    bad["svh"][3] = float("nan")
    with pytest.raises(FormatError, match=r"experts\.0\.down_proj\.svh.*not finite"):
        offer(layer, experts)


def test_ranks_without_a_block_are_refused(packed, exl3_config) -> None:
    experts = Experts(packed, 128)
    config = exl3_config(experts.tensors())
    with pytest.raises(FormatError, match="TP cannot cut 128 features"):
        build(config, 128, 1, 2)
