"""Two nodes and the CPU image, made by the product's own build; the head keeps its layers.

Docker's data of the head lies in the lab's cache, so a second run builds what changed and no more.
One run at a time uses it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lab as lab_module
from head import Head
from lab import BASE, CACHE, ROOT

from glm_launch.nodes.supply import Supply, build_argv

BASE_NAME = "glm-exl3-base:bookworm"
IMAGE = "glm-exl3:cpu"
BUILD_S = 900.0


@contextmanager
def opened(model: Path) -> Iterator[Head]:
    """A lab of two whose head has checkout, model and base image, and no container."""
    with (CACHE / "docker.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = Path(f"/tmp/glmlabe{os.getpid()}")
        with lab_module.opened(folder, 2, CACHE / "docker") as lab, lab_module.at(lab.nodes[0]):
            first, second = lab.nodes
            head = Head(lab, {
                "RUNTIME": "containers", "DEVICE": "cpu", "BUILD": "1", "IMAGE": IMAGE,
                "CPU_BASE_IMAGE": BASE_NAME, "HEAD_IP": first.fabric, "WORKER_IP": second.fabric,
                "WORKER_SSH": second.name, "MODEL": str(model), "SPEC_METHOD": "none",
                "MAX_MODEL_LEN": "1024", "CPU_KV_GIB": "1", "LANGUAGE_MODEL_ONLY": "1",
            })  # fmt: skip
            head.move_in()
            first.bring_in(model)
            clean(head)
            yield head
            clean(head)


def clean(head: Head) -> None:
    """Containers and volumes of earlier runs, and the base image if it is not there yet."""
    shell = head.node.shell
    left = shell.run(["docker", "ps", "-aq"]).out.split()
    shell.run(["docker", "rm", "--force", "--volumes", *left] if left else ["true"])
    shell.run(["docker", "volume", "prune", "--all", "--force"])
    if not shell.run(["docker", "image", "inspect", BASE_NAME]).ok:
        command = ["docker", "import", "-c", 'CMD ["python3"]', str(BASE), BASE_NAME]
        done = shell.run(command, timeout_s=120)
        assert done.ok, done.err


def build(head: Head) -> None:
    """What BUILD=1 runs on the head, there and then."""
    argv = build_argv(Supply(IMAGE, "cpu", build=True), "linux/amd64")
    argv = ["env", f"--chdir={ROOT}", f"CPU_BASE_IMAGE={BASE_NAME}", *argv]
    done = head.node.shell.run(argv, timeout_s=BUILD_S)
    assert done.ok, done.err[-3000:]
