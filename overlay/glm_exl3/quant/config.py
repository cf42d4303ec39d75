"""The quantisation configuration `exl3`: which layer gets which method.

Dispatch asks the safetensors headers, not `bits` or any other number of the configuration: a module
is packed if the checkpoint holds a trellis for it. vLLM names modules its own way, so the model
tells through `apply_vllm_mapper` how checkpoint names become module names; every mapper only adds
names, which makes the call idempotent and lets target and draft models share one configuration.

vLLM carries on after a plugin that failed, therefore a failure during `register()` is raised here,
at the first use.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)

from glm_exl3 import envs
from glm_exl3.format.recode import Recode, flat_name, freed_bytes
from glm_exl3.quant.facts import Facts, dense_modules_of, find_folder, read_facts
from glm_exl3.quant.names import (
    FREE_WIDTH,
    FREE_WIDTH_PARTS,
    KDA_FUSED,
    KDA_FUSED_PARTS,
    KDA_LAYER,
    Source,
    parts_of,
    split_prefix,
)
from glm_exl3.quant.startup import raise_failure

NAME = "exl3"


class NameMapper(Protocol):
    """What `apply_vllm_mapper` needs of vLLM's WeightsMapper."""

    def map_name(self, key: str) -> str | None: ...


_extra_mappers: ContextVar[tuple[NameMapper, ...]] = ContextVar("extra_mappers", default=())


@contextmanager
def name_mapper(mapper: NameMapper) -> Iterator[None]:
    """Apply `mapper` to every configuration that reads its headers inside the block.

    For models that make their own configuration while they are built, such as a drafter.
    """
    token = _extra_mappers.set((*_extra_mappers.get(), mapper))
    try:
        yield
    finally:
        _extra_mappers.reset(token)


