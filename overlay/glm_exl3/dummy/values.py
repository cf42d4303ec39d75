"""Random values that keep activations at unit scale, made where the model lives.

Every tensor draws from a seed of its own, taken from its checkpoint name, so a matrix has the same
bits in every process and whatever else the model holds. Packed matrices get a random trellis (every
bit pattern is legal) and scales of unit gain; dense parameters get what their name asks for.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

import torch
from torch import Tensor

from glm_exl3.format.layout import Codebook
from glm_exl3.ref.tiny.matrices import CODEBOOK_STD

_WORD = 1 << 31
MIXING_GAIN = 0.6


@dataclass(frozen=True)
class DeviceStreams:
    """Seeded values on one device, a stream per name."""

    seed: int
    device: torch.device

    def generator(self, name: str) -> torch.Generator:
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        return torch.Generator(self.device).manual_seed(int.from_bytes(digest[:7], "little"))

    def fill_trellis(self, out: Tensor, name: str) -> None:
        """Random words into a contiguous int16 trellis of any leading shape."""
        out.view(torch.int32).random_(-_WORD, _WORD, generator=self.generator(name))

    def input_scales(self, name: str, *shape: int) -> Tensor:
        """fp16 `[..., k]`: random signs, magnitudes from 0.8 to 1.2."""
        source = self.generator(name)
        values = torch.rand(shape, generator=source, device=self.device) * 0.4 + 0.8
        return (values * self._signs(shape, source)).to(torch.float16)

    def output_scales(self, name: str, codebook: Codebook, inputs: int, *shape: int) -> Tensor:
        """fp16 `[..., n]`: random signs at the magnitude that gives a matrix with `inputs` rows
        unit gain."""
        unit = 1.0 / (CODEBOOK_STD[codebook] * inputs**0.5)
        return (self._signs(shape, self.generator(name)) * unit).to(torch.float16)

    def _signs(self, shape: tuple[int, ...], source: torch.Generator) -> Tensor:
        bits = torch.randint(0, 2, shape, generator=source, device=self.device)
        return bits.to(torch.float32) * 2 - 1

    def normal_(self, out: Tensor, name: str, std: float, mean: float = 0.0) -> None:
        """Normal values into a tensor of any floating dtype."""
        values = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        values.normal_(mean, std, generator=self.generator(name))
        out.copy_(values)


_RULES: tuple[tuple[str, str], ...] = (
    (r"norm\w*\.weight$|hc_\w+_scale$", "ones"),
    (r"\.bias$|e_score_correction_bias$", "zeros"),
    (r"base_kernel$", "taps"),
    (r"conv1d\.weight$|hc_\w+_base$|kpool_compress_ape$", "half"),
    (r"A_log$", "half"),
    (r"dt_bias$", "slow"),
    (r"hc_\w+_fn$", "mixing"),
    (r"embed_tokens\.weight$|mask_embedding$", "unit"),
)


def kind_of(name: str) -> str:
    """How the dense parameter `name` is filled; `linear` where no rule matches."""
    return next((kind for pattern, kind in _RULES if re.search(pattern, name)), "linear")


def fill_dense(streams: DeviceStreams, name: str, out: Tensor) -> None:
    """Fill one floating-point parameter in place."""
    kind = kind_of(name)
    if kind in ("ones", "zeros"):
        out.fill_(1.0 if kind == "ones" else 0.0)
    elif kind == "taps":
        streams.normal_(out, name, 0.05)
        out[:, 0] += 1
    elif kind in ("half", "unit"):
        streams.normal_(out, name, 0.5 if kind == "half" else 1.0)
    elif kind == "slow":
        streams.normal_(out, name, 1.0, mean=-3.0)
    else:
        fan_in = out[0].numel() if out.dim() > 1 else 1
        streams.normal_(out, name, (MIXING_GAIN if kind == "mixing" else 1.0) / fan_in**0.5)
