"""The kernel table without a GPU: stored results, peers and the compiler's report."""

from __future__ import annotations

import json

import pytest

from glm_exl3.ops import ext
from kernels import compile as compiled
from kernels.cases import DENSE, EXPERTS, HIDDEN, ROUTED
from kernels.table import HERE, Row, line_of, lines_of
from kernels.targets import ABSOLUTE, TFLOPS, Target, targets

LOG = """\
ptxas info : Compiling entry function '_ZN4exl38moe_downILi4ELNS_8CodebookE1ELi1EEEvNS' for 'sm_90a'
ptxas info    : Function properties for _ZN4exl38moe_downILi4ELNS_8CodebookE1ELi1EEEvNS_12
    0 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers
ptxas info    : Compiling entry function '_ZN4exl312route_kernelENS_12MoeArgumentsE' for 'sm_80'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 30 registers
"""


KEYS = {"op", "shape", "m", "k_bits", "codebook", "ours_us", "peer_us", "floor_us", "tflops"}


@pytest.fixture
def stored():
    return json.loads((HERE / "results" / "h200.json").read_text())


def test_stored_results_are_complete_and_consistent(stored):
    assert {"machine", "date", "versions", "copy_gbps", "rows", "bf16", "encode"} == stored.keys()
    assert all(row.keys() == KEYS for row in stored["rows"])
    keys = [Row(**row).key for row in stored["rows"]]
    assert len(set(keys)) == len(keys)
    for row in stored["rows"]:
        assert row["m"] > 64 or row["floor_us"] < row["ours_us"]


def test_flops_of_stored_rows_follow_from_their_shapes(stored):
    for row in stored["rows"]:
        sizes = [int(part) for part in row["shape"].split("x")]
        weights = 8 * 3 * sizes[1] * sizes[2] if row["op"] == "moe" else sizes[0] * sizes[1]
        expected = 2 * row["m"] * weights / row["ours_us"] / 1e6
        assert row["tflops"] == pytest.approx(expected, rel=0.01, abs=0.06)


def row(ours: float, peer: float | None = None, **other) -> Row:
    named = {"op": "moe", "shape": "288x4096x2048", "m": 1, "k_bits": 4, "codebook": "mcg"} | other
    return Row(**named, ours_us=ours, peer_us=peer, floor_us=25.0, tflops=3.0)


def test_a_line_shows_the_ratio_only_with_a_peer():
    assert " 2.00x " in line_of(row(50.0, 100.0), [])
    assert "x " not in line_of(row(50.0), [])[20:]


def test_a_line_says_of_every_target_whether_it_is_met():
    line = line_of(row(50.0), [Target(60.0, "limit"), Target(40.0, "1.0x bf16")])
    assert "60 (limit): met; 40 (1.0x bf16): missed by 25%" in line


def test_a_stored_result_prints_without_a_gpu(stored):
    lines = lines_of(stored)
    assert len(lines) == 2 + sum(len(stored[name]) for name in ("rows", "bf16", "encode"))
    assert any("45 (limit): " in line for line in lines)


@pytest.mark.parametrize(
    ("key", "wanted"),
    [
        (("moe", "288x4096x2048", 8, 4, "mcg"), [Target(328, "limit")]),
        (
            ("moe", "288x4096x2048", 8192, 4, "mcg"),
            [Target(1.0, "400 TFLOP/s"), Target(145.0, "1.45x bf16")],
        ),
        (
            ("moe", "288x4096x2048", 1024, 4, "mcg"),
            [Target(2300, "limit"), Target(100.0, "1.0x bf16")],
        ),
        (("linear", "8192x4096", 8, 4, "mul1"), [Target(12.5, "1.25x mcg")]),
        (("linear", "4096x24576", 8192, 4, "mcg"), [Target(125.0, "1.25x bf16")]),
        (("linear", "4096x24576", 64, 4, "mcg"), []),
    ],
)
def test_targets_are_limits_and_ratios_within_the_run(key, wanted):
    ours = {("linear", "8192x4096", 8, 4, "mcg"): 10.0}
    bf16 = {(op, shape, m): 100.0 for op, shape, m, *_ in [key] if m >= 64}
    assert targets(key, 400e6, ours, bf16) == wanted


def test_the_table_has_a_row_for_every_target():
    rows = {
        ("moe", f"{EXPERTS}x{HIDDEN}x{case.intermediate}", m, case.bits, case.codebook.value)
        for case in ROUTED
        for m in case.tokens
    }
    rows |= {
        ("linear", f"{case.k}x{case.n}", m, case.bits, case.codebook.value)
        for case in DENSE
        for m in case.tokens
    }
    for (op, shape, bits, codebook), times in ABSOLUTE.items():
        assert {(op, shape, m, bits, codebook) for m in times} <= rows
    assert set(TFLOPS) <= rows


def test_compiler_report_becomes_a_table():
    found = compiled.usages(LOG)
    assert found[0] == compiled.Usage("moe_down K4 mcg 1", "90a", 64, 8, 4)
    assert found[1].kernel == "route_kernel"
    assert "| moe_down K4 mcg 1 |  | 64 (12 B) |" in compiled.table(found)


def test_the_sample_takes_shared_sources_and_one_rate_of_each_codebook():
    names = [path.stem for path in ext.SOURCES.glob("*.cu")]
    chosen = {name for name in names if compiled.in_sample(name)}
    for shared in ("decode", "prefill", "prefill_route", "dequant", "encode", "hadamard"):
        assert shared in chosen
    for family in ("decode", "prefill", "prefill_mma"):
        rates = {name for name in chosen if name.startswith(f"{family}_k")}
        assert rates == {f"{family}_k4_mcg", f"{family}_k3_mul1"}


def test_without_a_compiler_nothing_is_compiled_and_that_is_said(monkeypatch, capsys):
    monkeypatch.setattr(compiled.ext, "nvcc", lambda: None)
    monkeypatch.setattr("sys.argv", ["compile"])
    assert compiled.main() == 0
    assert "NOT compiled" in capsys.readouterr().out
