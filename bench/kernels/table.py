"""The kernel table: ours, the peer's, the floor and the ratios, printed and stored as JSON.

`python -m kernels --out FILE` measures every row on the GPU at hand. The floor of a row is the
bytes of the packed weights it must read over the copy rate measured in the same run; routed rows
count the experts their random routing meets. Peer figures come from `peer_h200.json`, measured
earlier on the same kind of machine, and are marked with their source.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from glm_exl3.format.layout import Codebook
from glm_exl3.ops import cuda_backend
from glm_exl3.ops.matrix import Exl3Stack
from kernels import inputs
from kernels.timing import copy_gbps, median_us

HERE = Path(__file__).parent
EXPERTS, HIDDEN, TOP_K, LIMIT = 288, 4096, 8, 10.0
ROTATED_BYTES = 200_000_000  # more than three times the 60 MB of L2


@dataclass(frozen=True)
class Row:
    """One line of the table; times in microseconds, `tflops` counts useful multiply-adds twice."""

    op: str
    shape: str
    m: int
    k_bits: int
    codebook: str
    ours_us: float
    peer_us: float | None
    floor_us: float
    tflops: float
    peer_source: str | None


@dataclass(frozen=True)
class Peers:
    """The peer's figures by row."""

    source: str
    times: dict[tuple[str, str, int, int, str], float]

    @classmethod
    def read(cls, path: Path = HERE / "peer_h200.json") -> Peers:
        data = json.loads(path.read_text())
        times = {
            (row["op"], row["shape"], row["m"], row["k_bits"], row["codebook"]): row["peer_us"]
            for row in data["rows"]
        }
        return cls(data["source"], times)

    def row(
        self, key: tuple[str, str, int, int, str], ours: float, floor: float, flop: float
    ) -> Row:
        peer = self.times.get(key)
        source = self.source if peer is not None else None
        return Row(*key, round(ours, 2), peer, round(floor, 2), round(flop / ours / 1e6, 1), source)


def _run_moe(call: inputs.Routed, w13: Exl3Stack, w2: Exl3Stack) -> torch.Tensor:
    return cuda_backend.moe(call.x, call.ids, call.weights, w13, w2, LIMIT)


def moe_rows(
    bits: int,
    codebook: Codebook,
    intermediate: int,
    tokens: tuple[int, ...],
    peers: Peers,
    gbps: float,
) -> Iterator[Row]:
    generator = torch.Generator("cuda").manual_seed(bits * 1000 + intermediate)
    w13 = inputs.random_stack((EXPERTS, 2), HIDDEN, intermediate, 16 * bits, codebook, generator)
    w2 = inputs.random_stack((EXPERTS,), intermediate, HIDDEN, 16 * bits, codebook, generator)
    w13, w2 = cuda_backend.prepare_moe(w13, w2)
    for m in tokens:
        count = 12 if m <= 8 else 4 if m <= 256 else 1
        calls = [inputs.random_routing(m, HIDDEN, EXPERTS, TOP_K, generator) for _ in range(count)]
        met = sum(call.ids.unique().numel() for call in calls) / count

        run = partial(_run_moe, w13=w13, w2=w2)
        ours = median_us([partial(run, call) for call in calls], 15 if m <= 256 else 7)
        weights = 3 * HIDDEN * intermediate
        key = ("moe", f"{EXPERTS}x{HIDDEN}x{intermediate}", m, bits, codebook.value)
        floor = met * weights * bits / 8 / gbps / 1000.0
        yield peers.row(key, ours, floor, 2.0 * m * TOP_K * weights)


def linear_rows(
    k: int,
    n: int,
    bits: int,
    codebook: Codebook,
    tokens: tuple[int, ...],
    peers: Peers,
    gbps: float,
) -> Iterator[Row]:
    generator = torch.Generator("cuda").manual_seed(k + n + bits)
    size_bytes = k * n * bits / 8
    count = max(2, min(12, int(ROTATED_BYTES / size_bytes) + 1))
    matrices = [inputs.random_matrix(k, n, 16 * bits, codebook, generator) for _ in range(count)]
    for m in tokens:
        x = torch.randn(m, k, device="cuda", generator=generator).to(torch.bfloat16)
        used = matrices if m <= 64 else matrices[:1]
        ours = median_us([partial(cuda_backend.linear, x, w) for w in used], 15 if m <= 64 else 7)
        key = ("linear", f"{k}x{n}", m, bits, codebook.value)
        yield peers.row(key, ours, size_bytes / gbps / 1000.0, 2.0 * m * k * n)
        if m >= 512:
            weight = torch.randn(k, n, device="cuda", generator=generator).to(torch.bfloat16)
            dense = median_us([partial(torch.matmul, x, weight)], 7)
            print(f"  cuBLAS BF16 {k}x{n} M={m}: {dense:.1f} us, ours / cuBLAS {ours / dense:.3f}")


def all_rows(peers: Peers, gbps: float) -> Iterator[Row]:
    mcg, mul1 = Codebook.MCG, Codebook.MUL1
    every = (1, 2, 4, 8, 16, 32, 64, 256, 1024, 4096, 8192)
    yield from moe_rows(4, mcg, 2048, every, peers, gbps)
    yield from moe_rows(4, mcg, 1024, (1, 2, 4, 8, 16, 32, 64, 256, 1024, 4096), peers, gbps)
    yield from moe_rows(3, mul1, 2048, every[:-1], peers, gbps)
    for k, n, bits, tokens in (
        (4096, 24576, 4, (1, 4, 8, 16, 32, 64, 2048, 8192)),
        (8192, 4096, 4, (1, 4, 8, 16, 32, 64)),
        (1536, 16384, 4, (1, 4, 8, 16, 32, 64)),
        (4096, 2048, 4, (1, 8)),
        (4096, 24576, 6, (1, 8)),
        (4096, 154880, 6, (1, 4, 8, 16, 32, 64)),
    ):
        yield from linear_rows(k, n, bits, mcg, tokens, peers, gbps)
    for k, n, bits in ((4096, 24576, 4), (8192, 4096, 4), (4096, 24576, 5), (4096, 154880, 6)):
        yield from linear_rows(k, n, bits, mul1, (1, 8), peers, gbps)


def line_of(row: Row) -> str:
    ratio = f"{row.peer_us / row.ours_us:5.2f}x" if row.peer_us else "     -"
    peer = f"{row.peer_us:9.1f}" if row.peer_us else "        -"
    return (
        f"{row.op:6} {row.shape:14} K{row.k_bits} {row.codebook:4} M={row.m:<5}"
        f" {row.ours_us:9.1f} {peer} {row.floor_us:8.1f} {ratio}"
        f" {row.ours_us / row.floor_us:6.2f} {row.tflops:7.1f}"
    )


def measure(out: Path) -> None:
    """Measure, print and write `out`: {machine, date, versions, copy_gbps, rows}."""
    gbps = copy_gbps()
    peers = Peers.read()
    print(f"{torch.cuda.get_device_name()}, copy {gbps:.0f} GB/s; times in us")
    print("op     shape          rate    tokens      ours      peer    floor  ratio /floor TFLOP/s")
    rows = []
    for row in all_rows(peers, gbps):
        rows.append(row)
        print(line_of(row), flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    result = {
        "machine": torch.cuda.get_device_name(),
        "date": time.strftime("%Y-%m-%d"),
        "versions": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "peer": "exllamav3 1.6.5",
        },
        "copy_gbps": round(gbps, 1),
        "rows": [asdict(row) for row in rows],
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
