"""Break a supervised launch at random and check after each fault that no invariant is broken.

    python tests/lab/chaos.py --faults 100 --seed 1       needs root and tests/lab/setup.sh
    python tests/lab/chaos.py --faults 50 --seed 2 --add  counted together with those before
    python tests/lab/chaos.py --cycles 30                 with --trial nothing is written

Writes what it found to results.json under `stayup`, and a line for each fault while it runs. The
invariants: at most one generation on every node; every request gets an answer or an error within
ANSWER_S; the launch comes back; no secret in any file of the launcher; `stop` leaves no container,
no port of the cluster, no lock; cycles leak no file descriptor and no shared memory.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import fake_image
import figures
import httpx
import lab as lab_module
from fakes import Fakes
from scene import OURS, Scene, playing

ANSWER_S, BACK_S = 45.0, 180.0
KINDS = (
    "kill head", "kill worker", "engine exits 0", "engine stalls", "freeze worker", "short flap",
    "long flap", "power cut", "kill supervisor",
)  # fmt: skip
PORTS = {8888, 29521, 29522}
LIMITS = {"stall_s": 6.0, "max_restarts": 10**6}
Say = Callable[[str], None]


def cause(scene: Scene, kind: str) -> None:
    """One fault; what it takes away it gives back."""
    node = scene.nodes[1]
    if kind.startswith("kill ") and kind != "kill supervisor":
        number = int(kind == "kill worker")
        name = f"glm-exl3-node{number}"
        scene.nodes[number].shell.run(["docker", "kill", "--signal", "KILL", name])
    elif kind == "engine exits 0":
        scene.trouble("exit")
    elif kind == "engine stalls":
        scene.trouble("stall")
    elif kind == "freeze worker":
        scene.docker(1, "pause", "glm-exl3-node1")
    elif kind in ("short flap", "long flap"):
        node.unplug()
        time.sleep(4 if kind == "short flap" else 16)
        node.unplug(plugged=True)
    elif kind == "power cut":
        node.power_off()
        time.sleep(5)
        node.power_on()
        node.wait_up()
    else:
        scene.kill_supervisor()
        scene.watch()


class Client(threading.Thread):
    """Asks all the time; remembers the slowest answer or error."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(daemon=True)
        self.scene, self.done, self.slowest = scene, threading.Event(), 0.0
        self.answers = self.errors = 0

    def run(self) -> None:
        while not self.done.wait(0.5):
            begin = time.monotonic()
            try:
                good = self.scene.ask(ANSWER_S) == 200
            except httpx.HTTPError:
                good = False
            self.answers += good
            self.errors += not good
            self.slowest = max(self.slowest, time.monotonic() - begin)


def came_back(scene: Scene) -> float:
    """Seconds until it is watched again and answers twice, two seconds apart."""
    begin = time.monotonic()
    good = 0
    while good < 2:
        assert time.monotonic() - begin < BACK_S, f"it did not come back within {BACK_S:g} s"
        answered = False
        with suppress(httpx.HTTPError):
            answered = scene.watched is not None and scene.ask(5) == 200
        good = good + 1 if answered else 0
        time.sleep(2.0 if answered else 0.2)
    return time.monotonic() - begin


def violations(scene: Scene) -> list[str]:
    """What is wrong while it runs; a rank that just ended is none of it, two generations are."""
    found = []
    generations = scene.generations()
    if len(set().union(*generations)) > 1:
        found.append(f"generations per node: {generations}")
    key = scene.fakes.key
    files = [path for path in scene.fakes.folder.rglob("*") if path.is_file()]
    if key and any(key in path.read_text(errors="replace") for path in files):
        found.append("the key stands in a file")
    return found


def left_over(scene: Scene) -> list[str]:
    """What a stop left on a node."""
    found = []
    for number, node in enumerate(scene.nodes):
        containers = scene.docker(number, "ps", "-aq", *OURS).split()
        rows = node.shell.run(["ss", "-Hltn"]).out.splitlines()
        ports = PORTS & {int(row.split()[3].rpartition(":")[2]) for row in rows}
        key = node.shell.run(["sh", "-c", "ls /run/glm-exl3 2>/dev/null"]).out.split()
        if containers or ports or key:
            found.append(f"{node.name}: containers {containers}, ports {ports}, files {key}")
    if scene.fakes.cluster.store.is_locked() or scene.desk.is_held():
        found.append("a lock is held")
    return found


