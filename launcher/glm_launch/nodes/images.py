"""Give every node the same image: what is equal is not sent again.

Two images are the same when platform, plugin label, configuration and layers are
(`Image.identity`); the id is not compared, since engines compute it differently. What must stay
true: after `ship` the node was asked again and holds that identity, or an error says so.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Sequence

from glm_launch.errors import Finding, LaunchError, LaunchFailedError
from glm_launch.nodes import ssh
from glm_launch.nodes.facts import Image, read_image
from glm_launch.nodes.probes.facts import image_facts
from glm_launch.nodes.sites import at_once
from glm_launch.nodes.ssh import Shell

SHIP_S = 3600.0
SAVES_PLATFORMS = 28
_ABSENT = re.compile(r"no such image|no such object", re.IGNORECASE)


def ensure(
    name: str,
    head: Shell,
    workers: Sequence[Shell],
    say: Callable[[str], None] = lambda _text: None,
    *,
    ship_allowed: bool = True,
) -> list[str]:
    """Ship `name` from the head to every worker that lacks it; the names of those it was sent to.

    Raises `LaunchFailedError`, also when a worker lacks it and nothing may be shipped.
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

    def bring(worker: Shell) -> str | LaunchFailedError:
        """The name of a worker that it was sent to, empty when it was there."""
        try:
            found = image_on(worker, name)
            if found is not None and found.identity == wanted.identity:
                return ""
            if not ship_allowed:
                return LaunchFailedError(_may_not_ship(name, worker.name))
            say(f"sending {name} to {worker.name}")
            ship(name, head, worker, docker_of(head), f"{wanted.os}/{wanted.arch}")
            found = image_on(worker, name)
        except LaunchFailedError as error:
            return error
        if found is None or found.identity != wanted.identity:
            return LaunchFailedError(_not_the_same(name, worker.name))
        return worker.name

    done = at_once(bring, workers)
    failed = [found for one in done if isinstance(one, LaunchError) for found in one.findings]
    if failed:
        raise LaunchFailedError(*failed)
    return [one for one in done if isinstance(one, str) and one]


def image_on(shell: Shell, name: str) -> Image | None:
    """The image as a node has it; raises `LaunchFailedError` when the node does not answer."""
    done = shell.run(["docker", "image", "inspect", name])
    if done.code in (ssh.SSH_FAILED, ssh.TIMED_OUT):
        raise LaunchFailedError(ssh.classify(done, shell.name))
    try:
        entries = json.loads(done.out or "[]")
    except ValueError:
        entries = []
    if not entries and not _ABSENT.search(done.err):
        last = done.last_words
        raise LaunchFailedError(
            Finding(
                "docker-unusable",
                f"{shell.name}: docker does not tell about {name}: {last}",
                "every node runs a container of it",
                f"on {shell.name}: docker image inspect {name}",
            )
        )
    return read_image(image_facts(name, entries[0])) if entries else None


def docker_of(shell: Shell) -> int:
    """The major version of a node's docker daemon, 0 when it does not say."""
    done = shell.run(["docker", "version", "--format", "{{.Server.Version}}"])
    major = done.out.strip().partition(".")[0]
    return int(major) if done.ok and major.isdigit() else 0


def save_argv(name: str, docker: int, platform: str) -> list[str]:
    """`docker save` of one platform, as far as the daemon knows that option.

    Without it an image pulled by a multi-platform digest cannot be saved: the blobs of the other
    platforms are not there.
    """
    only = ["--platform", platform] if docker >= SAVES_PLATFORMS else []
    return ["docker", "save", *only, name]


def ship(name: str, source: Shell, target: Shell, docker: int, platform: str) -> None:
    """`docker save` here, `docker load` there, nothing stored in between."""
    save = subprocess.Popen(
        source.argv(save_argv(name, docker, platform)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
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


def _may_not_ship(name: str, node: str) -> Finding:
    return Finding(
        "image-differs",
        f"{node} lacks {name}, or has another one of that name",
        "ranks with different code compute different numbers or hang",
        "unset SKIP_PULL, so that the image is sent",
    )


def _not_the_same(name: str, node: str) -> Finding:
    return Finding(
        "image-differs",
        f"{node} holds another {name} after it was sent",
        "ranks with different code compute different numbers or hang",
        f"on {node}: docker image rm {name}, then start again",
    )
