"""Bring the image to the head: pull it, build it, or take the one that is there; then check it.

What must stay true: a token reaches docker through standard input and lives in a folder that is
removed again; an image that is there is not pulled over by another one of the same name; nothing is
shipped to other nodes before the plugin inside was seen to load.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from glm_launch.errors import Finding, RefusedError
from glm_launch.nodes.facts import Image
from glm_launch.nodes.images import image_on
from glm_launch.nodes.ssh import Done, Shell, execute
from glm_launch.paths import REPOSITORY
from glm_launch.settings import Settings

PULL_S = 4 * 3600.0
BUILD_S = 6 * 3600.0
CHECK_S = 900.0
BUILT = "glm-exl3"
PIN = REPOSITORY / "docker" / "pin.py"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
Say = Callable[[str], None]


@dataclass(frozen=True)
class Supply:
    """Which image, and how the head may get it."""

    name: str
    device: str = "cuda"
    build: bool = False
    skip_pull: bool = False
    skip_check: bool = False
    user: str = ""
    token: str = ""
    ray: bool = False

    @property
    def target(self) -> str:
        """The target of docker/build.hcl."""
        return f"{self.device}-ray" if self.ray else self.device


def supply_of(settings: Settings) -> Supply:
    token = settings.GHCR_TOKEN.get_secret_value() if settings.GHCR_TOKEN else ""
    return Supply(
        image_name(settings), settings.DEVICE, settings.BUILD, settings.SKIP_PULL,
        settings.SKIP_OVERLAY_VERIFY, settings.GHCR_USER, token, settings.EXECUTOR == "ray",
    )  # fmt: skip


def image_name(settings: Settings) -> str:
    """IMAGE, or the name under which BUILD=1 leaves one."""
    suffix = "-ray" if settings.EXECUTOR == "ray" else ""
    return settings.IMAGE or f"{BUILT}:{settings.DEVICE}{suffix}"


def local_name(name: str) -> str:
    """The name under which all nodes know an image: a tag of ours for one that has only a digest.

    `docker save` of a digest leaves an image without a name where it is loaded.
    """
    _, at, digest = name.partition("@")
    return f"{BUILT}:pinned-{digest.rpartition(':')[2][:16]}" if at else name


def commands(supply: Supply, arch: str) -> list[list[str]]:
    """What would be run on the head where the image is missing or built."""
    platform = f"linux/{ARCHITECTURES.get(arch, arch)}"
    if supply.build:
        return [build_argv(supply, platform)]
    if supply.skip_pull:
        return []
    pull = ["docker", "pull", "--platform", platform, supply.name]
    return [pull, *([tag_argv(supply)] if "@" in supply.name else [])]


def tag_argv(supply: Supply) -> list[str]:
    return ["docker", "tag", supply.name, local_name(supply.name)]


def build_argv(supply: Supply, platform: str) -> list[str]:
    """The build, with the base's digest and a label of the plugin's sources from docker/pin.py."""
    target = supply.target
    pins = subprocess.run(
        [sys.executable, str(PIN), "--print"], check=True, capture_output=True, text=True
    )
    return [
        "env", *pins.stdout.split(), "docker", "buildx", "bake", "--load",
        "--file", "docker/build.hcl", "--set", f"{target}.platform={platform}",
        "--set", f"{target}.tags={supply.name}", target,
    ]  # fmt: skip


def obtain(supply: Supply, head: Shell, arch: str, log: Path, say: Say) -> Image:
    """The image on the head under its local name, pulled or built as far as needed.

    Raises `RefusedError`.
    """
    platform = f"linux/{ARCHITECTURES.get(arch, arch)}"
    name = local_name(supply.name)
    found = image_on(head, name)
    if supply.build:
        say(f"building {supply.name} (output in {log})")
        _build(build_argv(supply, platform), log)
    elif found is None and supply.skip_pull:
        raise RefusedError(_absent(supply.name, head.name))
    elif found is None:
        say(f"pulling {supply.name}")
        if name == supply.name or image_on(head, supply.name) is None:
            _pull(supply, head, platform)
        if name != supply.name:
            head.run(tag_argv(supply))
    found = image_on(head, name)
    if found is None:
        raise RefusedError(_absent(supply.name, head.name))
    return found


def check(supply: Supply, head: Shell) -> None:
    """Run the plugin's own doctor in the image, without network; raises `RefusedError`."""
    done = head.run(check_argv(supply), timeout_s=CHECK_S)
    if done.ok:
        return
    raise RefusedError(
        Finding(
            "image-check",
            f"{supply.name} does not pass its self-check: {_failed(done)}",
            "its ranks would fail after the weights were read, or compute something else",
            "use another IMAGE or BUILD=1; SKIP_OVERLAY_VERIFY=1 goes on without this check",
        )
    )


