"""`--load-format exl3_dummy`: random weights for a model built from a folder without any.

Collectors are filled in place of tensors that would arrive from files; everything behind them
(completeness, joining, the back end's layout) is the ordinary path. `model_loader_extra_config` may
hold `seed`. TR3 checkpoints (mcg) share the input scales of gate and up, others do not.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from glm_exl3.dummy.values import DeviceStreams, fill_dense
from glm_exl3.format.errors import GlmExl3Error
from glm_exl3.format.layout import TILE, Codebook
from glm_exl3.log import logger
from glm_exl3.ops.matrix import Exl3Stack
from glm_exl3.quant.edits_apply import apply_edits
from glm_exl3.quant.moe import ExpertCollector
from glm_exl3.quant.params import LinearCollector
from glm_exl3.quant.shards import Shard

NAME = "exl3_dummy"
_log = logger(__name__)


class Exl3DummyLoader(BaseModelLoader):
    """Fills every parameter on the device of the model."""

    def download_model(self, model_config: Any) -> None:
        """Nothing to download."""

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Fill collectors and dense parameters. Raises GlmExl3Error for an unknown option."""
        options = dict(self.load_config.model_loader_extra_config or {})
        seed = int(options.pop("seed", 0))
        if options:
            raise GlmExl3Error(
                code="setting",
                seen=f"model_loader_extra_config has {', '.join(sorted(options))}",
                why=f"load format {NAME} knows the option seed only",
                fix="remove the other options",
            )
        device = next(value.device for value in model.parameters())
        fill_model(model, DeviceStreams(seed, device))
        apply_edits(model, role_of(model))
        _log.warning("weights are random: answers mean nothing (load format %s)", NAME)


def role_of(model: torch.nn.Module) -> str:
    """Which of `edits.ROLES` a model of this architecture has."""
    kinds = {"Exl3Glm5NextMTP": "mtp", "Exl3DFlash2ForCausalLM": "draft"}
    return kinds.get(type(model).__name__, "target")


def fill_model(model: torch.nn.Module, streams: DeviceStreams) -> None:
    """Give every parameter of `model` and every collector in it random values."""
    with torch.no_grad():
        for prefix, module in model.named_modules():
            collector = getattr(module, "exl3_collector", None)
            if isinstance(collector, LinearCollector):
                fill_linear(collector, streams)
            elif isinstance(collector, ExpertCollector):
                fill_experts(collector, streams)
            for leaf, value in module.named_parameters(recurse=False):
                if value.numel() and value.is_floating_point():
                    fill_dense(streams, f"{prefix}.{leaf}", value.data)


def fill_linear(collector: LinearCollector, streams: DeviceStreams) -> None:
    """Local tensors for every shard; parts of one fused checkpoint matrix share input scales."""
    for shard in collector.shards.values():
        for leaf, value in _shard_values(shard, streams, collector.dtype).items():
            collector.store(leaf, value, shard.key)


def _shard_values(
    shard: Shard, streams: DeviceStreams, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    module, part = shard.source.module, f"{shard.source.module}.{shard.source.part}"
    rows, columns = shard.in_cut.padded, shard.out_cut.padded
    if shard.layout is None:
        weight = torch.empty(columns, rows, dtype=dtype, device=streams.device)
        streams.normal_(weight, part, rows**-0.5)
        return {"weight": weight}
    layout = shard.layout
    tiles = (rows // TILE, columns // TILE, layout.last_dim)
    trellis = torch.empty(tiles, dtype=torch.int16, device=streams.device)
    streams.fill_trellis(trellis, part)
    svh = streams.output_scales(f"{part}.svh", layout.codebook, layout.in_features, columns)
    svh[shard.out_cut.stop - shard.out_cut.start :] = 0
    return {
        "trellis": trellis,
        "suh": streams.input_scales(f"{module}.suh", rows),
        "svh": svh,
    }


def fill_experts(collector: ExpertCollector, streams: DeviceStreams) -> None:
    """Both stacks of one layer in place."""
    name = collector.names[0]
    inputs = (collector.w13_layout.in_features, collector.w2_layout.in_features)
    for stack, role, rows in zip((collector.w13, collector.w2), ("w13", "w2"), inputs, strict=True):
        _fill_stack(stack, streams, f"{name}.{role}", rows)
    if collector.w13_layout.codebook is Codebook.MCG:
        collector.w13.suh[:, 1] = collector.w13.suh[:, 0]
    collector.mark_filled()


def _fill_stack(stack: Exl3Stack, streams: DeviceStreams, name: str, inputs: int) -> None:
    streams.fill_trellis(stack.trellis, f"{name}.trellis")
    stack.suh.copy_(streams.input_scales(f"{name}.suh", *stack.suh.shape))
    shape = tuple(stack.svh.shape)
    stack.svh.copy_(streams.output_scales(f"{name}.svh", stack.codebook, inputs, *shape))
