"""Measure bring-up in the lab and write the figures to results.json under `bringup`.

    python tests/lab/measure.py [fake] [engine] [suites]      without a word: all three

`fake`: four nodes with fake ranks, so the launcher's own costs. `engine`: two nodes with the CPU
image, from nothing to READY and once more; its build keeps the layers of an earlier one. `suites`:
how long the lab's tests take. A part that is not asked for keeps its figures. Needs root and
tests/lab/setup.sh --engine.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import engine_lab
import fake_image
import lab as lab_module
from head import Head
from lab import IMAGE

from glm_launch.nodes import images

RESULTS = Path(__file__).with_name("results.json")
SUITES = {"lab_minutes": "lab and not engine", "engine_minutes": "lab and engine"}
NODES = 4
REPEATS = 5


def seconds(work: Callable[[], object]) -> float:
    begin = time.monotonic()
    work()
    return round(time.monotonic() - begin, 2)


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "max": max(values)}


def verb(head: Head, *words: str, timeout_s: float = 900.0) -> None:
    done = head.run(*words, timeout_s=timeout_s)
    assert done.code == 0, done.out + done.err


def tiny(folder: Path) -> Path:
    command = [sys.executable, "-m", "glm_exl3.ref.tiny", "--family", "full"]
    subprocess.run([*command, "--out", str(folder / "model")], check=True, capture_output=True)
    return folder / "model"


def fake(folder: Path) -> dict[str, object]:
    image, model = fake_image.make_image(folder / "image.tar"), tiny(folder)
    begin = time.monotonic()
    with lab_module.opened(Path(f"/tmp/glmlab{os.getpid()}"), NODES) as lab:
        up = round(time.monotonic() - begin, 2)
        first, *others = lab.nodes
        first.load(image)
        first.bring_in(model)
        head = Head(lab, {
            "RUNTIME": "containers", "DEVICE": "cpu", "HEAD_IP": first.fabric, "IMAGE": IMAGE,
            "WORKER_IP": ",".join(node.fabric for node in others), "MODEL": str(model),
            "WORKER_SSH": ",".join(node.name for node in others), "SPEC_METHOD": "none",
        })  # fmt: skip
        head.move_in()
        with lab_module.at(first):
            ship = seconds(lambda: images.ensure(IMAGE, first.shell, [others[0].ssh]))
            again = seconds(lambda: images.ensure(IMAGE, first.shell, [others[0].ssh]))
        fresh = seconds(lambda: verb(head, "start"))
        verb(head, "stop")
        checks = [seconds(lambda: verb(head, "doctor")) for _ in range(REPEATS)]
        ready, stopped = [], []
        for _ in range(REPEATS):
            ready.append(seconds(lambda: verb(head, "start")))
            stopped.append(seconds(lambda: verb(head, "stop")))
        help_s = [seconds(lambda: verb(head, "--help")) for _ in range(REPEATS)]
    return {
        "nodes": NODES, "lab_up_s": up, "image_mb": round(image.stat().st_size / 1e6),
        "ship_image_s": ship, "image_already_there_s": again, "first_start_s": fresh,
        "preflight_s": spread(checks), "start_s": spread(ready), "stop_s": spread(stopped),
        "help_s": spread(help_s),
    }  # fmt: skip


def engine(folder: Path) -> dict[str, object]:
    def start() -> tuple[float, int]:
        before = head.sent_bytes()
        return seconds(lambda: verb(head, "start")), head.sent_bytes() - before

    with engine_lab.opened(tiny(folder)) as head:
        build = seconds(lambda: engine_lab.build(head))
        size = head.node.shell.run(
            ["docker", "image", "inspect", "-f", "{{.Size}}", engine_lab.IMAGE]
        )
        first = start()
        verb(head, "stop")
        again = start()
        stop = seconds(lambda: verb(head, "stop"))
    return {
        "nodes": 2, "image_gb": round(int(size.out) / 1e9, 2), "rebuild_s": build,
        "start_to_ready_s": first[0], "sent_bytes": first[1],
        "second_start_to_ready_s": again[0], "second_sent_bytes": again[1], "stop_s": stop,
    }  # fmt: skip


def suites(_folder: Path) -> dict[str, object]:
    def run(chosen: str) -> None:
        command = [sys.executable, "-m", "pytest", "-q", "-m", chosen, "tests/lab"]
        subprocess.run(command, check=True, cwd=lab_module.ROOT)

    return {
        name: round(seconds(lambda chosen=chosen: run(chosen)) / 60, 1)
        for name, chosen in SUITES.items()
    }


PARTS: dict[str, Callable[[Path], dict[str, object]]] = {
    "fake": fake, "engine": engine, "suites": suites,
}  # fmt: skip


def main(names: list[str]) -> None:
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    figures = known.setdefault("bringup", {})
    for name in names or list(PARTS):
        with tempfile.TemporaryDirectory() as temporary:
            figures[name] = PARTS[name](Path(temporary)) | {
                "machine": f"{os.cpu_count()} cores, Linux {platform.release()}",
                "load": round(os.getloadavg()[1], 1),
                "date": time.strftime("%Y-%m-%d"),
            }
    RESULTS.write_text(json.dumps(known, indent=1) + "\n")
    sys.stdout.write(RESULTS.read_text())


if __name__ == "__main__":
    main(sys.argv[1:])
