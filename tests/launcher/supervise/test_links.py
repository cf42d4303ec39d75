"""What the probes say becomes signs; a probe that died is started again."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from glm_launch.errors import LaunchFailedError
from glm_launch.plan import RankPlan
from glm_launch.supervise import links as links_module
from glm_launch.supervise import probe
from glm_launch.supervise.links import End, Links, ends_of

LINE = {"nic": "nic0", "carrier": True, "changes": 2, "errors": 0, "peers": {}}


@dataclass
class Talker:
    """A shell whose probe prints these lines and ends."""

    lines: list[dict]
    name: str = "n"
    calls: int = 0

    def argv(self, command: list[str]) -> list[str]:
        self.calls += 1
        assert command[:3] == ["python3", "-u", "-"]
        text = "".join(json.dumps(line) + "\n" for line in self.lines)
        return [sys.executable, "-c", f"print({text!r}, end='')"]


def seen(lines: dict[str, dict], ago: float = 0.0) -> Links:
    ends = [End("head", "10.0.0.1", "", None), End("worker", "10.0.0.2", "", None)]
    links = Links(ends, clock=lambda: 100.0)
    links.lines = {node: (100.0 - ago, LINE | line) for node, line in lines.items()}
    return links


def test_carrier_comes_from_the_node_and_pings_from_the_head() -> None:
    head, worker = seen(
        {"head": {"peers": {"10.0.0.2": False}}, "worker": {"carrier": False}}
    ).signs()
    assert (head.carrier, head.reachable) == (True, None)
    assert (worker.carrier, worker.reachable) == (False, False)
    assert worker.detail == "nic0 10.0.0.2, carrier changes 2, errors 0"


def test_old_news_is_no_news() -> None:
    head, worker = seen({"head": {"carrier": False}}, ago=5.0).signs()
    assert head.carrier is worker.carrier is worker.reachable is None


def test_a_launch_is_given_up_when_a_link_stays_away() -> None:
    now = [100.0]
    links = seen({"head": {}, "worker": {"carrier": False}})
    links.clock = lambda: now[0]

    def look(at: float, carrier: bool) -> None:
        now[0] = at
        links.lines["worker"] = (at, LINE | {"carrier": carrier})
        links.check()

    for at in (100.0, 105.0, 109.0):
        look(at, False)
    look(110.0, True)
    look(111.0, False)
    look(120.0, False)
    with pytest.raises(LaunchFailedError, match="has no link while the ranks start"):
        look(121.5, False)


def test_a_probe_that_ended_is_started_again(wait_for, monkeypatch) -> None:
    monkeypatch.setattr(links_module, "AGAIN_S", 0.1)
    talker = Talker([LINE])
    links = Links([End("head", "10.0.0.1", "", talker)])
    links.start()
    wait_for(lambda: talker.calls >= 3)
    assert links.signs()[0].carrier is True
    links.close()
    calls = talker.calls
    time.sleep(0.5)
    assert talker.calls <= calls + 1


def test_only_a_launch_over_nodes_has_links(plan) -> None:
    assert ends_of(plan, {}) == []
    env = (("GLOO_SOCKET_IFNAME", "nic0"), ("VLLM_HOST_IP", "10.0.0.1"))
    ranks = tuple(RankPlan(n, "", f"n{n}", (), env) for n in range(2))
    over = replace(plan, runtime="containers", ranks=ranks)
    ends = ends_of(over, {"n0": "a", "n1": "b"})
    assert [(end.node, end.nic, end.shell) for end in ends] == [("n0", "nic0", "a"),
                                                                ("n1", "nic0", "b")]  # fmt: skip


def test_the_probe_reads_a_device(tmp_path, monkeypatch) -> None:
    nic = tmp_path / "nic0"
    (nic / "statistics").mkdir(parents=True)
    for name, text in {"carrier": "1", "carrier_changes": "4", "statistics/rx_errors": "2",
                       "statistics/tx_errors": "1"}.items():  # fmt: skip
        (nic / name).write_text(f"{text}\n")
    monkeypatch.setattr(probe, "NET", tmp_path)
    assert probe.carrier("nic0") is True and probe.carrier("nic9") is None
    assert probe.number("nic0", "statistics/rx_errors", "statistics/tx_errors") == 3
    (nic / "carrier").write_text("0\n")
    assert probe.carrier("nic0") is False


def test_the_probe_finds_the_device_of_an_address() -> None:
    assert probe.nic_of("127.0.0.1") == "lo"
    assert probe.nic_of("192.0.2.77") == ""


def test_the_probe_counts_three_missing_answers(tmp_path, monkeypatch, wait_for) -> None:
    ping = tmp_path / "ping"
    ping.write_text(f"#!/bin/sh\ntest -e {tmp_path}/answers\n")
    ping.chmod(0o755)
    (tmp_path / "answers").touch()
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(probe, "EVERY_S", 0.05)
    peer = probe.Peer("10.0.0.2")
    wait_for(lambda: peer.answers is True)
    (tmp_path / "answers").unlink()
    wait_for(lambda: peer.answers is False)
    assert peer.missed >= 3
    (tmp_path / "answers").touch()
    wait_for(lambda: peer.answers is True)


def test_an_address_that_never_answered_is_unknown(tmp_path, monkeypatch) -> None:
    ping = tmp_path / "ping"
    ping.write_text("#!/bin/sh\nexit 1\n")
    ping.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(probe, "EVERY_S", 0.05)
    peer = probe.Peer("10.0.0.2")
    time.sleep(0.6)
    assert peer.answers is None and peer.missed > 3


def test_the_probe_is_python_3_8() -> None:
    import ast

    ast.parse(Path(probe.__file__).read_text(), feature_version=(3, 8))
