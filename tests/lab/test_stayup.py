"""The supervisor over two real docker daemons and two networks: what it notices, says and does."""

from __future__ import annotations

import json
import random
import re
import threading
import time

import chaos
import detect
import httpx
import pytest
from lab import run
from scene import playing

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]
SETTLE_S = 3.0


@pytest.mark.parametrize("number", [0, 1])
def test_f1_f2_a_dead_container_is_noticed_within_5_s_and_all_restart(fakes, number) -> None:
    with playing(fakes) as scene:
        before = scene.wait_watching()
        scene.docker(number, "kill", "--signal", "KILL", f"glm-exl3-node{number}")
        assert scene.wait_said("error [rank-ended]") <= 5
        after = scene.wait_watching(before)
        assert scene.generations() == [{after}, {after}] and scene.ask() == 200
        assert re.search(rf"rank {number} \(\w+\) exited with exit code 137", scene.said)
    folder = scene.fakes.folder / "launches" / before
    end = json.loads((folder / "end.json").read_text())
    assert end["trouble"]["code"] == "rank-ended"
    assert "Initializing" in (folder / "rank0.log").read_text()
    assert "headless" in (folder / "rank1.log").read_text()


def test_f2_a_head_that_exits_0_after_an_engine_error(fakes) -> None:
    with playing(fakes) as scene:
        before = scene.wait_watching()
        scene.trouble("exit")
        assert scene.wait_said("error [rank-ended]") <= 5
        assert "rank 0 (head) exited with exit code 70" in scene.said
        scene.wait_watching(before)


def test_f3_a_stalled_step_is_noticed_and_all_restart(fakes) -> None:
    with playing(fakes, stall_s=6.0) as scene:
        before = scene.wait_watching()
        scene.trouble("stall")
        client = threading.Thread(target=lambda: pytest.raises(httpx.HTTPError, scene.ask, 60))
        client.start()
        scene.wait_said("error [stalled] 1 request(s) run", 30)
        scene.wait_watching(before)
        client.join(60)
        assert scene.ask() == 200


def test_f4_a_short_flap_is_told_and_nothing_is_restarted(fakes) -> None:
    with playing(fakes) as scene:
        before = scene.wait_watching()
        time.sleep(SETTLE_S)
        scene.nodes[1].unplug()
        try:
            assert scene.wait_said("[link-down] node2") <= 5
            time.sleep(1)
        finally:
            scene.nodes[1].unplug(plugged=True)
        scene.wait_said("[link-back] node2", 10)
        time.sleep(10)
        assert scene.wait_watching() == before
        assert "error [" not in scene.said


def test_f4_a_long_outage_is_waited_out_and_then_all_restart_once(fakes) -> None:
    with playing(fakes) as scene:
        before = scene.wait_watching()
        time.sleep(SETTLE_S)
        scene.nodes[1].unplug()
        try:
            assert scene.wait_said("[link-down] node2") <= 5
            scene.wait_said("error [", 20)
            scene.wait_said("[waiting] waiting for the link of node2", 30)
            time.sleep(10)
            assert scene.running() == [0, 0]
            assert (scene.saved.phase, scene.saved.starts) == ("waiting", ())
        finally:
            scene.nodes[1].unplug(plugged=True)
        scene.wait_watching(before)
        assert len(scene.saved.starts) == 1 and scene.ask() == 200


def test_f22_a_node_without_power_is_waited_for(fakes) -> None:
    with playing(fakes) as scene:
        before = scene.wait_watching()
        time.sleep(SETTLE_S)
        node = scene.nodes[1]
        node.power_off()
        try:
            scene.wait_said("[waiting] waiting for node2, which does not answer", 90)
            assert scene.docker(0, "ps", "-q") == ""
        finally:
            node.power_on()
            node.wait_up()
        after = scene.wait_watching(before)
        assert scene.generations() == [{after}, {after}] and scene.ask() == 200


def test_a_head_without_power_leaves_no_worker_behind(fakes) -> None:
    """Its supervisor is gone with it, so the worker's process 1 ends its rank by itself."""
    found = detect.orphan(fakes)
    assert found["told_s"] <= 15
    assert found["back_after_told_s"] <= found["back_limit_s"]


def test_a_node_that_only_ssh_does_not_reach_is_left_alone(fakes) -> None:
    with playing(fakes) as scene:
        before = scene.wait_watching()
        time.sleep(SETTLE_S)
        link = ("ip", "-n", scene.fakes.lab.switch, "link", "set", "mgmt2")
        run(*link, "down")
        try:
            scene.wait_said("[no-ssh] node2", 60)
            time.sleep(12)
        finally:
            run(*link, "up")
        scene.wait_said("[ssh-back] node2", 60)
        assert scene.wait_watching() == before and "error [" not in scene.said


def test_a_killed_supervisor_leaves_the_ranks_and_the_next_adopts_them(fakes) -> None:
    with playing(fakes) as scene:
        before = scene.wait_watching()
        scene.kill_supervisor()
        time.sleep(2)
        assert scene.generations() == [{before}, {before}] and scene.ask() == 200
        scene.watch()
        assert scene.wait_watching() == before
        time.sleep(3)
        assert scene.saved.starts == ()


def test_ten_random_faults_and_three_cycles_break_no_invariant(fakes) -> None:
    """The long runs are `chaos.py --faults 100` and `--cycles 30`."""
    fakes.key = "planted-chaos-key"
    found = chaos.faults(fakes, random.Random(6), 10, lambda _text: None)
    assert found["violations"] == [], found
    leaks = chaos.cycles(fakes, 3, lambda _text: None)
    assert leaks["violations"] == [], leaks
