"""Pack the trained checkpoint as EXL3: which matrices, at which K, and under which names.

`tr3` packs the routed experts at K4 (mcg, gate and up with one suh); `full` packs what ExLlamaV3
packs for this architecture (mul1, KDA q, k, v as one matrix), in a 4-bit and a 3-bit recipe with
more bits where few weights matter much. The result holds the packed tensors only; everything else
stays as the checkpoint stores it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from glm_exl3.format.layout import Codebook
from glm_exl3.ref.quantize import Encoder, Exl3Tensors, quantize_group
from glm_exl3.ref.tiny.recipe import Recipe, Role
from nano.calibration import Hessians

Quantiser = Callable[..., list[Exl3Tensors]]
_KDA_PARTS = ("q_proj", "k_proj", "v_proj")
_ROLES = (
    (re.compile(r"\.mlp\.experts\.\d+\.(gate|up|down)_proj$"), Role.EXPERT),
    (re.compile(r"\.shared_experts\.(gate|up|down)_proj$"), Role.SHARED),
    (re.compile(r"\.mlp\.(gate|up|down)_proj$"), Role.DENSE),
    (re.compile(r"\.self_attn\.(q|k|v)_proj$"), Role.KDA_IN),
    (re.compile(r"\.self_attn\.q_a_proj$"), Role.MLA_Q_A),
    (re.compile(r"\.self_attn\.q_b_proj$"), Role.MLA_Q_B),
    (re.compile(r"\.self_attn\.kv_a_proj_with_mqa$"), Role.MLA_KV_A),
    (re.compile(r"\.indexer\.wq_b$"), Role.INDEX_Q),
    (re.compile(r"\.eh_proj$"), Role.MTP_IN),
    (re.compile(r"^lm_head$"), Role.HEAD),
)
_SMALL = {
    Role.KDA_OUT: 4,
    Role.MLA_Q_A: 4,
    Role.MLA_Q_B: 4,
    Role.MLA_KV_A: 4,
    Role.MLA_OUT: 4,
    Role.INDEX_Q: 4,
    Role.MTP_IN: 4,
}


def full_recipe(bits: dict[Role, int]) -> Recipe:
    """The recipe of family `full` with these K; other tensors are BF16, shared by all folders."""
    return Recipe(Codebook.MUL1, bits, torch.bfloat16, fused_kda=True, shared_gate_scales=False)


RECIPES = {
    "tr3": Recipe(
        Codebook.MCG,
        {Role.EXPERT: 4},
        torch.bfloat16,
        fused_kda=False,
        shared_gate_scales=True,
    ),
    "full-4bpw": full_recipe(
        {Role.EXPERT: 4, Role.SHARED: 4, Role.DENSE: 4, Role.KDA_IN: 4, Role.HEAD: 6, **_SMALL}
    ),
    "full-3bpw": full_recipe(
        {Role.EXPERT: 3, Role.SHARED: 4, Role.DENSE: 3, Role.KDA_IN: 3, Role.HEAD: 5, **_SMALL}
    ),
}


def role_of(module: str, kda_layers: set[str]) -> Role:
    """The role of a module by its name; `kda_layers` are the stems of KDA attention modules."""
    if module.endswith(".self_attn.o_proj"):
        return Role.KDA_OUT if module.removesuffix(".o_proj") in kda_layers else Role.MLA_OUT
    return next((role for pattern, role in _ROLES if pattern.search(module)), Role.PLAIN)


@dataclass(frozen=True)
class Job:
    """Matrices packed together: output modules, their source modules' weights joined, and K."""

    modules: tuple[str, ...]
    sources: tuple[tuple[str, ...], ...]
    bits: int


@dataclass
class Packed:
    """Packed tensors by name, and the source modules they replace."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    replaced: set[str] = field(default_factory=set)


def jobs(tensors: dict[str, Tensor], recipe: Recipe) -> list[Job]:
    """What to pack, in name order."""
    modules = {name.removesuffix(".weight") for name in tensors if name.endswith(".weight")}
    kda = {name.removesuffix(".A_log") for name in tensors if name.endswith(".A_log")}
    result = []
    for module in sorted(modules):
        role = role_of(module, kda)
        bits = recipe.packed_bits(role)
        stem, _, leaf = module.rpartition(".")
        if bits is None or (role is Role.KDA_IN and leaf != "q_proj"):
            continue
        if role is Role.KDA_IN:
            parts = tuple(f"{stem}.{part}" for part in _KDA_PARTS)
            result.append(Job((f"{stem}.qkv_proj",), (parts,), bits))
        elif leaf == "gate_proj" and recipe.shared_gate_scales:
            both = (module, f"{stem}.up_proj")
            result.append(Job(both, tuple((name,) for name in both), bits))
        elif leaf != "up_proj" or not recipe.shared_gate_scales:
            result.append(Job((module,), ((module,),), bits))
    return result


def pack(
    tensors: dict[str, Tensor],
    recipe: Recipe,
    hessians: Hessians | None,
    encoder: Encoder,
    quantiser: Quantiser = quantize_group,
) -> Packed:
    """Quantise everything the recipe packs; seeds follow the name, gate and up share theirs.

    `quantiser` may be replaced by another with the signature of `quantize_group`.
    """
    done = Packed()
    for job in jobs(tensors, recipe):
        weights = [
            torch.cat([tensors[f"{source}.weight"] for source in sources]).T.float()
            for sources in job.sources
        ]
        source = job.sources[0][0]
        hessian = None if hessians is None else hessians[source]
        seed = sum(map(ord, re.sub(r"up_proj$", "gate_proj", job.modules[0]))) * 1000
        results = quantiser(
            weights, job.bits, recipe.codebook, hessian=hessian, seed=seed, encoder=encoder
        )
        for module, result in zip(job.modules, results, strict=True):
            named = result.state_dict(module)
            done.tensors |= {name: tensor.cpu().clone() for name, tensor in named.items()}
        done.replaced |= {name for sources in job.sources for name in sources}
    return done


def fused_convolutions(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with q, k, v convolutions of each KDA layer as one `conv1d.weight`."""
    result = {name: tensor for name, tensor in tensors.items() if "_conv1d." not in name}
    for name in tensors:
        if name.endswith(".q_conv1d.weight"):
            stem = name.removesuffix("q_conv1d.weight")
            parts = [tensors[f"{stem}{letter}_conv1d.weight"] for letter in "qkv"]
            result[f"{stem}conv1d.weight"] = torch.cat(parts)
    return result


def packed_checkpoint(
    tensors: dict[str, Tensor], packed: Packed, recipe: Recipe
) -> dict[str, Tensor]:
    """The complete checkpoint: packed tensors in place of the matrices they replace."""
    kept = {
        name: tensor
        for name, tensor in tensors.items()
        if name.removesuffix(".weight") not in packed.replaced
    }
    kept = fused_convolutions(kept) if recipe.fused_kda else kept
    return kept | packed.tensors
