"""The dense layers of one decode step, by shape and number, from the dummy checkpoint's headers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from e2e.recode_steps import BITS, RANKS

HIDDEN_LAYERS = 45


@dataclass(frozen=True)
class Projection:
    """One of vLLM's layers: inputs, outputs of its recoded matrices and of what stays beside them
    under `exl3`, and how many of it a decode step reads."""

    name: str
    k: int
    n: int
    beside: int
    count: int

    def bytes(self, scheme: str) -> int:
        """Bytes of the layer's weights under a scheme."""
        from glm_exl3.format.recode import stored_bytes

        if scheme == "exl3":
            return stored_bytes(self.n, self.k, scheme, BITS) + 2 * self.k * self.beside
        return stored_bytes(self.n + self.beside, self.k, scheme, BITS)


def projections(ranks: int = RANKS) -> list[Projection]:
    """The recoded layers of one rank, from the headers of the dummy checkpoint."""
    from glm_exl3.dummy.folder import target_headers
    from glm_exl3.dummy.geometry import rank_geometry, real_geometry
    from glm_exl3.format.recode import GROUPS, dense_modules, encodable
    from glm_exl3.quant.names import MERGED
    from glm_exl3.ref.tiny.recipe import Family

    headers = target_headers(Family.TR3, rank_geometry(real_geometry(), ranks))
    shapes = {name: tuple(tensor.shape) for name, tensor in headers.items()}
    dense = dense_modules(shapes.items(), GROUPS)
    layers: dict[tuple[str, ...], tuple[str, int, int, int]] = {}
    for module in dense:
        parent, _, leaf = module.rpartition(".")
        if ".layers." in module and int(module.split(".layers.")[1].split(".")[0]) >= HIDDEN_LAYERS:
            continue
        merged = (
            "in_proj_qkvbfg_a"
            if leaf in ("q_proj", "k_proj", "v_proj")
            else next((name for name, parts in MERGED.items() if leaf in parts), leaf)
        )
        names = [f"{parent}.{part}" if parent else part for part in MERGED.get(merged, (leaf,))]
        sizes = {name: shapes[f"{name}.weight"] for name in names if f"{name}.weight" in shapes}
        recoded = sum(n for name, (n, k) in sizes.items() if name in dense and encodable(n, k))
        k = next(iter(sizes.values()))[1]
        beside = sum(n for n, _ in sizes.values()) - recoded
        layers[tuple(names)] = (merged, k, recoded, beside)
    return [Projection(*layer, count) for layer, count in sorted(Counter(layers.values()).items())]


def small_projections() -> list[Projection]:
    """The dense bf16 layers beside packed ones, of family `full` on one rank: KDA's `b`, `f_a` and
    `g_a` as one matrix, its `f_b` and `g_b`, the indexer's keys and weights as one."""
    from glm_exl3.dummy.folder import target_headers
    from glm_exl3.dummy.geometry import real_geometry
    from glm_exl3.ref.tiny.recipe import Family

    headers = target_headers(Family.FULL, real_geometry())
    found = []
    for name, parts, of_a_layer in (
        ("b_f_a_g_a", ("b_proj", "f_a_proj", "g_a_proj"), 1),
        ("f_b_g_b", ("f_b_proj",), 2),
        ("wk_weights_proj", ("indexer.wk", "indexer.weights_proj"), 1),
    ):
        layers = [
            module.removesuffix(f"{parts[0]}.weight")
            for module in headers
            if module.endswith(f"self_attn.{parts[0]}.weight")
            and int(module.split(".layers.")[1].split(".")[0]) < HIDDEN_LAYERS
        ]
        shapes = [tuple(headers[f"{layers[0]}{part}.weight"].shape) for part in parts]
        n, k = sum(rows for rows, _ in shapes), shapes[0][1]
        found.append(Projection(name, k, n, 0, of_a_layer * len(layers)))
    return found
