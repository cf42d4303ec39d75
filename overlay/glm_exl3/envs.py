"""The plugin's knobs: one table with type, default, help and scope.

Every setting that the serving process reads from its environment is a `Knob` here and nowhere else,
so documentation, the doctor and the start line cannot drift from the code. Values are read at each
call: a test or an operator changes the variable, not a cached copy. Variables of the host launcher
(`GLM_*` without `EXL3`) are not listed; they never reach the container.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from glm_exl3 import env_values as values
from glm_exl3.format import recode
from glm_exl3.format.errors import GlmExl3Error


@dataclass(frozen=True)
class Knob:
    """One environment variable.

    `parse` turns the text into the value and raises ValueError for text that is out of range;
    `scope` says where it must be set: `rank` (each rank may differ) or `all ranks` (must be equal).
    """

    name: str
    default: Any
    parse: Callable[[str], Any]
    help: str
    scope: str = "all ranks"
    choices: tuple[str, ...] = ()

    def read(self, environ: Mapping[str, str] | None = None) -> Any:
        """The typed value, or the default when the variable is unset or empty.

        Raises GlmExl3Error when the text cannot be parsed or is not among the choices.
        """
        text = (os.environ if environ is None else environ).get(self.name, "")
        if not text.strip():
            return self.default
        try:
            value = self.parse(text)
        except ValueError as error:
            raise self._invalid(text, str(error)) from error
        if self.choices and value not in self.choices:
            raise self._invalid(text, f"must be one of {', '.join(self.choices)}")
        return value

    def _invalid(self, text: str, reason: str) -> GlmExl3Error:
        return GlmExl3Error(
            code="setting",
            seen=f"{self.name}={text!r}: {reason}",
            why=f"it sets: {self.help}",
            fix=f"set {self.name} to a valid value or unset it (default {self.default!r})",
        )


BACKEND = Knob(
    "GLM_EXL3_BACKEND",
    "auto",
    values.text,
    "kernels for packed matrices: auto takes the first back end that can run, a name insists on it",
)
PLATFORM = Knob(
    "GLM_EXL3_PLATFORM",
    "auto",
    values.text,
    "embedded CPU engine: auto where no accelerator is found, cpu always, off never",
    choices=("auto", "cpu", "off"),
)
PRESET = Knob(
    "GLM_EXL3_PRESET", "", values.text, "name of the launch preset, part of the rank digest"
)
JOIN_TIMEOUT_S = Knob(
    "GLM_EXL3_JOIN_TIMEOUT_S",
    300.0,
    values.seconds,
    "seconds a rank waits for the others before weights are read",
)
RAY_RESOURCE = Knob(
    "GLM_EXL3_RAY_RESOURCE",
    "",
    values.text,
    "custom resource of the Ray nodes that ranks are kept to; set by the nodes' entry point",
    scope="rank",
)
IGNORE_TENSORS = Knob(
    "GLM_EXL3_IGNORE_TENSORS",
    (),
    values.patterns,
    "comma-separated regular expressions of checkpoint tensors that nobody has to take",
)
ACCEPT_PATCHES = Knob(
    "GLM_EXL3_ACCEPT_UNKNOWN_VLLM",
    (),
    values.names,
    "comma-separated patch ids (or all) to apply to vLLM sources with an unknown fingerprint",
)
AUTO, FUSED_NAMES = "auto", ("mhc", "kda", "router", "gate", "dense")
FUSED_OPS = Knob(
    "GLM_EXL3_FUSED_OPS",
    (AUTO,),
    partial(values.some_of, (AUTO, *FUSED_NAMES)),
    "comma-separated decode ops in place of vLLM's: mhc, kda, router, gate, dense; "
    "auto (measured); none",
)
TOGETHER_NAMES = ("parts", "dense", "activation", "shared")
TOGETHER = Knob(
    "GLM_EXL3_TOGETHER",
    (AUTO,),
    partial(values.some_of, (AUTO, *TOGETHER_NAMES)),
    "comma-separated parts of merged layers that share a launch up to 8 tokens: parts (packed), "
    "dense (beside packed), activation (of gate and up), shared (shared experts, too); auto "
    "(measured); none",
)
EARLY_LAUNCH = Knob(
    "GLM_EXL3_EARLY_LAUNCH", True, values.flag, "0: no kernel starts before its input"
)
INTEGER_PRODUCTS = Knob(
    "GLM_EXL3_INTEGER_PRODUCTS",
    AUTO,
    values.text,
    "few mul1 rows as integers: 1, 0, auto (measured: compute capability 9.0)",
    choices=(AUTO, "0", "1"),
)
HYBRID_DRAFT = Knob(
    "GLM_EXL3_HYBRID_DRAFT",
    False,
    values.flag,
    "1: a lookup in prompt and output proposes where the end of the text occurred before",
)
HYBRID_MATCH = Knob(
    "GLM_EXL3_HYBRID_MATCH", 6, values.count, "tokens that must match before a lookup proposes"
)
DRAFTER_TOKENS = Knob(
    "GLM_EXL3_DRAFTER_TOKENS",
    0,
    values.count,
    "tokens that DFlash2 drafts under hybrid drafting; 0: as many as are verified and its block "
    "holds",
)
STEP_MS = Knob(
    "GLM_EXL3_STEP_MS",
    ((1, 7.6), (3, 13.0), (5, 17.2), (8, 22.1), (16, 31.7)),
    values.curve,
    "milliseconds of a step by tokens, such as 1:7.6,8:22.1, with which adaptive k weighs lengths",
)
ABLIT = Knob(
    "GLM_EXL3_ABLIT",
    "off",
    values.text,
    "edit of the output projections: transplant from a donor, proj along a direction, or off",
    choices=("off", "transplant", "proj"),
)
ABLIT_SOURCE = Knob(
    "GLM_EXL3_ABLIT_SOURCE",
    "",
    values.text,
    "folder of the donor, or file of the directions",
    scope="rank",
)
ABLIT_PIN = Knob(
    "GLM_EXL3_ABLIT_PIN", "", values.text, "hash that these data must have; empty: any"
)
ABLIT_LAYERS = Knob("GLM_EXL3_ABLIT_LAYERS", "15-45", values.layers, "layers to edit")
ABLIT_ALPHA = Knob(
    "GLM_EXL3_ABLIT_ALPHA", 3.0, values.strength, "strength of proj; 1 takes all of it"
)
ABLIT_MTP = Knob("GLM_EXL3_ABLIT_MTP", True, values.flag, "1: edit the MTP block, too")
ABLIT_FINGERPRINT = Knob(
    "GLM_EXL3_ABLIT_FINGERPRINT",
    "",
    values.text,
    "JSON file with the published relative change of each layer; empty: none is known",
    scope="rank",
)
STEER_VECTOR = Knob(
    "GLM_EXL3_STEER_VECTOR",
    "",
    values.text,
    "GGUF file of projections of the residual streams",
    scope="rank",
)
STEER_PIN = Knob(
    "GLM_EXL3_STEER_PIN", "", values.text, "SHA-256 that this file must have; empty: any"
)
STEER_ALPHA = Knob(
    "GLM_EXL3_STEER_ALPHA", 0.0, values.strength, "strength of the projections; 0: that of the file"
)
STEER_LAYERS = Knob(
    "GLM_EXL3_STEER_LAYERS", "1-44", values.layers, "layers whose output is projected"
)
STEER_FORCE = Knob(
    "GLM_EXL3_STEER_FORCE",
    False,
    values.flag,
    "1: allow a strength at which the model is known to break",
)
DENSE_RECODE = Knob(
    "GLM_EXL3_DENSE_RECODE",
    "off",
    values.text,
    "dense projections in fewer bits: fp8, int8, exl3 (made by `python -m glm_exl3.recode`) or off",
    choices=recode.SCHEMES,
)
DENSE_GROUPS = Knob(
    "GLM_EXL3_DENSE_GROUPS", ",".join(recode.GROUPS), values.groups, "which of them are recoded"
)
DENSE_BITS = Knob("GLM_EXL3_DENSE_BITS", 6, values.bits, "bits per weight of exl3, 4 to 8")
DENSE_CACHE = Knob(
    "GLM_EXL3_DENSE_CACHE",
    "",
    values.text,
    "folder of matrices recoded to exl3; empty: beside the weights",
    scope="rank",
)
DENSE_FREED = Knob(
    "GLM_EXL3_DENSE_FREED",
    "kv",
    values.text,
    "the memory that recoding frees: kv gives it to the KV cache, host leaves it alone",
    choices=("kv", "host"),
)
RECODE_PATH = Knob(
    "GLM_EXL3_RECODE_PATH",
    "auto",
    values.text,
    "product of recoded fp8 and int8 for more than eight tokens: auto by table, or one for all",
    choices=("auto", "rows", "scaled", "widened"),
)
ATTENTION = Knob(
    "GLM_EXL3_ATTENTION",
    "auto",
    values.text,
    "sparse attention and indexer: auto takes Triton where vLLM has no kernel, triton always does, "
    "vllm never",
    choices=("auto", "triton", "vllm"),
)
DIGEST_SALT = Knob(
    "GLM_EXL3_DIGEST_SALT",
    "",
    values.text,
    "text mixed into the digest of this rank; exercises the comparison between ranks",
    scope="rank",
)

KNOBS: tuple[Knob, ...] = (
    BACKEND,
    PLATFORM,
    PRESET,
    JOIN_TIMEOUT_S,
    RAY_RESOURCE,
    IGNORE_TENSORS,
    ACCEPT_PATCHES,
    FUSED_OPS,
    TOGETHER,
    EARLY_LAUNCH,
    INTEGER_PRODUCTS,
    ATTENTION,
    HYBRID_DRAFT,
    HYBRID_MATCH,
    DRAFTER_TOKENS,
    STEP_MS,
    ABLIT,
    ABLIT_SOURCE,
    ABLIT_PIN,
    ABLIT_LAYERS,
    ABLIT_ALPHA,
    ABLIT_MTP,
    ABLIT_FINGERPRINT,
    STEER_VECTOR,
    STEER_PIN,
    STEER_ALPHA,
    STEER_LAYERS,
    STEER_FORCE,
    DENSE_RECODE,
    DENSE_GROUPS,
    DENSE_BITS,
    DENSE_CACHE,
    DENSE_FREED,
    RECODE_PATH,
    DIGEST_SALT,
)


def dense_recode(environ: Mapping[str, str] | None = None) -> recode.Recode:
    """What the three settings of the dense recode ask for."""
    groups = recode.parse_groups(DENSE_GROUPS.read(environ))
    scheme, bits = DENSE_RECODE.read(environ), DENSE_BITS.read(environ)
    return recode.Recode(scheme, groups, bits)


def check_all(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Every knob's value by name. Raises GlmExl3Error for the first that is invalid."""
    return {knob.name: knob.read(environ) for knob in KNOBS}


