"""vLLM's routed experts over stacked packed matrices.

Expert tensors arrive one by one, up to 145,000 of them, so the stacks are allocated from the
headers before loading and every tensor is cut and copied into its slot at once; a table of filled
slots says at the end what is missing. `w13` holds gate and up as [E, 2, ...], `w2` holds down as
[E, ...]; bits are one number per stack. The intermediate width never leaves the rank, so ranks hold
whole 128-blocks and may differ. `apply` clamps in the order of the Hugging Face model, applies the
routing weights and returns the sum of this rank; vLLM's runner adds shared experts and reduces.

vLLM's own expert loader returns False for names it does not know, and the model then skips the
tensor without a word; the loader here stores, refuses with an error, or says False only for experts
of another rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from glm_exl3.format.errors import FormatError
from glm_exl3.format.layout import TILE, MatrixLayout, codebook_of
from glm_exl3.format.metadata import PACKED_LEAVES
from glm_exl3.format.sharding import Cut
from glm_exl3.ops import library, reference, table
from glm_exl3.ops.matrix import Exl3Stack
from glm_exl3.ops.reference import DenseStack
from glm_exl3.quant.facts import Facts
from glm_exl3.quant.names import EXPERT_SHARDS
from glm_exl3.quant.params import (
    checked_scales,
    checked_trellis,
    cut_scales,
    cut_tiles,
    missing,
)
from glm_exl3.quant.shards import module_cuts

PLACEHOLDERS = tuple(f"{stack}_{leaf}" for stack in ("w13", "w2") for leaf in PACKED_LEAVES)
_ROLE = {"trellis": "trellis", "suh": "suh", "su": "suh", "svh": "svh", "sv": "svh"}


@dataclass(frozen=True)
class ExpertGeometry:
    """Sizes of one layer's experts on this rank; `cut` is in features of the intermediate."""

    hidden: int
    intermediate: int
    cut: Cut
    local_experts: int


def common_layout(facts: Facts, modules: list[str]) -> MatrixLayout:
    """The one layout that all `modules` have. Raises FormatError that names the first that
    differs."""
    first = facts.modules.get(modules[0])
    for module in modules:
        layout = facts.modules.get(module)
        if layout is None or first is None:
            raise missing(facts, f"{module}.trellis")
        same = (layout.trellis_shape, layout.codebook) == (first.trellis_shape, first.codebook)
        if not same:
            raise facts.error(
                f"{module}.trellis",
                code="mixed-experts",
                seen=f"K={layout.bits} {layout.codebook.value} {layout.trellis_shape}, but "
                f"{modules[0]} has K={first.bits} {first.codebook.value} {first.trellis_shape}",
                why="gate and up of all experts of a layer share one stack, and so do all down",
                fix="convert the model with one K and codebook per projection and layer",
            )
    assert first is not None
    return first


