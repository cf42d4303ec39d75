"""Steering: a direction taken out of the residual streams behind a layer.

Where: the streams `[T, N, H]` that a layer leaves exist only after its last `hc_post`, which vLLM
puts off into the next layer's first kernel (the last layer does it before it averages the streams).
transformers' decoder layer returns the same tensor. The projection is over all streams of a token
as one vector, because published directions were measured there; one stream alone, or what a block
writes, are other places with other directions.

How: a layer behind a steered one completes the streams itself, projects them and starts from them,
so the tensor that a drafter taps between the two is the one it was trained on. The last layer does
it in `hc_post`. Streams and directions are the same on all ranks: no collective. Directions are
buffers and nothing is read back, so a graph captures it. Layers that nothing concerns stay as they
are, and without a vector no layer is changed.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.models.glm5next.common.model import Glm5NextDecoderLayer

from glm_exl3.format.donor import EditError, show_layers
from glm_exl3.log import logger
from glm_exl3.quant import glp
from glm_exl3.ref import projection

_log = logger(__name__)
_BEFORE, _AFTER = "steer_before", "steer_after"


class SteeredLayer(Glm5NextDecoderLayer):
    """A layer that gets steered streams, leaves them, or both."""

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None = None,
        post: torch.Tensor | None = None,
        comb: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """As its parent, whose way for completed streams it takes: post and comb None."""
        if post is not None and hasattr(self, _BEFORE):
            streams = super().hc_post(hidden_states, residual, post, comb)
            hidden_states = _project(self, _BEFORE, streams)
            residual = post = comb = None
        return super().forward(positions, hidden_states, residual, post, comb)

    def hc_post(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        post: torch.Tensor,
        comb: torch.Tensor,
    ) -> torch.Tensor:
        """The completed streams `[T, N, H]`; only the last layer asks for its own."""
        streams = super().hc_post(x, residual, post, comb)
        return _project(self, _AFTER, streams) if hasattr(self, _AFTER) else streams


def _project(layer: torch.nn.Module, name: str, streams: torch.Tensor) -> torch.Tensor:
    direction = layer.get_buffer(name)
    return projection.streams(streams, direction, layer.get_buffer(f"{name}_scaled"))


def install(model: Any) -> tuple[int, ...]:
    """Steer the layers of a text model as the settings ask; the layers. Raises EditError."""
    request = glp.requested()
    if request is None:
        return ()
    config = model.config
    if not getattr(config, "mhc", False):
        raise EditError(
            code="steer-model",
            seen="the model has no hyper-connections",
            why="the directions are of its residual streams",
            fix="leave STEER_VECTOR empty",
        )
    layers = int(config.num_hidden_layers)
    steering = glp.load(
        request, streams=int(config.hc_mult), hidden=int(config.hidden_size), layers=layers
    )
    for index, direction in steering.directions.items():
        last = index == layers - 1
        _attach(model.layers[index if last else index + 1], _AFTER if last else _BEFORE,
                torch.from_numpy(direction), steering.alpha)  # fmt: skip
    _log.warning(
        "steering: layers %s, alpha %g, made for %s, SHA-256 %s",
        show_layers(steering.layers),
        steering.alpha,
        steering.base,
        steering.sha256,
    )
    return steering.layers


def _attach(layer: Any, name: str, direction: torch.Tensor, alpha: float) -> None:
    unit = projection.unit(direction).to(layer.hc_attn_fn.device)
    layer.register_buffer(name, unit, persistent=False)
    layer.register_buffer(f"{name}_scaled", unit * alpha, persistent=False)
    layer.__class__ = SteeredLayer
