"""The dense recode at real sizes: single projections, whole steps, load time, and a prediction.

    python -m e2e.recode predict                           (no GPU: bytes only)
    python -m e2e.recode projections RESULT.json           (one GPU, two minutes)
    python -m e2e.recode step WORKDIR RESULT.json          (one GPU, minutes)
    python -m e2e.recode expected FILE RESULT.json ...     (figures for bench/expected)

Everything is one rank of two of the `tr3` family, after the small layers that stay dense beside
packed ones in `full` on one rank. BF16 is timed by the vendor's product and by our kernel of rows.
A projection's time is that of a call in a CUDA graph over several copies of its weight, so that it
comes from memory; the own time of a scheme is their sum over the layers of one step; the counts of
tokens that have targets come first. `step` is `e2e.recode_steps`. Behind `--budget-s` nothing new
starts; what was measured is written after every layer or engine, a line per target at the end, and
the exit status is 1 unless all are met. Predictions are bytes over bandwidth and say so.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from e2e import recode_steps
from e2e.recode_layers import HIDDEN_LAYERS, Projection, projections, small_projections
from e2e.recode_steps import BITS, RANKS, SCHEMES, step_ratios

__all__ = ["BITS", "RANKS", "SCHEMES", "Projection", "projections", "step_ratios"]
OWN_ROWS, OWN_TOKENS = "rows", (1, 4, 8, 16)  # bf16 rows by this project's kernel
PASSES = ((1, 16), (4, 8, 4096, 2, 32, 64, 512))  # tokens a product; the first have targets
MANY_TOKENS, FEW_COPIES = 512, 4
COPIES_BYTES = 1 << 30
GB10_GBPS = 235.0  # what public copies reach on GB10, 231 to 240 GB/s
EXPERT_BITS, EXPERT_WEIGHTS, TOP_K, SPARSE_LAYERS = 4, 3 * 4096 * 2048, 8, 42


def dense_bytes(layers: Iterable[Projection], scheme: str) -> int:
    """Bytes of recoded weights that one step reads on one rank."""
    return sum(layer.count * layer.bytes(scheme) for layer in layers)


def other_bytes(layers: Iterable[Projection], ranks: int = RANKS) -> int:
    """Bytes of one rank's dense weights that a step reads and nothing recodes: `kv_b_proj`, gates,
    routers, hyper-connections, norms."""
    from glm_exl3.dummy.folder import target_headers
    from glm_exl3.dummy.geometry import rank_geometry, real_geometry
    from glm_exl3.format.metadata import PACKED_LEAVES
    from glm_exl3.ref.tiny.recipe import Family

    headers = target_headers(Family.TR3, rank_geometry(real_geometry(), ranks))
    total = 0
    for name, tensor in headers.items():
        _, layer, rest = name.partition(".layers.")
        packed = name.rpartition(".")[2] in PACKED_LEAVES
        if packed or (layer and int(rest.split(".")[0]) >= HIDDEN_LAYERS):
            continue
        if "embed_tokens" not in name and ".visual." not in name:
            total += tensor.numel() * tensor.element_size()
    return total - sum(layer.count * 2 * layer.k * (layer.n + layer.beside) for layer in layers)


def predicted(layers: list[Projection], gbps: float, ranks: int = RANKS) -> dict[str, Any]:
    """Milliseconds of weight traffic of a step with one request, per scheme, and its ratio to off.

    Bandwidth only: launches, attention, collectives and everything else are left out, so real
    ratios lie nearer to 1.
    """
    experts = SPARSE_LAYERS * TOP_K * EXPERT_WEIGHTS * EXPERT_BITS // 8 // ranks
    fixed = experts + other_bytes(layers, ranks)
    times = {s: (fixed + dense_bytes(layers, s)) / gbps / 1e6 for s in SCHEMES}
    return {
        scheme: {"ms": round(ms, 2), "ratio": round(ms / times["off"], 3)}
        for scheme, ms in times.items()
    }


Product = Callable[[Any], Any]


def products(layer: Projection, scheme: str) -> dict[str, list[Product]]:
    """Functions of the input over several copies of the layer's weight, by name of the path; the
    name of the one that serving takes is empty."""
    import torch
    import torch.nn.functional as F

    from glm_exl3.ops import dense_rows, recoded, tuning

    random = torch.Generator("cuda").manual_seed(layer.k)
    copies = range(max(2, min(64, COPIES_BYTES // layer.bytes(scheme))))

    def weight(rows: int) -> torch.Tensor:
        made = torch.empty(rows, layer.k, dtype=torch.bfloat16, device="cuda")
        return made.normal_(generator=random)

    if scheme == "off":
        weights = [weight(layer.n + layer.beside) for _ in copies]
        vendor: list[Product] = [partial(_dense, weight=one) for one in weights]
        return {"": vendor, OWN_ROWS: [partial(dense_rows.linear, weight=one) for one in weights]}
    if scheme in ("fp8", "int8"):
        made = [recoded.encode_rows(weight(layer.n + layer.beside), scheme) for _ in copies]
        found: dict[str, list[Product]] = {"": [partial(_rows, matrix=one) for one in made]}
        for path in tuning.PATHS[scheme]:
            found[path] = [partial(recoded.by_path, matrix=one, path=path) for one in made]
        return found
    from glm_exl3.format.layout import Codebook
    from glm_exl3.ops import cuda_backend
    from kernels import inputs

    def both(x: torch.Tensor, matrix: Any, beside: torch.Tensor | None) -> torch.Tensor:
        y = cuda_backend.linear(x, matrix)
        return y if beside is None else torch.cat([y, F.linear(x, beside)], -1)

    calls: list[Product] = []
    for _ in copies:
        packed = inputs.random_matrix(layer.k, layer.n, 16 * BITS, Codebook.MUL1, random)
        kept = weight(layer.beside) if layer.beside else None
        calls.append(partial(both, matrix=cuda_backend.prepare_linear(packed), beside=kept))
    return {"": calls}


def _dense(x: Any, weight: Any) -> Any:
    import torch.nn.functional as F

    return F.linear(x, weight)


def _rows(x: Any, matrix: Any) -> Any:
    from glm_exl3.ops import recoded

    return recoded.linear(x, matrix)


def timed(name: str, calls: Sequence[Product], x: Any) -> float:
    """Microseconds of one product, or NaN and a printed line where it cannot run."""
    from kernels.timing import median_us

    few = calls[:FEW_COPIES] if x.shape[0] >= MANY_TOKENS else calls
    try:
        return round(median_us([partial(call, x) for call in few], 7), 2)
    except Exception as error:  # noqa: BLE001 - one path that cannot run is a finding
        print(f"{name}: {type(error).__name__}: {error}", flush=True)
        return float("nan")


def layer_rows(
    layer: Projection, counts: Sequence[int], schemes: Sequence[str] = SCHEMES
) -> list[dict[str, Any]]:
    """Times of one layer for each number of tokens; the paths of 8-bit rows apart, too: they are
    what the tuning table is filled with. `off/rows` is the kernel for bf16 beside the vendor's."""
    import torch

    rows: list[dict[str, Any]] = [
        {
            "layer": layer.name,
            "k": layer.k,
            "n": layer.n + layer.beside,
            "count": layer.count,
            "tokens": tokens,
            "us": {},
            "paths_us": {},
        }
        for tokens in counts
    ]
    for scheme in schemes:
        try:
            by_path = products(layer, scheme)
        except Exception as error:  # noqa: BLE001 - the other schemes may still work
            print(f"{layer.name}, {scheme}: {type(error).__name__}: {error}", flush=True)
            for row in rows:
                row["us"][scheme] = float("nan")
            continue
        for row in rows:
            x = torch.randn(row["tokens"], layer.k, device="cuda").bfloat16()
            for path, calls in by_path.items():
                if scheme == "off" and path and row["tokens"] not in OWN_TOKENS:
                    continue
                name = f"{scheme}/{path}" if path else scheme
                row["paths_us" if path else "us"][name] = timed(name, calls, x)
        del by_path
        torch.cuda.empty_cache()
    return rows


