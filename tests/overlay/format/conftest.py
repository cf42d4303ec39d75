"""A checkpoint folder written by hand, small enough to damage in every way."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from glm_exl3.format.headers import ITEM_BYTES
from glm_exl3.format.layout import MCG_MARKER
from glm_exl3.format.metadata import REQUIRED_TEXT_KEYS

EXPERT = "model.language_model.layers.3.mlp.experts.0"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@dataclass
class Tensor:
    dtype: str
    shape: list[int]
    data: bytes = b""

    def __post_init__(self) -> None:
        size = ITEM_BYTES[self.dtype]
        for extent in self.shape:
            size *= extent
        self.data = self.data or bytes(size)


def packed(k: int, n: int, last_dim: int, marker: int = MCG_MARKER) -> dict[str, Tensor]:
    return {
        "trellis": Tensor("I16", [k // 16, n // 16, last_dim]),
        "suh": Tensor("F16", [k]),
        "svh": Tensor("F16", [n]),
        "mcg": Tensor("I32", [], struct.pack("<I", marker)),
    }


def expert() -> dict[str, Tensor]:
    sizes = {"gate_proj": (128, 256), "up_proj": (128, 256), "down_proj": (256, 128)}
    return {
        f"{EXPERT}.{projection}.{leaf}": tensor
        for projection, (k, n) in sizes.items()
        for leaf, tensor in packed(k, n, 64).items()
    }


def shard_bytes(tensors: dict[str, Tensor]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    body = b""
    for name, tensor in tensors.items():
        offsets = [len(body), len(body) + len(tensor.data)]
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
        body += tensor.data
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


@dataclass
class Checkpoint:
    """Gate in the first shard, the rest in the second; edit, then `write`."""

    folder: Path
    tensors: dict[str, Tensor] = field(default_factory=expert)
    config: dict[str, object] = field(
        default_factory=lambda: {
            "architectures": ["Glm5NextForConditionalGeneration"],
            "text_config": dict.fromkeys(REQUIRED_TEXT_KEYS, 1),
        }
    )

    def shard_of(self, name: str) -> str:
        return SHARDS[0] if ".gate_proj." in name else SHARDS[1]

    def write(self) -> Path:
        for shard in SHARDS:
            held = {n: t for n, t in self.tensors.items() if self.shard_of(n) == shard}
            (self.folder / shard).write_bytes(shard_bytes(held))
        weight_map = {name: self.shard_of(name) for name in self.tensors}
        self.write_json("model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
        self.write_json("config.json", self.config)
        return self.folder

    def write_json(self, name: str, content: object) -> None:
        (self.folder / name).write_text(json.dumps(content))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return Checkpoint(tmp_path)