def shared_settings(named: Collection[Knob] = (), environ: Mapping[str, str] | None = None) -> str:
    """`NAME=value` of the settings that all ranks must share and that are not the default, or `-`.

    Those of `named` are left out: the digest has entries of their own for them.
    """
    found = [
        f"{knob.name.removeprefix('GLM_EXL3_')}={value}"
        for knob in KNOBS
        if knob.scope == "all ranks"
        and knob not in named
        and (value := knob.read(environ)) != knob.default
    ]
    return ",".join(found).replace(" ", "") or "-"


def as_markdown() -> str:
    """docs/environment.md: the whole page, so that it can be compared with the table."""
    rows = [f"| `{k.name}` | {_shown(k.default)} | {k.scope} | {k.help} |" for k in KNOBS]
    table = "\n".join(["| variable | default | scope | meaning |", "|---|---|---|---|", *rows])
    return f"{PAGE_HEAD}{table}\n"


def _shown(default: Any) -> str:
    """A default as a reader would type it."""
    if isinstance(default, bool):
        return f"`{int(default)}`"
    if isinstance(default, tuple):
        default = ",".join(o if isinstance(o, str) else f"{o[0]}:{o[1]:g}" for o in default)
    shown = f"{default:g}" if isinstance(default, float) else default
    return f"`{shown}`" if shown else "empty"


PAGE_HEAD = """# Environment of the serving process

Generated by `python -m glm_exl3.envs docs/environment.md`; do not edit. `all ranks` means the
value must be the same on every rank: it is part of the digest that ranks compare.

"""


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(as_markdown(), encoding="utf-8")