def measure_projections(save: Callable[[Any], object], budget_s: float) -> dict[str, Any]:
    """Times of every layer; `own` sums counts of tokens that all layers have, `load` follows the
    first pass. `small` are the layers that stay dense beside packed ones, with and without our
    kernel, and come first."""
    begin, layers = time.monotonic(), projections()
    small = [row for one in small_projections() for row in layer_rows(one, OWN_TOKENS, ["off"])]
    found: dict[str, Any] = {"small": small, "rows": [], "own": {}, "left_out": []}
    found["small_step_us"] = own_rows_times(small)
    print("small:", json.dumps(small), found["small_step_us"], flush=True)
    for number, counts in enumerate(PASSES):
        for layer in layers:
            if time.monotonic() - begin > budget_s:
                found["left_out"].append([layer.name, *counts])
                continue
            for row in layer_rows(layer, counts):
                found["rows"].append(row)
                shape = f"{layer.name} {row['k']}x{row['n']} M={row['tokens']}"
                print(shape, row["us"], row["paths_us"], flush=True)
            save(found)
        if not found["left_out"]:
            found["own"] = own_times(found["rows"])
            found["dense_step_us"] = own_rows_times(found["rows"])
        if number == 0:
            found["load"] = tried_load()
        save(found)
    return found


