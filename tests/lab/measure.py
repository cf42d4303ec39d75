"""Measure bring-up in the lab and write the figures to results.json under `bringup`.

    python tests/lab/measure.py            needs root and tests/lab/setup.sh

Fake ranks stand in for the engine, so these are the launcher's own costs.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import lab as lab_module

from conftest import Fakes
from glm_launch.nodes import fabric, images, look, preflight
from glm_launch.nodes.fabric import Endpoint
from glm_launch.nodes.preflight import Needs

RESULTS = Path(__file__).with_name("results.json")
NODES = 4
REPEATS = 5


def seconds(work: Callable[[], object]) -> float:
    begin = time.monotonic()
    work()
    return round(time.monotonic() - begin, 2)


def check(lab: lab_module.Lab) -> None:
    shells = [lab.nodes[0].shell, *(node.ssh for node in lab.nodes[1:])]
    seen, missing = look.look_all(shells, paths=["/root"], images=[lab_module.IMAGE])
    assert not missing
    report = preflight.check([(facts, Needs(image=lab_module.IMAGE)) for facts in seen])
    pairs = zip(lab.nodes, seen, strict=True)
    _, found = fabric.choose([Endpoint(node.fabric, facts) for node, facts in pairs])
    assert not report.findings and not found, (report, found)


def main(folder: Path) -> dict[str, object]:
    image = lab_module.make_image(folder / "image.tar")
    begin = time.monotonic()
    with lab_module.opened(Path(f"/tmp/glmlab{os.getpid()}"), NODES) as lab:
        up = round(time.monotonic() - begin, 2)
        head, worker = lab.nodes[0], lab.nodes[1]
        head.load(image)
        with lab_module.at(head):
            ship = seconds(lambda: images.ensure(lab_module.IMAGE, head.shell, [worker.ssh]))
            again = seconds(lambda: images.ensure(lab_module.IMAGE, head.shell, [worker.ssh]))
            for node in lab.nodes[2:]:
                images.ensure(lab_module.IMAGE, head.shell, [node.ssh])
            checks = [seconds(lambda: check(lab)) for _ in range(REPEATS)]
            ready, stopped = [], []
            for number in range(REPEATS):
                fakes = Fakes(lab, folder / f"state{number}")
                ready.append(seconds(fakes.launch))
                stopped.append(seconds(fakes.cluster.stop))
    return {
        "nodes": NODES, "lab_up_s": up, "image_mb": round(image.stat().st_size / 1e6),
        "ship_image_s": ship, "image_already_there_s": again,
        "preflight_s": {"median": statistics.median(checks), "max": max(checks)},
        "fake_ready_s": {"median": statistics.median(ready), "max": max(ready)},
        "stop_s": {"median": statistics.median(stopped), "max": max(stopped)},
        "machine": f"{os.cpu_count()} cores shared with other work, Linux {platform.release()}",
        "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


if __name__ == "__main__":
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    with tempfile.TemporaryDirectory() as temporary:
        known["bringup"] = main(Path(temporary))
    RESULTS.write_text(json.dumps(known, indent=1) + "\n")
    sys.stdout.write(RESULTS.read_text())
