"""The dense recode at real sizes: single projections, whole steps, load time, and a prediction.

    python -m e2e.recode predict                           (no GPU: bytes only)
    python -m e2e.recode projections RESULT.json           (one GPU)
    python -m e2e.recode step WORKDIR RESULT.json          (one GPU, minutes)
    python -m e2e.recode expected FILE RESULT.json ...     (figures for bench/expected)

Everything is one rank of two of the `tr3` family. A projection's time is that of a call in a CUDA
graph over several copies of its weight, so that it comes from memory; the own time of a scheme is
their sum over the layers of one step. `step` runs `e2e.inside` once per scheme with
`--load-format exl3_dummy`. Predictions are bytes over bandwidth and say so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

RANKS, HIDDEN_LAYERS = 2, 45
SCHEMES = ("off", "fp8", "int8", "exl3")
BITS = 6
TOKENS = (1, 2, 4, 8, 16, 32, 64, 512, 4096)
COPIES_BYTES = 1 << 30
GB10_GBPS = 235.0  # what public copies reach on GB10, 231 to 240 GB/s
EXPERT_BITS, EXPERT_WEIGHTS, TOP_K, SPARSE_LAYERS = 4, 3 * 4096 * 2048, 8, 42


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


def calls_of(layer: Projection, scheme: str, tokens: int) -> Sequence[Callable[[], Any]]:
    """Calls over several copies of the layer's weight."""
    import torch
    import torch.nn.functional as F

    from glm_exl3.ops import recoded
    from kernels import inputs

    random = torch.Generator("cuda").manual_seed(layer.k)
    x = torch.randn(tokens, layer.k, device="cuda", generator=random).bfloat16()
    copies = max(2, min(64, COPIES_BYTES // layer.bytes(scheme)))

    def weight(rows: int) -> torch.Tensor:
        made = torch.empty(rows, layer.k, dtype=torch.bfloat16, device="cuda")
        return made.normal_(generator=random)

    if scheme == "off":
        return [partial(F.linear, x, weight(layer.n + layer.beside)) for _ in range(copies)]
    if scheme in ("fp8", "int8"):
        made = [recoded.encode_rows(weight(layer.n + layer.beside), scheme) for _ in range(copies)]
        return [partial(recoded.linear, x, matrix) for matrix in made]
    from glm_exl3.format.layout import Codebook
    from glm_exl3.ops import cuda_backend

    def both(matrix: Any, beside: torch.Tensor | None) -> torch.Tensor:
        y = cuda_backend.linear(x, matrix)
        return y if beside is None else torch.cat([y, F.linear(x, beside)], -1)

    calls = []
    for _ in range(copies):
        shape = (layer.k, layer.n, 16 * BITS)
        packed = inputs.random_matrix(*shape, Codebook.MUL1, random)
        beside = weight(layer.beside) if layer.beside else None
        calls.append(partial(both, cuda_backend.prepare_linear(packed), beside))
    return calls


def measure_projections(save: Callable[[Any], object]) -> None:
    """Times of every layer, scheme and number of tokens; the paths of 8-bit rows apart, too."""
    import torch

    from kernels.timing import median_us

    rows: list[dict[str, Any]] = []
    for layer in projections():
        for tokens in TOKENS:
            row: dict[str, Any] = {"layer": layer.name, "k": layer.k, "n": layer.n + layer.beside}
            row |= {"count": layer.count, "tokens": tokens, "us": {}, "paths_us": {}}
            for scheme in SCHEMES:
                row["us"][scheme] = round(median_us(calls_of(layer, scheme, tokens), 7), 2)
                torch.cuda.empty_cache()
            row["paths_us"] = paths_of(layer, tokens)
            rows.append(row)
            print(
                layer.name,
                f"{layer.k}x{row['n']} M={tokens}",
                row["us"],
                row["paths_us"],
                flush=True,
            )
            save({"rows": rows, "own": own_times(rows)})


def paths_of(layer: Projection, tokens: int) -> dict[str, float]:
    """Each path of 8-bit rows by itself: what the tuning table is filled with."""
    import torch

    from glm_exl3.ops import recoded, tuning
    from kernels.timing import median_us

    found = {}
    x = torch.randn(tokens, layer.k, device="cuda").bfloat16()
    for scheme in ("fp8", "int8"):
        weight = torch.randn(layer.n + layer.beside, layer.k, device="cuda").bfloat16()
        copies = max(2, min(32, COPIES_BYTES // (2 * weight.numel())))
        matrices = [recoded.encode_rows(weight, scheme) for _ in range(copies)]
        for path in tuning.PATHS[scheme]:
            try:
                calls = [partial(recoded.by_path, x, matrix, path) for matrix in matrices]
                found[f"{scheme}/{path}"] = round(median_us(calls, 5), 2)
            except Exception as error:  # noqa: BLE001 - one path that cannot run is a finding
                found[f"{scheme}/{path}"] = float("nan")
                print(f"{scheme}/{path}: {error}", flush=True)
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


def measure_load(save: Callable[[Any], object]) -> dict[str, float]:
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
    save(found)
    return found


def run_step(work: Path, scheme: str) -> dict[str, Any]:
    """One engine with the dummy weights in a process of its own."""
    folder, result = work / "tr3", work / f"{scheme}.json"
    env = {
        **os.environ,
        "GLM_EXL3_DENSE_RECODE": scheme,
        "GLM_EXL3_DENSE_BITS": str(BITS),
        "GLM_EXL3_DENSE_CACHE": str(work / "cache"),
    }
    if not folder.exists():
        dummy = ["--family", "tr3", "--ranks", str(RANKS), "--out", str(folder)]
        subprocess.run([sys.executable, "-m", "glm_exl3.dummy", *dummy], check=True)
    if scheme == "exl3":
        command = [sys.executable, "-m", "glm_exl3.recode", str(folder), "--headers-only"]
        subprocess.run(command, env=env, check=True)
    engine = {
        "model": str(folder),
        "load_format": "exl3_dummy",
        "max_model_len": 40960,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 16,
        "language_model_only": True,
        "skip_tokenizer_init": True,
    }
    measures = [
        {"kind": "decode", "requests": 1, "context": 1024, "tokens": 64},
        {"kind": "decode", "requests": 16, "context": 1024, "tokens": 48},
        {"kind": "prefill", "context": 8192},
        {"kind": "prefill", "context": 32768},
    ]
    job = work / f"{scheme}-job.json"
    job.write_text(json.dumps({"engine": engine, "measure": measures}))
    subprocess.run([sys.executable, "-m", "e2e.inside", str(job), str(result)], env=env, check=True)
    measured: dict[str, Any] = json.loads(result.read_text())
    return measured


def step_ratios(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Step time, and prefill rate, of every scheme over those of `off`."""
    figures: dict[str, float] = {}

    def value(scheme: str, index: int) -> float:
        row = results[scheme]["rows"][index]
        return float(row["step_ms"] if row["kind"] == "decode" else row["seconds"])

    names = ("step_ratio", "step16_ratio", "prefill8k_ratio", "prefill32k_ratio")
    for scheme in results:
        if scheme == "off":
            continue
        for index, name in enumerate(names):
            rows = [results[s]["rows"] for s in ("off", scheme)]
            if all(len(row) > index and "error" not in row[index] for row in rows):
                ratio = value(scheme, index) / value("off", index)
                if name.startswith("prefill"):
                    ratio = 1 / ratio
                figures[f"{scheme}_{name}"] = round(ratio, 4)
    return figures


def expected(file: Path, results: Iterable[Path]) -> None:
    """Merge result files into the figures of a machine."""
    figures: dict[str, Any] = {"date": datetime.now(UTC).date().isoformat()}
    for path in results:
        found = json.loads(path.read_text())
        if "own" in found:
            figures["own"] = found["own"]
            one = found["own"].get("1", {})
            figures |= {f"{s}_own_ratio": one.get(f"{s}_ratio") for s in SCHEMES[1:]}
        figures |= found.get("ratios", {}) | found.get("load", {})
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(figures, indent=1) + "\n")


def main() -> None:
    command, *rest = sys.argv[1:]
    if command == "predict":
        layers = projections()
        for scheme in SCHEMES:
            print(f"{scheme}: {dense_bytes(layers, scheme) / 1e9:.2f} GB a step and rank")
        print("predicted from bytes alone, one request, GB10:", predicted(layers, GB10_GBPS))
    elif command == "projections":
        result = Path(rest[0])
        measure_projections(lambda found: result.write_text(json.dumps(found, indent=1)))
        found = json.loads(result.read_text())
        found["load"] = measure_load(lambda load: None)
        result.write_text(json.dumps(found, indent=1))
        print(json.dumps(found["own"], indent=1), found["load"])
    elif command == "step":
        work, result = map(Path, rest)
        work.mkdir(parents=True, exist_ok=True)
        results: dict[str, Any] = {}
        for scheme in SCHEMES:
            results[scheme] = run_step(work, scheme)
            found = {"results": results, "ratios": step_ratios(results)}
            result.write_text(json.dumps(found, indent=1))
            print(scheme, found["ratios"], flush=True)
    elif command == "expected":
        expected(Path(rest[0]), map(Path, rest[1:]))
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
