"""vLLM's general plugin: the only entry point that changes anything.

vLLM calls `register()` in every process, sometimes more than once, before devices exist. It does
six named steps and touches no device; heavy imports happen inside. A step that fails is logged and
remembered, and the quantisation configuration raises it again at its first use, because vLLM itself
may carry on without the plugin.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from importlib.metadata import version as distribution_version
from pathlib import Path

from glm_exl3 import envs
from glm_exl3.log import logger
from glm_exl3.quant.startup import Digest

_log = logger(__name__)
_done: set[str] = set()

ARCHITECTURES = {
    "Glm5NextForCausalLM": "glm_exl3.models.glm5next:Exl3Glm5NextForCausalLM",
    "Glm5NextForConditionalGeneration": (
        "glm_exl3.models.glm5next:Exl3Glm5NextForConditionalGeneration"
    ),
    "Glm5NextMTPModel": "glm_exl3.models.mtp:Exl3Glm5NextMTP",
    "DFlash2DraftModel": "glm_exl3.models.dflash2:Exl3DFlash2ForCausalLM",
}

EDIT_SOURCES: tuple[str, ...] = ("glm_exl3.quant.ablit:register",)
"""`module:function` of everything that may register a weight edit (`quant.edits`)."""

NAMED = (
    *(envs.BACKEND, envs.FUSED_OPS, envs.ATTENTION, envs.PRESET),
    *(envs.DENSE_RECODE, envs.DENSE_GROUPS, envs.DENSE_BITS),
)
"""Settings that have an entry of their own in the digest."""


def vllm_version() -> str:
    """The installed vLLM's public version, without a local build suffix."""
    return distribution_version("vllm").partition("+")[0]


@lru_cache(maxsize=1)
def source_hash() -> str:
    """Hash over the plugin's own Python sources: two images with one version may still differ."""
    root = Path(__file__).parent
    total = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        total.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:12]


def make_digest() -> Digest:
    """What all ranks must have in common."""
    from glm_exl3 import patches
    from glm_exl3.ops import ext
    from glm_exl3.quant import edits

    entries = [
        ("plugin", distribution_version("glm-exl3")),
        ("sources", source_hash()),
        ("vllm", vllm_version()),
        ("patches", patches.patch_set()),
        ("kernels", ext.source_digest()),
        ("backend", envs.BACKEND.read()),
        ("fused", ",".join(envs.FUSED_OPS.read()) or "-"),
        ("attention", envs.ATTENTION.read()),
        ("edits", edits.digest_entry()),
        ("dense", str(envs.dense_recode())),
        ("steer", _steering_digest()),
        ("preset", envs.PRESET.read() or "-"),
        ("settings", envs.shared_settings(NAMED)),
    ]
    salt = envs.DIGEST_SALT.read()
    if salt:
        entries.append(("salt", salt))
    return Digest(tuple(entries))


def _steering_digest() -> str:
    if not envs.STEER_VECTOR.read():
        return "-"
    from glm_exl3.quant import glp

    request = glp.requested()
    return request.digest if request else "-"


def _register_quantization() -> None:
    from vllm.model_executor.layers.quantization import register_quantization_config

    from glm_exl3.quant.config import NAME, Exl3Config

    register_quantization_config(NAME)(Exl3Config)


def _register_operations() -> None:
    from glm_exl3.ops import library

    _log.debug("operations of %s registered", library.__name__)


def _register_models() -> None:
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.models.registry import ModelRegistry

    from glm_exl3.dummy.loader import NAME, Exl3DummyLoader

    register_model_loader(NAME)(Exl3DummyLoader)
    for architecture, target in ARCHITECTURES.items():
        ModelRegistry.register_model(architecture, target)


def register_edits() -> None:
    """Let every source of weight edits register what the environment asks for."""
    for source in EDIT_SOURCES:
        module, _, function = source.partition(":")
        getattr(import_module(module), function)()


def _register_cache() -> None:
    from glm_exl3.attention import cache_types, install

    cache_types.register()
    install.register_names()


def _apply_patches() -> None:
    from glm_exl3 import patches
    from glm_exl3.quant import startup

    version = vllm_version()
    startup.set_digest(make_digest())
    patches.apply_all("import", version)
    startup.before_model(lambda: _at_model(version))


def _at_model(version: str) -> None:
    from glm_exl3 import patches
    from glm_exl3.attention.install import install as install_attention
    from glm_exl3.fused.install import install

    patches.apply_all("model", version)
    install_attention()
    install()


def _install_platform() -> None:
    from vllm.platforms import current_platform

    if type(current_platform).__module__.startswith("glm_exl3.cpu"):
        from glm_exl3.cpu import engine

        engine.install()


STEPS: tuple[tuple[str, Callable[[], None]], ...] = (
    ("quantization", _register_quantization),
    ("operations", _register_operations),
    ("models", _register_models),
    ("edits", register_edits),
    ("cache", _register_cache),
    ("patches", _apply_patches),
    ("platform", _install_platform),
)


def register() -> None:
    """Run the steps that have not run in this process yet.

    Raises only when the configuration that would raise the failure later could not be registered.
    """
    from glm_exl3.quant import startup

    for name, step in STEPS:
        if name in _done:
            continue
        try:
            step()
        except Exception as error:
            _log.exception("plugin step %r failed", name)
            startup.record_failure(error)
            if name == STEPS[0][0]:
                raise
            return
        _done.add(name)
    _log.debug("plugin ready: %s", make_digest())
