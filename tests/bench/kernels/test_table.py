"""The kernel table without a GPU: stored results, peers and the compiler's report."""

from __future__ import annotations

import json

import pytest

from kernels import compile as compiled
from kernels.table import HERE, Peers, Row, line_of

LOG = """\
ptxas info : Compiling entry function '_ZN4exl38moe_downILi4ELNS_8CodebookE1ELi1EEEvNS' for 'sm_90a'
ptxas info    : Function properties for _ZN4exl38moe_downILi4ELNS_8CodebookE1ELi1EEEvNS_12
    0 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers
ptxas info    : Compiling entry function '_ZN4exl312route_kernelENS_12MoeArgumentsE' for 'sm_80'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 30 registers
"""


def test_stored_results_are_complete_and_consistent():
    stored = json.loads((HERE / "results" / "h200.json").read_text())
    assert {"machine", "date", "versions", "copy_gbps", "rows"} <= stored.keys()
    keys = [(r["op"], r["shape"], r["m"], r["k_bits"], r["codebook"]) for r in stored["rows"]]
    assert len(set(keys)) == len(keys)
    peers = Peers.read()
    for row, key in zip(stored["rows"], keys, strict=True):
        assert row["peer_us"] == peers.times.get(key)
        assert (row["peer_source"] is None) == (row["peer_us"] is None)
        assert row["m"] > 64 or row["floor_us"] < row["ours_us"]


def test_flops_of_stored_rows_follow_from_their_shapes():
    for row in json.loads((HERE / "results" / "h200.json").read_text())["rows"]:
        sizes = [int(part) for part in row["shape"].split("x")]
        weights = 8 * 3 * sizes[1] * sizes[2] if row["op"] == "moe" else sizes[0] * sizes[1]
        expected = 2 * row["m"] * weights / row["ours_us"] / 1e6
        assert row["tflops"] == pytest.approx(expected, rel=0.01, abs=0.06)


def test_a_line_shows_the_ratio_only_with_a_peer():
    row = Row("moe", "288x4096x2048", 1, 4, "mcg", 50.0, 100.0, 25.0, 3.0, "log")
    assert " 2.00x " in line_of(row)
    assert "x " not in line_of(Row("moe", "8x8", 1, 4, "mcg", 50.0, None, 25.0, 3.0, None))[30:]


def test_compiler_report_becomes_a_table():
    found = compiled.usages(LOG)
    assert found[0] == compiled.Usage("moe_down K4 mcg 1", "90a", 64, 8, 4)
    assert found[1].kernel == "route_kernel"
    assert "| moe_down K4 mcg 1 |  | 64 (12 B) |" in compiled.table(found)