class Exl3Config(QuantizationConfig):
    """`quantization_config` with `quant_method: exl3`, tied to the headers of its checkpoint."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        raise_failure()
        self.settings = settings
        self._facts: Facts | None = None
        self._modules: dict[str, str] = {}
        self._dense: dict[str, tuple[int, int]] = {}

    def __repr__(self) -> str:
        folder = None if self._facts is None else self._facts.folder
        return f"Exl3Config(folder={str(folder)!r})"

    def __getstate__(self) -> dict[str, Any]:
        """Without the headers: another process reads them itself."""
        state = self.__dict__.copy()
        folder = None if self._facts is None else self._facts.folder
        return state | {"_facts": folder, "_modules": {}, "_dense": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        folder = state["_facts"]
        if folder is not None:
            self._use(read_facts(folder))

    def get_name(self) -> Any:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return ["quantization_config.json"]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Exl3Config:
        return cls(config)

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Read the checkpoint's headers. Raises FormatError for everything they show to be wrong.

        vLLM passes no revision for some callers; the commit that transformers resolved is the same.
        """
        raise_failure()
        revision = revision or getattr(hf_config, "_commit_hash", None)
        self._use(read_facts(find_folder(model_name, revision)))

    def _use(self, facts: Facts) -> None:
        if self.recode.scheme == "exl3":
            from glm_exl3.quant.recode_cache import with_recoded

            facts = with_recoded(facts, self.recode)
        self._facts = facts
        self._modules = {name: name for name in facts.modules}
        self._dense = self._to_recode(facts)
        for mapper in _extra_mappers.get():
            self.apply_vllm_mapper(mapper)

    @property
    def recode(self) -> Recode:
        """What the environment asks to recode when loading ends; `exl3` is done before."""
        return envs.dense_recode()

    def _to_recode(self, facts: Facts) -> dict[str, tuple[int, int]]:
        """Dense modules that become 8-bit rows: (out, in) by the text model's name."""
        if self.recode.scheme not in ("fp8", "int8"):
            return {}
        found = dense_modules_of(facts, self.recode)
        return {flat_name(module): shape for module, (_, shape) in found.items()}

    def recodes(self, prefix: str, *, merged: bool) -> bool:
        """Whether the dense layer `prefix` becomes 8-bit rows; a merged one as a whole."""
        if not self._dense:
            return False
        return any(flat_name(name) in self._dense for name in parts_of(prefix, merged=merged))

    def freed_bytes(self, ranks: int, hidden_layers: int | None = None) -> int:
        """Bytes that recoding frees on one of `ranks`, without layers from `hidden_layers` on."""
        if not self.recode.active:
            return 0
        return freed_bytes(self._recoded_shapes(), self.recode, ranks, hidden_layers)

    def _recoded_shapes(self) -> dict[str, tuple[int, int]]:
        """(out, in) of what is recoded, by the text model's names."""
        layouts = self.facts.modules
        packed = {
            flat_name(name): (layouts[name].out_features, layouts[name].in_features)
            for name in self.facts.recoded
        }
        return self._dense | packed

    @property
    def facts(self) -> Facts:
        """Headers of the checkpoint this configuration belongs to."""
        raise_failure()
        if self._facts is None:
            raise RuntimeError("maybe_update_config was not called before the model was built")
        return self._facts

    def apply_vllm_mapper(self, hf_to_vllm_mapper: NameMapper) -> None:
        """Add the names that `hf_to_vllm_mapper` gives to the packed modules.

        Mappers rename tensors, and some match a module only with the dot behind it.
        """
        for module in self.facts.modules:
            mapped = hf_to_vllm_mapper.map_name(f"{module}.trellis")
            if mapped is not None:
                self._modules[mapped.removesuffix(".trellis")] = module

    def source_of(self, prefix: str) -> Source:
        """The checkpoint module behind one unmerged vLLM module name."""
        module = self._modules.get(prefix)
        if module is not None:
            return Source(module)
        parent, leaf = split_prefix(prefix)
        fused = self._modules.get(parent + KDA_FUSED)
        if fused is not None and leaf in KDA_FUSED_PARTS:
            return Source(fused, KDA_FUSED_PARTS.index(leaf), len(KDA_FUSED_PARTS))
        return Source(self._checkpoint_name(prefix))

    def _checkpoint_name(self, prefix: str) -> str:
        """The checkpoint's name of a dense module, from a packed sibling; else the name itself."""
        parent, leaf = split_prefix(prefix)
        for mapped, module in self._modules.items():
            if mapped.startswith(parent) and "." not in mapped[len(parent) :]:
                return split_prefix(module)[0] + leaf
        return prefix

    def packed_sources(self, prefix: str, *, merged: bool) -> tuple[Source, ...] | None:
        """Sources of every sub-matrix of layer `prefix`, or None if none of them is packed."""
        names = parts_of(prefix, merged=merged)
        parent, leaf = split_prefix(prefix)
        known = [name in self._modules for name in names]
        if leaf == KDA_LAYER:
            known.append(parent + KDA_FUSED in self._modules)
        if leaf in FREE_WIDTH:
            known.extend(parent + part in self._modules for part in FREE_WIDTH_PARTS)
        if not any(known):
            return None
        return tuple(self.source_of(name) for name in names)

    def expert_names(self, prefix: str) -> list[str] | None:
        """Checkpoint modules of the experts under layer `prefix`, or None if they are not
        packed."""
        names: list[str] = []
        for projection in FREE_WIDTH_PARTS:
            first = self._modules.get(f"{prefix}.0.{projection}")
            if first is not None:
                stem = first.removesuffix(f".0.{projection}")
                while f"{stem}.{len(names)}.{projection}" in self.facts.modules:
                    names.append(f"{stem}.{len(names)}")
                return names
        return None

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method for `layer`, or None where vLLM's own unquantised one applies."""
        from vllm.model_executor.layers.fused_moe import RoutedExperts
        from vllm.model_executor.layers.linear import LinearBase
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        from glm_exl3.quant.dense import unquantized_method
        from glm_exl3.quant.linear import Exl3LinearMethod
        from glm_exl3.quant.lm_head import Exl3LMHeadMethod
        from glm_exl3.quant.moe import Exl3MoEMethod

        facts = self.facts
        if isinstance(layer, LinearBase):
            merged = hasattr(layer, "output_sizes")
            sources = self.packed_sources(prefix, merged=merged)
            if sources is None and self.recodes(prefix, merged=merged):
                from glm_exl3.quant.recode import RecodedLinearMethod

                return RecodedLinearMethod(self.recode.scheme, prefix)
            if sources is None:
                return unquantized_method()
            return Exl3LinearMethod(facts, prefix, sources)
        if isinstance(layer, RoutedExperts):
            names = self.expert_names(prefix)
            return None if names is None else Exl3MoEMethod(layer.moe_config, facts, names)
        if isinstance(layer, ParallelLMHead) and prefix in self._modules:
            return Exl3LMHeadMethod(facts, self.source_of(prefix))
        if isinstance(layer, ParallelLMHead) and self.recodes(prefix, merged=False):
            from glm_exl3.quant.recode import RecodedHeadMethod

            return RecodedHeadMethod(self.recode.scheme, prefix)
        return None