def check_argv(supply: Supply) -> list[str]:
    argv = ["docker", "run", "--rm", "--pull", "never", "--network", "none"]
    argv += ["--gpus", "all"] if supply.device == "cuda" else []
    name = local_name(supply.name)
    return [*argv, "--entrypoint", "python3", name, "-m", "glm_exl3.doctor", "--json"]


def _failed(done: Done) -> str:
    try:
        wrong = [f"{one['name']}: {one['detail']}" for one in json.loads(done.out) if not one["ok"]]
    except (ValueError, KeyError, TypeError):
        wrong = []
    last = done.last_words
    return "; ".join(wrong) or last


def _build(argv: list[str], log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        try:
            done = subprocess.run(
                argv, check=False, cwd=REPOSITORY, stdout=output, stderr=output, timeout=BUILD_S
            )
            code = done.returncode
        except (OSError, subprocess.TimeoutExpired) as error:
            output.write(f"{error}\n".encode())
            code = 1
    if code:
        last = (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
        raise RefusedError(
            Finding(
                "build-failed",
                f"the image could not be built: {last}",
                "every node runs a container of it",
                f"its output is in {log}",
            )
        )


def _pull(supply: Supply, head: Shell, platform: str) -> None:
    """Pull, logged in for this one command when a token is set."""
    pull = ["pull", "--platform", platform, supply.name]
    if not supply.token:
        done = head.run(["docker", *pull], timeout_s=PULL_S)
    else:
        registry = registry_of(supply.name)
        with tempfile.TemporaryDirectory(prefix="glm-exl3-docker-") as folder:
            docker = ["docker", "--config", folder]
            login = [*docker, "login", "--username", supply.user, "--password-stdin", *registry]
            done = execute(head.argv(login), supply.token, 60.0)
            if done.ok:
                done = head.run([*docker, *pull], timeout_s=PULL_S)
    if not done.ok:
        raise RefusedError(_not_pulled(supply, done))


def registry_of(name: str) -> list[str]:
    """The registry of an image as an argument; none for docker's own."""
    first, slash, _ = name.partition("/")
    return [first] if slash and re.search(r"[.:]|^localhost$", first) else []


def _not_pulled(supply: Supply, done: Done) -> Finding:
    text = done.err.strip()
    last = done.last_words
    if supply.token:
        last = last.replace(supply.token, "(hidden)")
    code, fix = "pull-failed", "check the name and the network; or BUILD=1"
    if "no space left" in text:
        code, fix = "disk-full", "docker system df; docker image prune"
    elif "unauthorized" in text or "denied" in text:
        code, fix = "pull-denied", "set GHCR_USER and GHCR_TOKEN, or check the name"
    elif "not found" in text or "manifest unknown" in text:
        code, fix = "pull-not-found", "check IMAGE: there is no such name, tag or digest"
    return Finding(code, f"{supply.name}: {last}", "every node runs a container of it", fix)


def _absent(name: str, node: str) -> Finding:
    return Finding(
        "no-image",
        f"{node} has no image {name}",
        "every node runs a container of it",
        "unset SKIP_PULL, or BUILD=1",
    )
