"""The all-reduce of a step is timed alike on every rank, and an error stays in its row."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from e2e import allreduce, inside

LIMIT = 1024


def communicator(calls: list[str], custom: bool = True) -> Any:
    """One whose custom all-reduce takes up to LIMIT rows and whose NCCL fails at eight rows."""

    def nccl(values: torch.Tensor, out: torch.Tensor) -> None:
        calls.append(f"nccl {len(values)}")
        assert out.shape == values.shape and out.data_ptr() != values.data_ptr()
        if len(values) == 8:
            raise RuntimeError("no link")

    ours = SimpleNamespace(
        should_custom_ar=lambda values: len(values) <= LIMIT,
        custom_all_reduce=lambda values: calls.append(f"custom {len(values)}"),
    )
    theirs = SimpleNamespace(disabled=False, all_reduce=nccl)
    return SimpleNamespace(ca_comm=ours if custom else None, pynccl_comm=theirs)


class Clock:
    """Calls once and counts what the ranks were asked to agree on."""

    def __init__(self, peers_fail_at: int = -1) -> None:
        self.asked, self.peers_fail_at = list[bool](), peers_fail_at

    def agreed(self, good: bool) -> bool:
        self.asked.append(good)
        return good and len(self.asked) - 1 != self.peers_fail_at

    def __call__(self, call: allreduce.Call) -> dict[str, Any]:
        call()
        return {"us": 5.0}


def make(tokens: int) -> torch.Tensor:
    return torch.zeros(tokens, 4, dtype=torch.bfloat16)


def test_both_ways_get_a_row_at_every_size() -> None:
    calls = list[str]()
    rows = allreduce.measure(communicator(calls), make, Clock())
    assert [(row["tokens"], row["choice"]) for row in rows] == [
        (tokens, choice) for tokens in (1, 8, 16, 8192) for choice in ("custom", "nccl")
    ]
    assert {row["kind"] for row in rows} == {"allreduce"}
    by = {(row["tokens"], row["choice"]): row for row in rows}
    assert by[1, "custom"]["us"] == 5.0 and by[8192, "nccl"]["us"] == 5.0
    assert "no link" in by[8, "nccl"]["error"] and by[8, "nccl"]["us"] is None
    assert by[8192, "custom"]["us"] is None and "left_out" in by[8192, "custom"]
    assert calls[:2] == ["custom 1", "nccl 1"] and len(calls) == 7
    json.dumps(rows)


def test_a_switched_off_way_is_left_out() -> None:
    rows = allreduce.measure(communicator([], custom=False), make, Clock())
    assert all("left_out" in row for row in rows if row["choice"] == "custom")


def test_a_size_that_a_rank_cannot_begin_is_begun_by_none() -> None:
    calls, clock = list[str](), Clock(peers_fail_at=0)

    def scarce(tokens: int) -> torch.Tensor:
        if tokens == 16:
            raise MemoryError("full")
        return make(tokens)

    rows = allreduce.measure(communicator(calls), scarce, clock)
    assert clock.asked == [True, True, False, True]
    assert calls == ["custom 8", "nccl 8", "nccl 8192"]
    assert [row["tokens"] for row in rows if "choice" not in row] == [1, 16]
    assert "a peer" in rows[0]["error"] and "full" in rows[3]["error"]


def test_rows_of_one_measurement_are_all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"kind": "allreduce", "tokens": 1, "choice": name, "us": 3.0} for name in "ab"]
    bench = SimpleNamespace(
        start_s=1.0, llm=None, allreduce=lambda *_: rows, prefill=lambda *_: {"seconds": 2.0}
    )
    monkeypatch.setattr(inside, "Bench", lambda _: bench)
    monkeypatch.setattr(inside, "pool", lambda _: {})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1, 2))
    saved: list[Any] = []
    job = {"engine": {}, "measure": [{"kind": "allreduce"}, {"kind": "prefill"}]}
    inside.perform(job, saved.append)
    found = saved[-1]["rows"]
    assert found[:2] == rows and found[2]["seconds"] == 2.0 and found[2]["kind"] == "prefill"
