"""Random packed matrices, checkpoint folders of them, and vLLM layers at a simulated rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from glm_exl3.format.layout import MCG_MARKER, MUL1_MARKER, Codebook
from glm_exl3.ops.matrix import PackedMatrix

Tensors = dict[str, torch.Tensor]


def marker(codebook: Codebook) -> Tensors:
    values = {Codebook.MCG: ("mcg", MCG_MARKER), Codebook.MUL1: ("mul1", MUL1_MARKER)}
    if codebook not in values:
        return {}
    name, value = values[codebook]
    return {name: torch.tensor(value - (1 << 32), dtype=torch.int32)}


class Packed:
    """A random matrix [k, n] as checkpoint tensors and as what the operations read."""

    def __init__(self, k: int, n: int, bits: float, codebook: Codebook, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        shape = (k // 16, n // 16, int(16 * bits))
        trellis = torch.randint(-(2**15), 2**15, shape, generator=random, dtype=torch.int16)
        gain = 1 / (1.2 * k**0.5)
        suh = (torch.randint(0, 2, (k,), generator=random) * 2 - 1) * (
            0.5 + torch.rand(k, generator=random)
        )
        svh = (torch.randint(0, 2, (n,), generator=random) * 2 - 1) * gain
        self.matrix = PackedMatrix(trellis, suh.half(), svh.half(), codebook)
        self.tensors: Tensors = {
            "trellis": trellis,
            "suh": self.matrix.suh,
            "svh": self.matrix.svh,
            **marker(codebook),
        }

    def named(self, module: str) -> Tensors:
        return {f"{module}.{leaf}": value for leaf, value in self.tensors.items()}

    def dense(self) -> torch.Tensor:
        """fp32 [k, n]."""
        from glm_exl3.ref.decode import dequantize

        m = self.matrix
        return dequantize(m.trellis, m.suh, m.svh, m.codebook)


@pytest.fixture
def packed() -> Callable[..., Packed]:
    counter = iter(range(1, 1000))

    def make(k: int, n: int, bits: float = 2, codebook: Codebook = Codebook.MCG) -> Packed:
        return Packed(k, n, bits, codebook, next(counter))

    return make


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[Tensors], Path]:
    """Write tensors as a checkpoint folder of two shards."""

    def write(tensors: Tensors, config: dict[str, object] | None = None) -> Path:
        from glm_exl3.quant.facts import read_facts

        read_facts.cache_clear()
        names = sorted(tensors)
        half = (len(names) + 1) // 2
        weight_map = {}
        for shard, part in (("one.safetensors", names[:half]), ("two.safetensors", names[half:])):
            if part:
                save_file({n: tensors[n].contiguous().clone() for n in part}, tmp_path / shard)
                weight_map |= dict.fromkeys(part, shard)
        index = {"metadata": {}, "weight_map": weight_map}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        document = config or {"architectures": ["SomeModel"]}
        (tmp_path / "config.json").write_text(json.dumps(document))
        return tmp_path

    return write


@pytest.fixture
def exl3_config(folder: Callable[[Tensors], Path]) -> Callable[[Tensors], object]:
    """An Exl3Config over a folder of these tensors."""

    def make(tensors: Tensors) -> object:
        from glm_exl3.quant.config import Exl3Config

        config = Exl3Config({"quant_method": "exl3"})
        config.maybe_update_config(str(folder(tensors)))
        return config

    return make


@pytest.fixture
def at_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Let vLLM's layers believe they are rank r of n; no process group exists."""

    def set_rank(rank: int, ranks: int) -> None:
        from vllm.model_executor import parameter
        from vllm.model_executor.layers import linear, vocab_parallel_embedding

        for module in (linear, vocab_parallel_embedding, parameter):
            monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)
            monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: ranks)

    return set_rank


@pytest.fixture
def load() -> Callable[..., None]:
    """Offer tensors to a layer the way vLLM's loaders do: parameter.weight_loader(...)."""

    def offer(layer: torch.nn.Module, tensors: Tensors, shard: object = None) -> None:
        for leaf, value in tensors.items():
            param = getattr(layer, leaf)
            arguments = () if shard is None else (shard,)
            param.weight_loader(param, value, *arguments)

    return offer
