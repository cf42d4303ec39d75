"""Why the experts take longer in a step than alone: one expert block of the model, in variants.

    python -m e2e.layers RESULT.json [--tokens 1,4,16] [--layers 4] [--orders vllm,serial]

A block is what vLLM runs per layer: gate, selection, shared expert, routed experts, their sum, at
the real size of the `full` family (288 experts K3, shared expert K5). Every figure is microseconds
per block inside a CUDA graph over the weights of several layers. ORDERS say what runs where,
SETTINGS change the kernels; every variant's sum must equal the first one's to the bit. `timeline`
holds start and duration of each kernel of one block, which tells overlap from work.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from e2e.seam import graph_us
from glm_exl3.envs import INTEGER_PRODUCTS
from glm_exl3.format.layout import Codebook
from glm_exl3.ops import cuda_backend
from glm_exl3.ops.matrix import Exl3Stack, PackedMatrix
from glm_exl3.ops.tuning import STREAMED, Step
from kernels import inputs

EXPERTS, HIDDEN, WIDTH, TOP_K, SCALE, LIMIT = 288, 4096, 2048, 8, 2.5, 10.0
ROUTED_BITS, SHARED_BITS, CODEBOOK = 3, 5, Codebook.MUL1
HALVES = {INTEGER_PRODUCTS.name: "0"}
ROUNDS = 3  # blocks of every layer per graph


@dataclass(frozen=True)
class Setting:
    """One way to launch the kernels: environment and how often the experts cut k (0: the rule)."""

    name: str
    env: Mapping[str, str]
    split_k: int = 0


SETTINGS = (
    Setting("as served", {}),
    Setting("no early launch", {"GLM_EXL3_EARLY_LAUNCH": "0"}),
    Setting("halves", HALVES),
    Setting("halves, k uncut", HALVES, 1),
    Setting("k in 2", {}, 2),
    Setting("k in 4", {}, 4),
    Setting("k uncut", {}, 1),
)


@dataclass(frozen=True)
class Layer:
    """The weights of one layer's block."""

    gate: torch.Tensor
    bias: torch.Tensor
    w13: Exl3Stack
    w2: Exl3Stack
    shared: tuple[PackedMatrix, PackedMatrix, PackedMatrix]


def make_layer(random: torch.Generator, *, same_suh: bool) -> Layer:
    """Random weights; the `full` family has input scales of its own for gate and for up."""
    device, lead = random.device, (EXPERTS,)
    rate, shared = 16 * ROUTED_BITS, 16 * SHARED_BITS
    w13 = inputs.random_stack((*lead, 2), HIDDEN, WIDTH, rate, CODEBOOK, random, same_suh=same_suh)
    w2 = inputs.random_stack(lead, WIDTH, HIDDEN, rate, CODEBOOK, random)
    shapes = ((HIDDEN, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN))
    matrices = [inputs.random_matrix(k, n, shared, CODEBOOK, random) for k, n in shapes]
    gate = torch.randn(EXPERTS, HIDDEN, device=device, generator=random) / 64
    bias = torch.randn(EXPERTS, device=device, generator=random) * 0.1
    first, second, third = map(cuda_backend.prepare_linear, matrices)
    return Layer(gate.bfloat16(), bias, *cuda_backend.prepare_moe(w13, w2), (first, second, third))


