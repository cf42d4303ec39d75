"""Which dense projections of a checkpoint may be stored in fewer bits, and what that saves.

Names are those of the checkpoint. Groups are what users choose by: `shared` experts, `dense` MLPs,
the projections of `kda` and `mla` layers (the latter with the MTP block's `eh_proj`), and the
`head`. Never in a group are routers, gates and norms, whose noise moves tokens between experts or
between states, and what vLLM reads as a plain weight (`kv_b_proj`, the indexer's keys).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from glm_exl3.format.errors import GlmExl3Error
from glm_exl3.format.layout import HADAMARD

Scheme = Literal["off", "fp8", "int8", "exl3"]
SCHEMES: tuple[str, ...] = ("off", "fp8", "int8", "exl3")
GROUPS = ("shared", "dense", "kda", "mla", "head")
BITS = (4, 5, 6, 7, 8)
DENSE_BYTES = 2  # bf16
SCALE_BYTES = 4  # fp32 per output channel
EXL3_SCALE_BYTES = 2  # fp16 per input and per output channel

LANGUAGE = "model.language_model."
_MODEL = r"^model\.(?:language_model\.)?layers\.\d+\."
_RULES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (group, re.compile(_MODEL + pattern + "$"))
    for group, pattern in (
        ("shared", r"mlp\.shared_experts\.(?:gate|up|down)_proj"),
        ("dense", r"mlp\.(?:gate|up|down)_proj"),
        ("kda", r"self_attn\.[qkv]_proj"),
        ("mla", r"self_attn\.(?:q_a_proj|kv_a_proj_with_mqa|q_b_proj|indexer\.wq_b)"),
        ("mla", r"eh_proj"),
    )
)
_OUTPUT = re.compile(_MODEL + r"self_attn\.o_proj$")
KDA_MARK = "A_log"
"""A tensor that only KDA layers have, beside their projections."""


@dataclass(frozen=True)
class Recode:
    """What to recode: scheme, groups in the order of `GROUPS`, and K for `exl3`."""

    scheme: str = "off"
    groups: tuple[str, ...] = GROUPS
    bits: int = 6

    @property
    def active(self) -> bool:
        return self.scheme != "off"

    def __str__(self) -> str:
        """`off`, `fp8[shared,kda]` or `exl3:6[head]`: part of what ranks compare."""
        if not self.active:
            return "off"
        rate = f":{self.bits}" if self.scheme == "exl3" else ""
        return f"{self.scheme}{rate}[{','.join(self.groups)}]"


def parse_groups(text: str) -> tuple[str, ...]:
    """Groups of a comma-separated list in the order of `GROUPS`. Raises ValueError."""
    names = {part.strip() for part in text.split(",") if part.strip()}
    unknown = sorted(names - set(GROUPS))
    if unknown or not names:
        said = ", ".join(unknown) or "no group"
        raise ValueError(f"{said}: known are {', '.join(GROUPS)}")
    return tuple(group for group in GROUPS if group in names)


def group_of(module: str, has_tensor: Callable[[str], bool]) -> str | None:
    """The group of a checkpoint module, or None; `has_tensor` asks for a tensor's name.

    Modules of a drafter have other prefixes and belong to none.
    """
    if module == "lm_head":
        return "head"
    if _OUTPUT.match(module):
        return "kda" if has_tensor(module.removesuffix("o_proj") + KDA_MARK) else "mla"
    return next((group for group, pattern in _RULES if pattern.match(module)), None)


def flat_name(module: str) -> str:
    """A module of the checkpoint or of one of vLLM's models as the text model has it."""
    name = module.removeprefix("language_model.")
    return "model." + name.removeprefix(LANGUAGE) if name.startswith(LANGUAGE) else name


def is_target(tensor: str) -> bool:
    """Whether a tensor's name is that of a text model's layer, not of a drafter's."""
    return re.match(_MODEL, tensor) is not None


def encodable(out_features: int, in_features: int) -> bool:
    """Whether a matrix consists of whole Hadamard blocks."""
    return out_features % HADAMARD == 0 and in_features % HADAMARD == 0


def dense_modules(
    tensors: Iterable[tuple[str, tuple[int, ...]]], groups: Iterable[str]
) -> dict[str, tuple[str, tuple[int, int]]]:
    """Dense matrices of `groups` by module, in name order: (group, (out, in))."""
    shapes = {name: tuple(shape) for name, shape in tensors}
    wanted, found = set(groups), {}
    for name in sorted(shapes):
        module, _, leaf = name.rpartition(".")
        shape = shapes[name]
        if leaf != "weight" or len(shape) != 2:
            continue
        group = group_of(module, shapes.__contains__)
        if group in wanted and group is not None:
            found[module] = (group, (shape[0], shape[1]))
    return found


def check_groups(recode: Recode, found: Iterable[str], where: str) -> None:
    """Raises GlmExl3Error for a group of which the checkpoint stores nothing dense."""
    present = set(found)
    empty = [group for group in recode.groups if group not in present]
    if recode.active and empty:
        raise GlmExl3Error(
            code="recode-group",
            seen=f"DENSE_GROUPS has {', '.join(empty)}, of which {where} stores nothing dense",
            why="the model would run slower than the settings say",
            fix="leave these groups out; set DENSE_RECODE=off if all of it is packed",
        )


def stored_bytes(out_features: int, in_features: int, scheme: str, bits: int) -> int:
    """Bytes of one matrix under a scheme; `off` is bf16."""
    weights = out_features * in_features
    if scheme == "off":
        return DENSE_BYTES * weights
    if scheme == "exl3":
        return weights * bits // 8 + EXL3_SCALE_BYTES * (out_features + in_features)
    return weights + SCALE_BYTES * out_features


REPLICATED = ("q_a_proj", "kv_a_proj_with_mqa", "wq_b", "eh_proj")
"""Modules that every rank holds whole."""
_INDEX = re.compile(r"\.layers\.(\d+)\.")


def freed_bytes(
    shapes: Mapping[str, tuple[int, int]],
    recode: Recode,
    ranks: int,
    hidden_layers: int | None = None,
) -> int:
    """Bytes that one of `ranks` saves, given (out, in) by module.

    Layers from `hidden_layers` on (the MTP block) are left out if that is given.
    """
    total = 0
    for module, (out, inputs) in shapes.items():
        index = _INDEX.search(module)
        if hidden_layers is not None and index and int(index[1]) >= hidden_layers:
            continue
        before = stored_bytes(out, inputs, "off", recode.bits)
        saved = before - stored_bytes(out, inputs, recode.scheme, recode.bits)
        total += saved // (1 if module.rpartition(".")[2] in REPLICATED else ranks)
    return total


def digest_of(parts: Iterable[str]) -> str:
    """A short hash of texts in order."""
    total = hashlib.sha256()
    for part in parts:
        total.update(part.encode() + b"\0")
    return total.hexdigest()[:16]
