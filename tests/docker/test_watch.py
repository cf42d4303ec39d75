"""A worker hears its head, or ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time

import pytest

from watch import HeadWatch


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def alive(generation: str = "g1") -> bytes:
    return json.dumps({"type": "alive", "generation": generation}).encode() + b"\n"


def in_thread(watch: HeadWatch) -> tuple[threading.Thread, list[object]]:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(watch.run()))
    thread.start()
    return thread, found


def test_silence_ends_the_rank(ends) -> None:
    begin = time.monotonic()
    reason = HeadWatch(ends[0], "g1", silence_s=1.0).run()
    assert "no sign of life from the head for 1 s" in str(reason)
    assert 1.0 <= time.monotonic() - begin < 3.0


def test_signs_of_life_keep_it(ends) -> None:
    watch = HeadWatch(ends[0], "g1", silence_s=1.0)
    thread, found = in_thread(watch)
    for _ in range(8):
        for piece in (alive()[:10], alive()[10:]):
            ends[1].sendall(piece)
            time.sleep(0.2)
    assert found == []
    watch.close()
    thread.join(5)
    assert found == [None]


def test_another_generation_ends_it_at_once(ends) -> None:
    ends[1].sendall(b"noise\n[]\n" + alive() + alive("g2"))
    assert HeadWatch(ends[0], "g1").run() == "the head runs generation g2, this node g1"


def test_a_head_that_hung_up_ends_it_unless_a_stop_comes_first(ends) -> None:
    ends[1].close()
    assert HeadWatch(ends[0], "g1", hung_up_s=0.2).run() == "the head hung up"
    asked = HeadWatch(ends[0], "g1", hung_up_s=5.0)
    thread, found = in_thread(asked)
    time.sleep(0.3)
    asked.close()
    thread.join(5)
    assert found == [None]


def test_a_worker_whose_head_was_killed_ends_its_engine(nodes, wait_for) -> None:
    head, worker = nodes(0), nodes(1)
    wait_for(lambda: nodes.state(0)["phase"] == nodes.state(1)["phase"] == "engine")
    engine = nodes.state(1)["engine_pid"]
    os.kill(nodes.state(0)["engine_pid"], signal.SIGKILL)
    head.kill()
    begin = time.monotonic()
    output, _ = worker.communicate(timeout=20)
    assert worker.returncode == 70 and time.monotonic() - begin <= 15
    assert "the head hung up, so this rank ends" in output
    with pytest.raises(ProcessLookupError):
        os.kill(engine, 0)


def test_a_worker_whose_head_stands_still_ends_its_engine(nodes, wait_for) -> None:
    head, worker = nodes(0), nodes(1)
    wait_for(lambda: nodes.state(0)["phase"] == nodes.state(1)["phase"] == "engine")
    head.send_signal(signal.SIGSTOP)
    begin = time.monotonic()
    output, _ = worker.communicate(timeout=20)
    assert worker.returncode == 70 and 7 <= time.monotonic() - begin <= 15
    assert "no sign of life from the head for 10 s" in output


def test_a_worker_that_hears_its_head_stays(nodes, wait_for) -> None:
    nodes(0), nodes(1)
    wait_for(lambda: nodes.state(0)["phase"] == nodes.state(1)["phase"] == "engine")
    time.sleep(13)
    assert nodes.state(1)["phase"] == "engine"


def test_both_nodes_note_their_health(nodes, wait_for) -> None:
    nodes(0), nodes(1)
    files = [nodes.folder / f"run{rank}" / "health.json" for rank in range(2)]
    wait_for(lambda: all(path.exists() for path in files))
    assert all(json.loads(path.read_text())["generation"] == "g1" for path in files)