class Block:
    """The parts of a block on this GPU for one number of tokens, and the orders to run them in."""

    def __init__(self, x: torch.Tensor, random: torch.Generator, split_k: int) -> None:
        self.x = x
        self.step = Step(STREAMED, split_k=split_k) if split_k else None
        self.aux = torch.cuda.Stream()
        routing = inputs.random_routing(x.shape[0], HIDDEN, EXPERTS, TOP_K, random)
        self.fixed = (routing.weights, routing.ids)
        self.other = torch.randn(HIDDEN, HIDDEN, device=x.device, generator=random).bfloat16()

    def gate(self, layer: Layer) -> torch.Tensor:
        return torch.mm(self.x, layer.gate.T, out_dtype=torch.float32)

    def select(self, layer: Layer, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        from vllm import _custom_ops as ops

        weights, ids = ops.grouped_topk(logits, 1, 1, TOP_K, True, SCALE, layer.bias, 1)
        return weights, ids

    def routed(self, layer: Layer, chosen: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        weights, ids = chosen
        return cuda_backend.moe(self.x, ids, weights, layer.w13, layer.w2, LIMIT, None, self.step)

    def shared(self, layer: Layer) -> torch.Tensor:
        gate, up, down = layer.shared
        both = torch.cat(
            [cuda_backend.linear(self.x, gate), cuda_backend.linear(self.x, up)], dim=-1
        )
        inner = torch.empty(both.shape[0], WIDTH, dtype=both.dtype, device=both.device)
        torch.ops._C.silu_and_mul_with_clamp(inner, both, LIMIT, 1.0, 0.0)
        return cuda_backend.linear(inner, down)

    def experts(self, layer: Layer) -> torch.Tensor:
        """Routed experts alone, of a routing made before."""
        return self.routed(layer, self.fixed)

    def cold(self, layer: Layer) -> torch.Tensor:
        """A product of other code before them, so that theirs is no longer at hand."""
        torch.mm(self.x, self.other)
        return self.experts(layer)

    def router(self, layer: Layer) -> torch.Tensor:
        return self.routed(layer, self.select(layer, self.gate(layer)))

    def serial(self, layer: Layer) -> torch.Tensor:
        """One stream, the shared expert between gate and selection: vLLM's without its stream."""
        logits = self.gate(layer)
        shared = self.shared(layer)
        return self.routed(layer, self.select(layer, logits)) + shared

    def after(self, layer: Layer) -> torch.Tensor:
        """One stream, the shared expert last."""
        routed = self.router(layer)
        return routed + self.shared(layer)

    def vllm(self, layer: Layer) -> torch.Tensor:
        """vLLM's order: the shared expert starts on its stream before the gate."""
        shared = self._beside(partial(self.shared, layer))
        routed = self.router(layer)
        torch.cuda.current_stream().wait_stream(self.aux)
        return routed + shared

    def beside(self, layer: Layer) -> torch.Tensor:
        """The shared expert starts on its stream when the experts are selected."""
        chosen = self.select(layer, self.gate(layer))
        shared = self._beside(partial(self.shared, layer))
        routed = self.routed(layer, chosen)
        torch.cuda.current_stream().wait_stream(self.aux)
        return routed + shared

    def _beside(self, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        self.aux.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.aux):
            return call()


ALONE = ("experts", "cold", "router", "shared")
TOGETHER = ("vllm", "serial", "after", "beside")
ORDERS = (*ALONE, *TOGETHER)


@contextmanager
def environment(values: Mapping[str, str]) -> Any:
    """These variables for the time of a block; the kernels read them when they are launched."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def timeline(call: Callable[[], object]) -> list[dict[str, Any]]:
    """Kernels of a graph of `call`: name, stream, start and duration in microseconds."""
    from torch.profiler import ProfilerActivity, profile

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for _ in range(3):
        graph.replay()
    with profile(activities=[ProfilerActivity.CUDA]) as session:
        graph.replay()
        torch.cuda.synchronize()
    events = [e for e in session.events() if str(e.device_type).endswith("CUDA")]
    events.sort(key=lambda event: event.time_range.start)
    zero = events[0].time_range.start if events else 0.0
    return [
        {
            "kernel": event.name[:60],
            "stream": getattr(event, "device_resource_id", None),
            "start": round(event.time_range.start - zero, 2),
            "us": round(event.time_range.elapsed_us(), 2),
        }
        for event in events
    ]


def row_of(
    layers: Sequence[Layer], tokens: int, setting: Setting, orders: Sequence[str]
) -> dict[str, Any]:
    """Times of every order under one setting, with the difference of each sum from the first."""
    random = torch.Generator("cuda").manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, device="cuda", generator=random).bfloat16()
    row: dict[str, Any] = {"tokens": tokens, "setting": setting.name, "us": {}, "different": []}
    guard: AbstractContextManager[Any] = environment(setting.env)
    with guard:
        block = Block(x, random, setting.split_k)
        sums = [o for o in orders if o in TOGETHER]
        first = getattr(block, sums[0])(layers[0]) if sums else None
        for order in orders:
            call = getattr(block, order)
            if order in TOGETHER and not torch.equal(call(layers[0]), first):
                row["different"].append(order)
            row["us"][order] = round(graph_us(call, [*layers] * ROUNDS), 2)
        if sums and not setting.split_k:
            row["timeline"] = {o: timeline(partial(getattr(block, o), layers[-1])) for o in sums}
    return row


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def names(text: str) -> list[str]:
    wanted = text.split(",")
    if unknown := sorted(set(wanted) - set(ORDERS)):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: known are {', '.join(ORDERS)}")
    return wanted


def line_of(row: Mapping[str, Any]) -> str:
    times = "  ".join(f"{order} {us:6.1f}" for order, us in row["us"].items())
    bad = f"  DIFFERENT: {', '.join(row['different'])}" if row["different"] else ""
    return f"{row['tokens']:3} tokens, {row['setting']:24} {times}{bad}"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m e2e.layers")
    made.add_argument("result", type=Path)
    made.add_argument("--tokens", type=numbers, default=[1, 4, 16])
    made.add_argument("--layers", type=int, default=4)
    made.add_argument("--orders", type=names, default=list(ORDERS))
    made.add_argument("--settings", default="", help="only those whose name begins so")
    made.add_argument("--same-suh", action="store_true", help="gate and up share input scales")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every setting; 1 when two orders gave different sums."""
    options = parser().parse_args(arguments)
    import vllm._custom_ops  # noqa: F401 - registers the operations

    random = torch.Generator("cuda").manual_seed(7)
    layers = [make_layer(random, same_suh=options.same_suh) for _ in range(options.layers)]
    rows: list[dict[str, Any]] = []
    for tokens in options.tokens:
        for setting in (one for one in SETTINGS if one.name.startswith(options.settings)):
            rows.append(row_of(layers, tokens, setting, options.orders))
            print(line_of(rows[-1]), flush=True)
            found = {"device": torch.cuda.get_device_name(), "same_suh": options.same_suh}
            options.result.write_text(json.dumps(found | {"rows": rows}))
    return int(any(row["different"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