def faults(fakes, generator: random.Random, count: int, say: Say) -> dict[str, Any]:
    """`count` random faults in a row."""
    found: list[str] = []
    back: list[float] = []
    kinds = [generator.choice(KINDS) for _ in range(count)]
    with playing(fakes, **LIMITS) as scene:
        client = Client(scene)
        client.start()
        try:
            for number, kind in enumerate(kinds, 1):
                cause(scene, kind)
                time.sleep(1.0)
                back.append(round(came_back(scene), 1))
                wrong = violations(scene)
                found += [f"{number} {kind}: {one}" for one in wrong]
                say(f"{number}/{count} {kind}: back after {back[-1]} s {wrong or ''}")
        except AssertionError as error:
            found.append(f"{len(back) + 1} {kinds[len(back)]}: {error}")
            say(f"{found[-1]}\n{scene.evidence()}")
        client.done.set()
        client.join(ANSWER_S + 5)
        restarts = scene.saved.restarts_total
    if client.slowest > ANSWER_S + 2:
        found.append(f"a request waited {client.slowest:.1f} s")
    found += left_over(scene)
    return {
        "faults": len(back), "kinds": dict(sorted(Counter(kinds[: len(back)]).items())),
        "violations": found, "restarts": restarts,
        "back_s": {"median": [statistics.median(back or [0.0])], "max": max(back, default=0.0)},
        "answers": client.answers, "errors": client.errors,
        "slowest_answer_s": round(client.slowest, 1),
    }  # fmt: skip


def held(scene: Scene) -> list[tuple[int, int]]:
    """Open descriptors of each node's docker daemon, and files in its shared memory."""
    script = "ls /proc/$(pidof dockerd)/fd | wc -l; ls /dev/shm | wc -l"
    answers = [node.shell.run(["sh", "-c", script]).out.split() for node in scene.nodes]
    return [(int(fds), int(shm)) for fds, shm in answers]


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def cycles(fakes, count: int, say: Say) -> dict[str, Any]:
    """Start, answer, stop, `count` times; what grew."""
    found: list[str] = []
    own = descriptors()
    before: list[tuple[int, int]] = []
    for number in range(1, count + 1):
        with playing(fakes) as scene:
            if scene.ask() != 200:
                found.append(f"cycle {number}: no answer")
        found += [f"cycle {number}: {one}" for one in left_over(scene)]
        now = held(scene)
        before = before or now
        say(f"{number}/{count} descriptors and shared memory per node: {now}")
    grown = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(before, now, strict=True)]
    if any(fds > 8 or shm > 0 for fds, shm in grown):
        found.append(f"grown per node (descriptors, shared memory): {grown}")
    mine = descriptors() - own
    if mine > 4:
        found.append(f"{mine} more descriptors here")
    return {"cycles": count, "violations": found, "grown": grown}


SUMS = ("cycles", "faults", "restarts", "answers", "errors")


def together(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Both runs as one."""
    if not before:
        return now
    both = now | {key: before[key] + now[key] for key in SUMS if key in now}
    both["violations"] = before["violations"] + now["violations"]
    if "faults" in now:
        kinds = Counter(before["kinds"]) + Counter(now["kinds"])
        both |= {"seeds": before["seeds"] + now["seeds"], "kinds": dict(sorted(kinds.items()))}
        both["back_s"] = {"median": [*before["back_s"]["median"], *now["back_s"]["median"]],
                          "max": max(before["back_s"]["max"], now["back_s"]["max"])}  # fmt: skip
        both["slowest_answer_s"] = max(before["slowest_answer_s"], now["slowest_answer_s"])
    return both


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=0)
    parser.add_argument("--cycles", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--add", action="store_true")
    parser.add_argument("--trial", action="store_true")
    chosen = parser.parse_args()
    results: dict[str, Any] = {}

    def say(text: str) -> None:
        print(text, flush=True)

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        image = fake_image.make_image(folder / "image.tar")
        with lab_module.opened(Path(f"/tmp/glmlab{os.getpid()}"), 2) as lab:
            for node in lab.nodes:
                node.load(image)
            with lab_module.at(lab.nodes[0]):
                fakes = Fakes(lab, folder / "state", key="planted-chaos-key")
                if chosen.cycles:
                    results["cycles"] = cycles(fakes, chosen.cycles, say)
                if chosen.faults:
                    found = faults(fakes, random.Random(chosen.seed), chosen.faults, say)
                    results["faults"] = found | {"seeds": [chosen.seed]}
    for part, value in () if chosen.trial else results.items():
        before = figures.of(part) if chosen.add else {}
        figures.note(part, together(before, value) | figures.here())
    say(json.dumps(results, indent=1))
    bad = [one for part in results.values() for one in part["violations"]]
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
