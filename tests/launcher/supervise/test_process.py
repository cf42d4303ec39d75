"""The supervisor as a process over fake ranks of this machine: real signals, real deaths."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import httpx
import pytest
from staged import Service, restarted

from glm_launch import procs
from glm_launch.supervise.desk import Desk

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("rank", [0, 1])
def test_f1_f2_a_killed_rank_is_seen_explained_and_all_restart(service, wait_for, rank) -> None:
    before = service.start()
    service.supervise()
    wait_for(service.watching)
    pids = service.pids()
    os.kill(pids[rank], signal.SIGKILL)
    begin = time.monotonic()
    wait_for(lambda: "error [rank-ended]" in service.desk.log.read_text(), 5.0)
    assert time.monotonic() - begin <= 5
    wait_for(restarted(service, before), 30.0)
    assert not set(pids) & set(service.pids())
    end = json.loads((service.store.launches / before / "end.json").read_text())
    assert f"rank {rank}" in end["trouble"]["text"] and "SIGKILL" in end["trouble"]["text"]
    assert (service.store.launches / before / "rank0.log").read_text()
    assert service.desk.saved().restarts_total == 1
    assert "glm_exl3_restarts_total 1" in (service.desk.folder / "metrics.prom").read_text()
    assert service.post("/v1/completions", {"prompt": "x"}).status_code == 200


def test_f2_a_head_that_exits_with_0_is_a_failure(service, wait_for) -> None:
    before = service.start()
    service.supervise()
    wait_for(service.watching)
    service.post("/fake", {"do": "exit"})
    wait_for(restarted(service, before), 30.0)
    assert "rank 0 (head) exited with exit code 0" in service.desk.log.read_text()


def test_f3_a_stall_is_found_and_the_request_ends(service, wait_for) -> None:
    before = service.start()
    service.supervise()
    wait_for(service.watching)
    service.post("/fake", {"do": "stall"})
    errors: list[object] = []

    def ask() -> None:
        try:
            errors.append(service.post("/v1/completions", {"prompt": "x"}, 60.0).status_code)
        except httpx.TransportError as error:
            errors.append(error)

    client = threading.Thread(target=ask)
    client.start()
    wait_for(restarted(service, before), 40.0)
    client.join(10)
    assert "error [stalled] 1 request(s) run and no step was made" in service.desk.log.read_text()
    assert len(errors) == 1 and errors[0] != 200


def test_f3_a_stall_of_an_idle_engine_is_found_by_canaries(service, wait_for) -> None:
    before = service.start()
    service.supervise(stall_s=600.0)
    wait_for(service.watching)
    wait_for(lambda: '"failures": 0' in health(service, before), 30.0)
    service.post("/fake", {"do": "stall"})
    wait_for(restarted(service, before), 60.0)
    assert "canaries in a row were not answered" in service.desk.log.read_text()


def health(service: Service, generation: str) -> str:
    path = service.store.launches / generation / "health.json"
    return path.read_text() if path.exists() else ""


def test_a_stopped_head_is_silent(service, wait_for) -> None:
    before = service.start()
    service.supervise()
    wait_for(service.watching)
    os.kill(service.pids()[0], signal.SIGSTOP)
    wait_for(restarted(service, before), 40.0)
    assert "error [silent]" in service.desk.log.read_text()


def test_a_killed_supervisor_leaves_the_ranks_and_the_next_adopts_them(service, wait_for) -> None:
    before = service.start()
    first = service.supervise()
    wait_for(service.watching)
    pids = service.pids()
    first.kill()
    first.wait()
    assert not service.desk.is_held()
    second = service.supervise()
    wait_for(service.watching)
    time.sleep(2)
    assert service.generation == before and service.pids() == pids
    second.send_signal(signal.SIGTERM)
    assert second.wait(10) == 130
    assert service.pids() == pids and all(procs.identify(pid) for pid in pids)


@pytest.mark.parametrize("phase", ["stopping", "pausing", "starting"])
def test_a_supervisor_killed_on_the_way_is_continued(service, wait_for, phase) -> None:
    before = service.start()
    first = service.supervise(f"kill-{phase}")
    wait_for(service.watching)
    os.kill(service.pids()[1], signal.SIGKILL)
    assert first.wait(30) == -signal.SIGKILL
    service.supervise()
    wait_for(restarted(service, before), 30.0)


def test_what_keeps_failing_stays_down_with_the_reason(service, wait_for) -> None:
    service.start()
    service.launcher.env["FAKE_TROUBLE"] = "crash-at-start"
    supervisor = service.supervise()
    wait_for(service.watching)
    os.kill(service.pids()[1], signal.SIGKILL)
    assert supervisor.wait(60) == 5
    saved = service.desk.saved()
    assert saved.phase == "down" and "planted failure" in saved.trouble.text
    assert len(saved.starts) == 3 and "3 restarts within 30" in service.desk.log.read_text()
    assert service.launcher.left_over() == [] and service.store.current() is None


def test_one_supervisor_at_a_time_and_only_for_a_launch(service, wait_for) -> None:
    idle = service.launcher.popen("-m", "glm_launch.supervise")
    assert "nothing-runs" in idle.communicate(timeout=20)[0] and idle.returncode == 3
    service.start()
    service.supervise()
    wait_for(service.watching)
    second = service.launcher.popen("-m", "glm_launch.supervise")
    assert "supervised" in second.communicate(timeout=20)[0] and second.returncode == 3
    assert service.watching()


def test_dismissed_it_ends_and_forgets(service, wait_for) -> None:
    before = service.start()
    supervisor = service.supervise()
    wait_for(service.watching)
    assert service.desk.dismiss() is True
    assert supervisor.wait(10) == 130
    assert service.desk.saved() is None and service.generation == before
    assert service.desk.dismiss() is False


def test_one_that_stands_still_is_killed(service, wait_for) -> None:
    before = service.start()
    supervisor = service.supervise()
    wait_for(service.watching)
    supervisor.send_signal(signal.SIGSTOP)
    assert Desk(service.launcher.state, patience_s=1.0).dismiss() is True
    assert supervisor.wait(10) == -signal.SIGKILL and service.generation == before


def test_the_key_is_used_and_written_nowhere(service, wait_for) -> None:
    service.launcher.env["VLLM_API_KEY"] = "planted-secret"
    before = service.start()
    service.supervise()
    wait_for(service.watching)
    os.kill(service.pids()[1], signal.SIGKILL)
    wait_for(restarted(service, before), 30.0)
    files = [path.read_text() for path in service.launcher.state.rglob("*") if path.is_file()]
    assert len(files) > 5 and not any("planted-secret" in text for text in files)