class ExpertCollector:
    """The stacks of one layer and which of their slots are filled.

    `names` maps a global expert id to its checkpoint module without the projection.
    """

    def __init__(
        self, geometry: ExpertGeometry, names: list[str], facts: Facts, device: torch.device
    ) -> None:
        self.geometry = geometry
        self.names = names
        self.facts = facts
        self.device = device
        gate_up = [f"{name}.{part}" for name in names for part in ("gate_proj", "up_proj")]
        self.w13_layout = common_layout(facts, gate_up)
        self.w2_layout = common_layout(facts, [f"{name}.down_proj" for name in names])
        self._check_sizes()
        rows, width = Cut(0, geometry.hidden, geometry.hidden), geometry.cut
        experts = geometry.local_experts
        self.w13 = self._allocate((experts, 2), self.w13_layout, rows, width)
        self.w2 = self._allocate((experts,), self.w2_layout, width, rows)
        self._filled: set[tuple[int, str, str]] = set()
        self._local_to_global: dict[int, int] = {}

    def _check_sizes(self) -> None:
        hidden, intermediate = self.geometry.hidden, self.geometry.intermediate
        for layout, part, want in (
            (self.w13_layout, "gate_proj", (hidden, intermediate)),
            (self.w2_layout, "down_proj", (intermediate, hidden)),
        ):
            if (layout.in_features, layout.out_features) != want:
                raise self.facts.error(
                    f"{self.names[0]}.{part}.trellis",
                    code="shape",
                    seen=f"stores {layout.in_features} x {layout.out_features} features, "
                    f"the model needs {want[0]} x {want[1]}",
                    why="configuration and checkpoint do not belong together",
                    fix="use the config.json that was stored with these weights",
                )

    def _allocate(
        self, lead: tuple[int, ...], layout: MatrixLayout, rows: Cut, columns: Cut
    ) -> Exl3Stack:
        tiles = (rows.padded // TILE, columns.padded // TILE, layout.last_dim)
        return Exl3Stack(
            torch.zeros((*lead, *tiles), dtype=torch.int16, device=self.device),
            torch.zeros((*lead, rows.padded), dtype=torch.float16, device=self.device),
            torch.zeros((*lead, columns.padded), dtype=torch.float16, device=self.device),
            layout.codebook,
        )

    def take(self, leaf: str, value: torch.Tensor, shard_id: str, expert: int, slot: int) -> None:
        """Cut one tensor of global expert `expert` and store it in local slot `slot`."""
        projection = EXPERT_SHARDS[shard_id]
        tensor = f"{self.names[expert]}.{projection}.{leaf}"
        self._local_to_global[slot] = expert
        if leaf in ("mcg", "mul1"):
            marker = {leaf: int(value.item())}
            module = f"{self.names[expert]}.{projection}"
            file = self.facts.file_of(tensor)
            codebook_of(module, marker.get("mcg"), marker.get("mul1"), file=file)
            return
        role = _ROLE[leaf]
        if (slot, projection, role) in self._filled:
            raise self._twice(tensor)
        self._filled.add((slot, projection, role))
        stack = self.w2 if shard_id == "w2" else self.w13
        at = (slot,) if shard_id == "w2" else (slot, 0 if shard_id == "w1" else 1)
        getattr(stack, role)[at].copy_(self._local(role, tensor, value, shard_id))

    def _local(self, role: str, tensor: str, value: torch.Tensor, shard_id: str) -> torch.Tensor:
        hidden = Cut(0, self.geometry.hidden, self.geometry.hidden)
        rows, columns = hidden, self.geometry.cut
        layout = self.w13_layout
        if shard_id == "w2":
            rows, columns, layout = columns, hidden, self.w2_layout
        if role == "trellis":
            return cut_tiles(checked_trellis(self.facts, tensor, value, layout), rows, columns)
        if role == "suh":
            return cut_scales(checked_scales(self.facts, tensor, value, layout.in_features), rows)
        return cut_scales(checked_scales(self.facts, tensor, value, layout.out_features), columns)

    def _twice(self, tensor: str) -> FormatError:
        return self.facts.error(
            tensor,
            code="unexpected-tensor",
            seen="this tensor was offered twice",
            why="the second copy would replace the first without a word",
            fix="remove the duplicate from the checkpoint",
        )

    def mark_filled(self) -> None:
        """Count every slot as filled, after the stacks were written as a whole."""
        self._filled = {
            (slot, projection, role)
            for slot in range(self.geometry.local_experts)
            for projection in EXPERT_SHARDS.values()
            for role in ("trellis", "suh", "svh")
        }

    def check_complete(self) -> None:
        """Raise FormatError for the first slot that no tensor filled."""
        for slot in range(self.geometry.local_experts):
            for projection in EXPERT_SHARDS.values():
                for role in ("trellis", "suh", "svh"):
                    if (slot, projection, role) not in self._filled:
                        name = self.names[self._local_to_global.get(slot, slot)]
                        raise missing(self.facts, f"{name}.{projection}.{role}")


@dataclass(frozen=True)
class LoadedExperts:
    """Finished experts: packed stacks, or their decoded twins w13 [E, 2I, H] and w2 [E, H, I]."""

    w13: Exl3Stack | DenseStack
    w2: Exl3Stack | DenseStack
    backend: str

    def apply(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        limit: float | None,
        expert_map: torch.Tensor | None,
    ) -> torch.Tensor:
        """Routed sum of this rank [T, H] in x.dtype."""
        if isinstance(self.w13, DenseStack) and isinstance(self.w2, DenseStack):
            return reference.dense_moe(
                x, topk_ids, topk_weights, self.w13, self.w2, limit, expert_map
            )
        assert isinstance(self.w13, Exl3Stack)
        assert isinstance(self.w2, Exl3Stack)
        return library.moe(
            x,
            topk_ids,
            topk_weights,
            self.w13,
            self.w2,
            limit=limit,
            expert_map=expert_map,
            backend=self.backend,
        )


def finish_experts(collector: ExpertCollector, dtype: torch.dtype) -> LoadedExperts:
    """Complete experts in the form their back end wants. Raises FormatError if a tensor is
    missing."""
    collector.check_complete()
    row = table.choose(table.Device.of(collector.device))
    w13, w2 = collector.w13, collector.w2
    if collector.device.type in row.dense_on_load:
        dense = (reference.dense_experts(w13, dtype), reference.dense_experts(w2, dtype))
        return LoadedExperts(*dense, row.name)
    prepare = getattr(row.load(), "prepare_moe", None)
    if prepare is not None:
        w13, w2 = prepare(w13, w2)
    return LoadedExperts(w13, w2, row.name)


class Exl3MoEMethod(FusedMoEMethodBase):
    """Loads and applies the routed experts of one layer.

    `names` are the checkpoint modules of the experts in order, without the projection.
    """

    def __init__(self, moe_config: Any, facts: Facts, names: list[str]) -> None:
        super().__init__(moe_config)
        self.facts = facts
        self.names = names

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Allocate the stacks from the headers and register placeholders that fill them."""
        if len(self.names) != int(self.moe.num_logical_experts):
            raise FormatError(
                code="experts",
                seen=f"{len(self.names)} experts under {self.names[0]}, the model has "
                f"{self.moe.num_logical_experts}",
                why="configuration and checkpoint do not belong together",
                fix="use the config.json that was stored with these weights",
                tensor=f"{self.names[0]}.gate_proj.trellis",
            )
        intermediate = int(self.moe.intermediate_size)
        gate = f"{self.names[0]}.gate_proj"
        cuts = module_cuts(self.facts, gate, intermediate, int(self.moe.tp_size))
        cut = cuts[int(self.moe.tp_rank)]
        geometry = ExpertGeometry(hidden_size, intermediate, cut, num_experts)
        collector = ExpertCollector(geometry, self.names, self.facts, torch.empty(0).device)
        layer.exl3_collector = collector
        layer.exl3_dtype = params_dtype
        for name in PLACEHOLDERS:
            layer.register_parameter(name, self._placeholder(layer, name))

    def _placeholder(self, layer: Any, name: str) -> torch.nn.Parameter:
        leaf = name.partition("_")[2]
        placeholder = torch.nn.Parameter(
            torch.empty(0, dtype=torch.float16, device=layer.exl3_collector.device),
            requires_grad=False,
        )

        def load(
            param: Any,
            loaded_weight: torch.Tensor,
            weight_name: str,
            shard_id: str,
            expert_id: int,
            return_success: bool = False,
        ) -> bool | None:
            slot = layer._map_global_expert_id_to_local_expert_id(expert_id)
            if slot < 0:
                return False if return_success else None
            layer.exl3_collector.take(leaf, loaded_weight, shard_id, expert_id, slot)
            return True if return_success else None

        placeholder.weight_loader = load
        return placeholder

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """No modular kernel of vLLM takes part."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.exl3 = finish_experts(layer.exl3_collector, layer.exl3_dtype)
        for name in PLACEHOLDERS:
            del layer._parameters[name]
        del layer.exl3_collector

    def apply(  # noqa: PLR0913 - vLLM's signature
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Routed sum of this rank [T, H]; the shared experts are vLLM's to run."""
        loaded: LoadedExperts = layer.exl3
        return loaded.apply(x, topk_ids, topk_weights, layer.swiglu_limit, layer.expert_map)