def own_times(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Per number of tokens the microseconds of all layers of one step, and ratios to off."""
    sums: dict[int, Counter[str]] = {}
    for row in rows:
        total = sums.setdefault(row["tokens"], Counter())
        for scheme, us in row["us"].items():
            total[scheme] += us * row["count"]
    own = {}
    for tokens, total in sums.items():
        ratios = {f"{s}_ratio": total[s] / total["off"] for s in total if s != "off"}
        own[str(tokens)] = {key: round(value, 3) for key, value in {**total, **ratios}.items()}
    return own


def own_rows_times(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Per number of tokens the microseconds of one step's layers in bf16: the vendor's and ours."""
    sums: dict[str, Counter[str]] = {}
    for row in rows:
        ours = row["paths_us"].get(f"off/{OWN_ROWS}")
        if ours is not None:
            total = sums.setdefault(str(row["tokens"]), Counter())
            total["vendor"] += row["us"]["off"] * row["count"]
            total["ours"] += ours * row["count"]
    return {
        tokens: {key: round(us, 2) for key, us in total.items()} for tokens, total in sums.items()
    }


def tried_load() -> dict[str, float]:
    """`measure_load`, or nothing and a printed line: the other passes do not need it."""
    try:
        return measure_load()
    except Exception as error:  # noqa: BLE001 - the next measurement may still work
        print(f"load: {type(error).__name__}: {error}", flush=True)
        return {}


def measure_load() -> dict[str, float]:
    """Seconds to recode every projection of one rank to 8 bits, and tiles a second at `BITS`."""
    import torch

    from glm_exl3.format.layout import Codebook
    from glm_exl3.ops import recoded
    from glm_exl3.ops.cuda_encode import encode_tiles
    from glm_exl3.ref.datafree import quantize_datafree

    layers, found = projections(), {}
    for scheme in ("fp8", "int8"):
        begin = time.perf_counter()
        for layer in layers:
            weight = torch.randn(layer.n + layer.beside, layer.k, device="cuda").bfloat16()
            for _ in range(layer.count):
                recoded.encode_rows(weight, scheme)
        torch.cuda.synchronize()
        found[f"{scheme}_recode_s"] = round(time.perf_counter() - begin, 2)
    weight = torch.randn(4096, 4096, device="cuda")
    for _ in range(2):
        begin = time.perf_counter()
        quantize_datafree(weight, BITS, Codebook.MUL1, encoder=encode_tiles)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
    tiles = sum(2 * layer.count * layer.n * layer.k for layer in layers) // 256
    found["exl3_tiles_per_s"] = round(weight.numel() / 256 / seconds)
    found["exl3_both_ranks_s_predicted"] = round(tiles / found["exl3_tiles_per_s"], 1)
    return found


def expected(file: Path, results: Iterable[Path]) -> None:
    """Merge result files, those of `nano.recode` too, into the figures of a machine."""
    figures: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    figures["date"] = datetime.now(UTC).date().isoformat()
    for path in results:
        found = json.loads(path.read_text())
        if isinstance(found, list):
            figures |= {f"{row['scheme'].replace(':', '_k')}_kl": row["kl"] for row in found}
            continue
        if "own" in found:
            figures["own"] = found["own"]
            figures |= own_figures(found["own"])
        figures |= found.get("ratios", {}) | found.get("load", {})
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(figures, indent=1) + "\n")


def own_figures(own: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Ratios of one token."""
    one = own.get("1", {})
    return {f"{s}_own_ratio": one[f"{s}_ratio"] for s in SCHEMES[1:] if f"{s}_ratio" in one}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m e2e.recode")
    commands = made.add_subparsers(dest="command", required=True)
    commands.add_parser("predict")
    one = commands.add_parser("projections")
    one.add_argument("result", type=Path)
    one.add_argument("--budget-s", type=float, default=125.0)
    step = commands.add_parser("step")
    step.add_argument("work", type=Path)
    step.add_argument("result", type=Path)
    step.add_argument("--budget-s", type=float, default=500.0)
    step.add_argument("--schemes", type=recode_steps.schemes, default=list(recode_steps.ORDER))
    merge = commands.add_parser("expected")
    merge.add_argument("file", type=Path)
    merge.add_argument("results", type=Path, nargs="+")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    options = parser().parse_args(arguments)
    if options.command == "predict":
        layers = projections()
        for scheme in SCHEMES:
            print(f"{scheme}: {dense_bytes(layers, scheme) / 1e9:.2f} GB a step and rank")
        print("predicted from bytes alone, one request, GB10:", predicted(layers, GB10_GBPS))
    elif options.command == "projections":
        found = measure_projections(
            lambda found: options.result.write_text(json.dumps(found, indent=1)), options.budget_s
        )
        print(json.dumps(found["own"], indent=1), found["load"])
        return recode_steps.judge(own_figures(found["own"]), recode_steps.OWN_TARGETS)
    elif options.command == "step":
        figures = recode_steps.measure(
            options.work, options.result, options.schemes, options.budget_s
        )
        return recode_steps.judge(figures, recode_steps.STEP_TARGETS)
    else:
        expected(options.file, options.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
