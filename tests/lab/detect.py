"""How soon trouble is told and a launch is back, with the product's own limits over fake ranks.

    python tests/lab/detect.py processes       ranks are processes of this machine; no root
    python tests/lab/detect.py processes NAME  one of them, for example 'stall when idle'
    python tests/lab/detect.py nodes           two lab nodes: needs root and tests/lab/setup.sh

Writes results.json under `stayup.detection`; exits with 1 when a figure is over its limit.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import figures
import httpx
from endurance import HERE, Launch, say

DEATH_S, STALL_S, IDLE_S, LINK_S, ORPHAN_S, SLACK_S = 5.0, 90.0, 150.0, 5.0, 15.0, 60.0
RANK = f"{sys.executable} {HERE / 'fakerank.py'}"
Figure = dict[str, float]


def waited(what: Callable[[], object], limit_s: float) -> float:
    """Seconds until it was so; the limit stands for never."""
    begin = time.monotonic()
    while not what() and time.monotonic() - begin < limit_s:
        time.sleep(0.05)
    return round(time.monotonic() - begin, 2)


def trouble(launch: Launch, do: str) -> None:
    httpx.post(f"http://127.0.0.1:{launch.env['PORT']}/fake", json={"do": do}, timeout=10)


def kill(launch: Launch, rank: int) -> None:
    pid = launch.records()[rank]["engine_pid"]
    assert isinstance(pid, int)
    os.kill(pid, signal.SIGKILL)


def stall_under_traffic(launch: Launch) -> None:
    def ask() -> None:
        with suppress(httpx.HTTPError):
            launch.ask(600.0)

    trouble(launch, "stall")
    threading.Thread(target=ask, daemon=True).start()


def stall_idle(launch: Launch) -> None:
    """Right after a canary, which is the longest way to the next one."""
    before = steps(launch)
    waited(lambda: steps(launch) != before, 100.0)
    trouble(launch, "stall")


def steps(launch: Launch) -> str:
    url = f"http://127.0.0.1:{launch.env['PORT']}/metrics"
    return httpx.get(url, timeout=10).text.rpartition(" ")[2]


PROCESSES: dict[str, tuple[Callable[[Launch], None], tuple[str, ...], float]] = {
    "killed worker": (lambda launch: kill(launch, 1), ("rank-ended",), DEATH_S),
    "killed head": (lambda launch: kill(launch, 0), ("rank-ended",), DEATH_S),
    "head exits 0": (lambda launch: trouble(launch, "exit"), ("rank-ended",), DEATH_S),
    "stall under traffic": (stall_under_traffic, ("stalled",), STALL_S),
    # The canary that is not answered is a request that runs, too.
    "stall when idle": (stall_idle, ("canary", "stalled"), IDLE_S),
}


def on_processes(folder: Path, names: Sequence[str]) -> dict[str, Figure]:
    """Each fault in a launch of its own, since three restarts within half an hour are the limit."""
    found = {}
    for name in names or PROCESSES:
        cause, codes, limit_s = PROCESSES[name]
        launch = Launch(Path(tempfile.mkdtemp(dir=folder)), RANK)
        try:
            cold_s = launch.verb("start")
            before, seen = launch.generation, len(launch.said)
            cause(launch)
            told_s = waited(lambda s=seen, c=codes, at=launch: told(at.said[s:], c), 300)
            back_s = waited(
                lambda b=before, at=launch: at.generation not in (None, b), cold_s + 4 * SLACK_S
            )
        finally:
            launch.verb("stop")
        found[name] = figure(told_s, limit_s, back_s, cold_s)
        say(f"{name}: {found[name]}")
    return found


def told(said: str, codes: Sequence[str]) -> bool:
    """Whether one of the reasons was told."""
    return any(f"error [{code}]" in said for code in codes)


def figure(told_s: float, limit_s: float, back_s: float, cold_s: float) -> Figure:
    """told_s from the fault, back_s from then on; both have limits."""
    return {
        "told_s": told_s, "limit_s": limit_s, "back_after_told_s": back_s,
        "cold_start_s": round(cold_s, 1), "back_limit_s": round(cold_s + SLACK_S, 1),
    }  # fmt: skip


def on_nodes(folder: Path, _names: Sequence[str]) -> dict[str, Figure]:
    import fake_image
    import lab as lab_module
    from fakes import Fakes

    image = fake_image.make_image(folder / "image.tar")
    with lab_module.opened(Path(f"/tmp/glmlab{os.getpid()}"), 2) as lab:
        for node in lab.nodes:
            node.load(image)
        with lab_module.at(lab.nodes[0]):
            found = containers(Fakes(lab, folder / "c"))
            found["link lost"] = cable(Fakes(lab, folder / "l"))
            found["orphan of a head without power"] = orphan(Fakes(lab, folder / "o"))
    for name, value in found.items():
        say(f"{name}: {value}")
    return found


def containers(fakes: Any) -> dict[str, Figure]:
    """A killed container on either node, noticed by `docker inspect` there and over ssh."""
    from scene import playing

    found = {}
    begin = time.monotonic()
    with playing(fakes) as scene:
        cold_s = time.monotonic() - begin
        for number, name in enumerate(("head", "worker")):
            before, seen = scene.wait_watching(), len(scene.said)
            scene.docker(number, "kill", "--signal", "KILL", f"glm-exl3-node{number}")
            told_s = round(scene.wait_said("error [rank-ended]", 60, seen), 2)
            begin = time.monotonic()
            scene.wait_watching(before)
            back_s = round(time.monotonic() - begin, 2)
            found[f"killed container of the {name}"] = figure(told_s, DEATH_S, back_s, cold_s)
    return found


def cable(fakes: Any) -> Figure:
    """The worker's cable is pulled for half a minute; recovery counts from when it is back."""
    from scene import playing

    begin = time.monotonic()
    with playing(fakes) as scene:
        cold_s = time.monotonic() - begin
        before = scene.wait_watching()
        time.sleep(5)
        scene.nodes[1].unplug()
        told_s = round(scene.wait_said("[link-down] node2", 60), 2)
        time.sleep(30)
        scene.nodes[1].unplug(plugged=True)
        begin = time.monotonic()
        scene.wait_watching(before)
        return figure(told_s, LINK_S, round(time.monotonic() - begin, 2), cold_s)


