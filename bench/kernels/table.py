"""The kernel table: ours and the peer's best path in one run, floor, targets; stored as JSON.

`python -m kernels` measures every row on the GPU at hand. The floor of a row is the bytes of the
packed weights it must read over the copy rate measured in the same run; routed rows count the
experts their random routing meets. Of the peer's paths that fit a row the fastest counts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from glm_exl3.ops import cuda_backend
from glm_exl3.ops.matrix import Exl3Stack
from kernels import bf16, encoder, inputs
from kernels.cases import DENSE, EXPERTS, HIDDEN, LIMIT, ROUTED, TOP_K, DenseCase, RoutedCase
from kernels.peer import calls as peer
from kernels.targets import Key, Target, targets
from kernels.timing import copy_gbps, median_us

HERE = Path(__file__).parent
PEER = "exllamav3 1.6.5"
PEER_LIBRARY = HERE.parents[1] / ".peer" / "exl3_peer.so"
ROTATED_BYTES = 200_000_000  # more than three times the 60 MB of L2
MOST_DIFFERENCE = 3e-2  # of the peer's answers from ours, relative Frobenius

Call = Callable[[], torch.Tensor]


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

    @property
    def key(self) -> Key:
        return self.op, self.shape, self.m, self.k_bits, self.codebook

    @property
    def flop(self) -> float:
        return self.tflops * self.ours_us * 1e6


def _replays(m: int) -> int:
    return 15 if m <= 256 else 7


def _same(found: torch.Tensor, ours: torch.Tensor) -> None:
    """Raises ValueError when the peer computed something else."""
    difference = float((found.double() - ours.double()).norm() / ours.double().norm())
    if not difference < MOST_DIFFERENCE:
        raise ValueError(f"the peer's answer is {difference:.3f} away from ours")


def _peer_us(paths: Sequence[Sequence[Call]], ours: torch.Tensor, m: int) -> float:
    """The fastest of several paths, each a list of calls with rotating inputs."""
    for path in paths:
        _same(path[0](), ours)
    return min(median_us(path, _replays(m)) for path in paths)


def _run_moe(call: inputs.Routed, w13: Exl3Stack, w2: Exl3Stack) -> torch.Tensor:
    return cuda_backend.moe(call.x, call.ids, call.weights, w13, w2, LIMIT)


def routed_rows(case: RoutedCase, gbps: float, with_peer: bool) -> Iterator[Row]:
    bits, codebook, width = case.bits, case.codebook, case.intermediate
    generator = torch.Generator("cuda").manual_seed(bits * 1000 + width)
    w13 = inputs.random_stack((EXPERTS, 2), HIDDEN, width, 16 * bits, codebook, generator)
    w2 = inputs.random_stack((EXPERTS,), width, HIDDEN, 16 * bits, codebook, generator)
    experts = peer.Experts.of(w13, w2, LIMIT)
    run = partial(
        _run_moe, **dict(zip(("w13", "w2"), cuda_backend.prepare_moe(w13, w2), strict=True))
    )
    weights = 3 * HIDDEN * width
    for m in case.tokens:
        count = 12 if m <= 8 else 4 if m <= 256 else 1
        calls = [inputs.random_routing(m, HIDDEN, EXPERTS, TOP_K, generator) for _ in range(count)]
        met = sum(call.ids.unique().numel() for call in calls) / count
        ours = median_us([partial(run, call) for call in calls], _replays(m))
        theirs = None
        if with_peer:
            paths = zip(*(peer.moe(call, experts) for call in calls), strict=True)
            theirs = _peer_us([list(path) for path in paths], run(calls[0]), m)
        floor = met * weights * bits / 8 / gbps / 1000.0
        shape = f"{EXPERTS}x{HIDDEN}x{width}"
        key = ("moe", shape, m, bits, codebook.value)
        yield _row(key, ours, theirs, floor, 2.0 * m * TOP_K * weights)


def dense_rows(case: DenseCase, gbps: float, with_peer: bool) -> Iterator[Row]:
    k, n, bits = case.k, case.n, case.bits
    generator = torch.Generator("cuda").manual_seed(k + n + bits)
    size_bytes = k * n * bits / 8
    count = max(2, min(12, int(ROTATED_BYTES / size_bytes) + 1))
    matrices = [
        inputs.random_matrix(k, n, 16 * bits, case.codebook, generator) for _ in range(count)
    ]
    for m in case.tokens:
        x = torch.randn(m, k, device="cuda", generator=generator).to(torch.bfloat16)
        used = matrices if m <= 64 else matrices[:1]
        calls = [partial(cuda_backend.linear, x, matrix) for matrix in used]
        ours = median_us(calls, _replays(m))
        theirs = None
        if with_peer:
            paths = [[peer.linear(x, matrix) for matrix in used]]
            theirs = _peer_us(paths, calls[0](), m)
        key = ("linear", f"{k}x{n}", m, bits, case.codebook.value)
        yield _row(key, ours, theirs, size_bytes / gbps / 1000.0, 2.0 * m * k * n)


def _row(key: Key, ours: float, theirs: float | None, floor: float, flop: float) -> Row:
    rounded = None if theirs is None else round(theirs, 2)
    return Row(*key, round(ours, 2), rounded, round(floor, 2), round(flop / ours / 1e6, 1))


def all_rows(gbps: float, with_peer: bool) -> Iterator[Row]:
    for case in ROUTED:
        yield from routed_rows(case, gbps, with_peer)
    for dense_case in DENSE:
        yield from dense_rows(dense_case, gbps, with_peer)


HEADER = (
    f"{'op':6} {'shape':14} {'rate':8} {'tokens':>6} {'ours':>9} {'peer':>9} {'ratio':>6}"
    f" {'floor':>8} {'/floor':>6} {'TFLOP/s':>7}  target"
)


def line_of(row: Row, wanted: Sequence[Target]) -> str:
    """One line for people; every target says whether it is met."""
    ratio = f"{row.peer_us / row.ours_us:5.2f}x" if row.peer_us else "     -"
    peer_us = f"{row.peer_us:9.1f}" if row.peer_us else "        -"
    verdicts = [
        f"{target.us:.0f} ({target.why}): "
        + ("met" if row.ours_us <= target.us else f"missed by {row.ours_us / target.us - 1:.0%}")
        for target in wanted
    ]
    return (
        f"{row.op:6} {row.shape:14} K{row.k_bits} {row.codebook:5} {row.m:6}"
        f" {row.ours_us:9.1f} {peer_us} {ratio} {row.floor_us:8.1f}"
        f" {row.ours_us / row.floor_us:6.2f} {row.tflops:7.1f}  {'; '.join(verdicts) or '-'}"
    )


def lines_of(result: dict) -> list[str]:
    """The table of a stored result."""
    rows = [Row(**row) for row in result["rows"]]
    ours = {row.key: row.ours_us for row in rows}
    references = {(r["op"], r["shape"], r["m"]): r["us"] for r in result["bf16"]}
    lines = [f"{result['machine']}, copy {result['copy_gbps']:.0f} GB/s; times in us", HEADER]
    lines += [line_of(row, targets(row.key, row.flop, ours, references)) for row in rows]
    lines += [
        f"bf16 {r['op']} {r['shape']} {r['m']}: {r['us']:.1f} us, {r['tflops']:.0f} TFLOP/s"
        for r in result["bf16"]
    ]
    return lines + [str(encoder.Rate(**rate)) for rate in result["encode"]]


def measure(out: Path, library: Path | None) -> list[str]:
    """Measure, write `out` and return the table's lines.

    `out` gets {machine, date, versions, copy_gbps, rows, bf16, encode}. Without the `library` of
    the peer (see `kernels.peer.build`) its column stays empty.
    """
    if library is not None:
        peer.load(library)
    gbps = copy_gbps()
    rows = []
    for row in all_rows(gbps, library is not None):
        rows.append(row)
        print(line_of(row, []), flush=True)
    references = [*bf16.dense(), *bf16.routed()]
    result = {
        "machine": torch.cuda.get_device_name(),
        "date": time.strftime("%Y-%m-%d"),
        "versions": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "peer": PEER if library is not None else None,
        },
        "copy_gbps": round(gbps, 1),
        "rows": [asdict(row) for row in rows],
        "bf16": [asdict(reference) for reference in references],
        "encode": [asdict(rate) for rate in encoder.rates()],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    return lines_of(result)
