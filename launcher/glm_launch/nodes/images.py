"""Give every node the same image: what is equal is not sent again.

Two images are the same when platform, plugin label, configuration and layers are
(`Image.identity`); the id is not compared, since engines compute it differently. What must stay
true: after `ship` the node was asked again and holds that identity, or an error says so.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence

from glm_launch.errors import Finding, LaunchFailedError
from glm_launch.nodes.facts import Image, NodeFacts
from glm_launch.nodes.look import look
from glm_launch.nodes.ssh import Shell

SHIP_S = 3600.0


def ensure(
    name: str, head: Shell, workers: Sequence[Shell], say: Callable[[str], None] = lambda _t: None
) -> list[str]:
    """Ship `name` from the head to every worker that lacks it; the names of those it was sent to.

    Raises `LaunchFailedError`.
    """
    wanted = image_on(head, name)
    if wanted is None:
        raise LaunchFailedError(
            Finding(
                "no-image",
                f"{head.name} has no image {name}",
                "every node runs a container of it",
                "unset SKIP_PULL, or BUILD=1",
            )
        )
    sent = []
    for worker in workers:
        found = image_on(worker, name)
        if found is not None and found.identity == wanted.identity:
            continue
        say(f"sending {name} to {worker.name}")
        ship(name, head, worker)
        found = image_on(worker, name)
        if found is None or found.identity != wanted.identity:
            raise LaunchFailedError(_not_the_same(name, worker.name))
        sent.append(worker.name)
    return sent


def image_on(shell: Shell, name: str) -> Image | None:
    """The image as a node has it; raises `LaunchFailedError` when the node does not answer."""
    seen = look(shell, images=[name])
    if not isinstance(seen, NodeFacts):
        raise LaunchFailedError(seen)
    return seen.image(name)


def ship(name: str, source: Shell, target: Shell) -> None:
    """`docker save` here, `docker load` there, nothing stored in between."""
    save = subprocess.Popen(
        source.argv(["docker", "save", name]), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    load = subprocess.Popen(
        target.argv(["docker", "load"]), stdin=save.stdout, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace",
    )  # fmt: skip
    assert save.stdout is not None
    save.stdout.close()
    try:
        said, _ = load.communicate(timeout=SHIP_S)
        _, failed = save.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        said, failed = "it took too long", b""
    finally:
        for process in (save, load):
            process.kill()
            process.wait()
    if load.returncode or save.returncode:
        last = (said.strip() or failed.decode(errors="replace").strip()).splitlines() or ["?"]
        raise LaunchFailedError(
            Finding(
                "ship-failed",
                f"{name} could not be sent to {target.name}: {last[-1]}",
                "every node runs the same image",
                f"on {target.name}: df -h; docker system df",
            )
        )


def _not_the_same(name: str, node: str) -> Finding:
    return Finding(
        "image-differs",
        f"{node} holds another {name} after it was sent",
        "ranks with different code compute different numbers or hang",
        f"on {node}: docker image rm {name}, then start again",
    )