def orphan(fakes: Any) -> Figure:
    """The head's machine and the supervisor on it are gone at once; how long a worker stays.

    Its port goes down first: a machine without power closes no connection.
    """
    from scene import playing

    begin = time.monotonic()
    with playing(fakes) as scene:
        cold_s = time.monotonic() - begin
        before = scene.wait_watching()
        time.sleep(3)
        scene.kill_supervisor()
        scene.nodes[0].unplug()
        scene.nodes[0].power_off()
        gone_s = waited(lambda: not scene.docker(1, "ps", "-q").split(), 60)
        scene.nodes[0].unplug(plugged=True)
        scene.nodes[0].power_on()
        scene.nodes[0].wait_up()
        scene.watch()
        begin = time.monotonic()
        scene.wait_watching(before)
        return figure(gone_s, ORPHAN_S, round(time.monotonic() - begin, 2), cold_s)


PARTS = {"processes": on_processes, "nodes": on_nodes}


def too_late(found: dict[str, Figure]) -> list[str]:
    """Names of figures over their limit."""
    return [
        name for name, value in found.items()
        if value["told_s"] > value["limit_s"] or value["back_after_told_s"] > value["back_limit_s"]
    ]  # fmt: skip


def main(part: str, *names: str) -> int:
    with tempfile.TemporaryDirectory(prefix="detect-") as temporary:
        found = PARTS[part](Path(temporary), names)
    known = figures.of("detection")
    before = known.get(part, {}) if names else {}
    figures.note("detection", known | {part: before | found | figures.here()})
    say(f"over the limit: {too_late(found) or 'none'}")
    return 1 if too_late(found) else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
