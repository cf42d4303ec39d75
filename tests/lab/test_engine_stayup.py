"""The supervisor over the real engine in two containers: a cable pulled, a frozen, a killed rank.

Its figures go to results.json under `stayup.engine_nodes`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import engine_lab
import figures
import httpx
import pytest
from head import STATE, Head
from lab import Node

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(3600)]
START_S = 1500.0
LINK_S, STALL_S, SLACK_S, AWAY_S = 5.0, 90.0, 60.0, 40.0
FIGURES: dict[str, float] = {}


@dataclass
class Supervised:
    """A launch on the lab's head, and what its supervisor there wrote."""

    head: Head
    cold_s: float

    @property
    def worker(self) -> Node:
        return self.head.lab.nodes[1]

    def read(self, name: str) -> str:
        return self.head.node.shell.run(["cat", f"{STATE}/supervisor/{name}"]).out

    @property
    def said(self) -> str:
        return self.read("log")

    def generation(self) -> str:
        """The one that is watched; empty while none is."""
        with suppress(ValueError):
            saved = json.loads(self.read("state.json"))
            return str(saved["generation"]) if saved["phase"] == "watching" else ""
        return ""

    def wait(self, what: Callable[[], object], limit_s: float) -> float:
        begin = time.monotonic()
        while not what():
            assert time.monotonic() - begin < limit_s, self.said
            time.sleep(0.2)
        return round(time.monotonic() - begin, 2)

    def told(self, text: str, seen: int, limit_s: float) -> float:
        return self.wait(lambda: text in self.said[seen:], limit_s)

    def back(self, before: str) -> float:
        took = self.wait(lambda: self.generation() not in ("", before), self.cold_s + 5 * SLACK_S)
        assert ask(8) == 200
        return took


def ask(tokens: int) -> int:
    body = {"model": "GLM-5.3-Flash-EXL3", "prompt": "a b", "max_tokens": tokens,
            "temperature": 0, "ignore_eos": True}  # fmt: skip
    url = "http://127.0.0.1:8888/v1/completions"
    return httpx.post(url, json=body, timeout=600).status_code


@pytest.fixture(scope="module")
def launched(tiny_model) -> Iterator[Supervised]:
    with engine_lab.opened(tiny_model) as head:
        engine_lab.build(head)
        assert head.run("start", timeout_s=START_S, SUPERVISE="0").code == 0
        assert head.run("stop").code == 0
        begin = time.monotonic()
        done = head.run("start", timeout_s=START_S, SUPERVISE="1")
        cold_s = time.monotonic() - begin
        assert done.code == 0 and "supervised by process" in done.out, done.out + done.err
        FIGURES["cold_start_s"] = round(cold_s, 1)
        yield Supervised(head, cold_s)
        assert head.run("stop").code == 0
    figures.note("engine_nodes", FIGURES | figures.here())


@pytest.fixture
def traffic() -> Iterator[list[object]]:
    """A long request in flight; its status or error comes into the list."""
    ends: list[object] = []

    def run() -> None:
        try:
            ends.append(ask(900))
        except httpx.HTTPError as error:
            ends.append(type(error).__name__)

    client = threading.Thread(target=run, daemon=True)
    client.start()
    time.sleep(5)
    yield ends
    client.join(30)
    assert len(ends) == 1 and ends[0] != 200


def test_a_cable_pulled_and_put_back(launched, traffic) -> None:
    before, seen = launched.generation(), len(launched.said)
    assert before and not traffic
    launched.worker.unplug()
    try:
        FIGURES["cable_told_s"] = launched.told("[link-down] node2", seen, 60)
        launched.told("error [", seen, 40)
        launched.told("waiting for the link of node2", seen, 120)
        time.sleep(AWAY_S)
        assert not any(
            node.shell.run(["docker", "ps", "-q"]).out for node in launched.head.lab.nodes
        )
    finally:
        launched.worker.unplug(plugged=True)
    FIGURES["cable_back_after_plug_s"] = launched.back(before)
    assert FIGURES["cable_told_s"] <= LINK_S
    assert FIGURES["cable_back_after_plug_s"] <= launched.cold_s + SLACK_S


def test_a_frozen_worker(launched, traffic) -> None:
    before, seen = launched.generation(), len(launched.said)
    assert before and not traffic
    assert launched.worker.shell.run(["docker", "pause", "glm-exl3-node1"]).ok
    FIGURES["frozen_told_s"] = launched.told("error [stalled]", seen, 300)
    FIGURES["frozen_back_s"] = launched.back(before)
    assert FIGURES["frozen_told_s"] <= STALL_S
    assert FIGURES["frozen_back_s"] <= launched.cold_s + SLACK_S


def test_a_killed_worker(launched, traffic) -> None:
    before, seen = launched.generation(), len(launched.said)
    assert before and not traffic
    assert launched.worker.shell.run(["docker", "kill", "glm-exl3-node1"]).ok
    FIGURES["killed_told_s"] = launched.told("error [rank-ended]", seen, 60)
    FIGURES["killed_back_s"] = launched.back(before)
    assert FIGURES["killed_told_s"] <= 5.0
    assert FIGURES["killed_back_s"] <= launched.cold_s + SLACK_S
