"""Ranks as containers on other machines: the `Runner` of `RUNTIME=containers`.

What must stay true: everything on a node is done by `docker` through its `Shell`, nothing is left
there but labelled containers, the cache volume and one key file of mode 0600 on the head, and
`stop` removes the container and the key; it only ever touches containers of the rank's own name
that carry our label. The log of a rank is fetched into the launch folder while it is looked at and
once more when it ends, so it outlives its container.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from glm_launch.errors import Finding, LaunchFailedError
from glm_launch.nodes import docker_cli, ssh
from glm_launch.nodes.docker_cli import Box, Inspected, name_of
from glm_launch.nodes.ssh import Done, Shell
from glm_launch.plan import RankPlan
from glm_launch.runner import NodeState, State

LOOK_S = 1.0
START_S = 120.0
MARGIN_S = 15.0
_STATES: Mapping[str, State] = {
    "running": "running", "paused": "running", "restarting": "running", "created": "exited",
    "exited": "exited", "dead": "exited", "removing": "exited",
}  # fmt: skip


@dataclass
class ContainerRunner:
    """Implements `Runner`; `shells` are by the node names of the plan.

    `boxes` are, too, for ranks whose plan holds none. `log_every_s` is how often `observe` fetches
    the log of a rank that runs: reading a long one costs its node time.
    """

    folder: Path
    shells: Mapping[str, Shell]
    boxes: Mapping[str, Box]
    key_folder: str = "/run/glm-exl3"
    log_every_s: float = 0.0
    _seen: dict[tuple[int, str], tuple[float, NodeState]] = field(default_factory=dict)
    _fetched: dict[tuple[int, str], float] = field(default_factory=dict)

    def log(self, rank: RankPlan, generation: str) -> Path:
        return self.folder / generation / f"{rank.name}.log"

    def start(
        self,
        rank: RankPlan,
        generation: str,
        secrets: Mapping[str, str],
        *,
        grace_s: float,
        owned: bool = False,  # noqa: ARG002 (containers outlive the launcher)
    ) -> None:
        """Replace a stopped container of ours and start this one.

        Raises `LaunchFailedError` with what docker or ssh said.
        """
        self.log(rank, generation).parent.mkdir(parents=True, exist_ok=True)
        left = self._inspect(rank)
        if left is not None and left.ours and left.status != "running":
            self._run(rank, ["docker", "rm", "--force", name_of(rank.rank)])
        key_file = self._write_key(rank, secrets)
        argv = docker_cli.run_argv(
            rank.box or self.boxes[rank.node], rank.rank, generation, rank.argv, rank.env,
            grace_s=int(grace_s), key_file=key_file,
        )  # fmt: skip
        done = self.shells[rank.node].run(argv, timeout_s=START_S)
        self._seen.pop((rank.rank, generation), None)
        if not done.ok:
            raise LaunchFailedError(_not_started(rank, done))

    def observe(self, rank: RankPlan, generation: str) -> NodeState:
        when, state = self._seen.get((rank.rank, generation), (0.0, None))
        if state is not None and time.monotonic() - when < LOOK_S:
            return state
        state = self._look(rank, generation)
        self._seen[rank.rank, generation] = (time.monotonic(), state)
        return state

    def stop(self, rank: RankPlan, generation: str, grace_s: float) -> None:
        """End and remove the container of this launch.

        Raises `LaunchFailedError` when the node or its docker daemon does not answer.
        """
        self._seen.pop((rank.rank, generation), None)
        name = name_of(rank.rank)
        seen = self._inspect(rank)
        if seen is not None and seen.ours and seen.generation == generation:
            self._run(rank, ["docker", "stop", "--time", str(int(grace_s)), name],
                      grace_s + START_S)  # fmt: skip
            self._fetch_log(rank, generation)
            removed = self._run(rank, ["docker", "rm", "--force", name])
            if _docker_failed(removed):
                raise LaunchFailedError(_docker_finding(rank, removed))
        if rank.secret_env:
            self._run(rank, ["rm", "-f", f"{self.key_folder}/{name}.key"])

    def _look(self, rank: RankPlan, generation: str) -> NodeState:
        base = NodeState(
            rank.rank, rank.role, rank.node, "absent", log=str(self.log(rank, generation))
        )
        done = self.shells[rank.node].run(["docker", "inspect", name_of(rank.rank)])
        if done.code in (ssh.SSH_FAILED, ssh.TIMED_OUT) or _docker_failed(done):
            return replace(base, state="lost")
        seen = docker_cli.parse_inspect(done.out)
        if seen is None or seen.generation != generation:
            return base
        state = _state(base, seen)
        last, now = self._fetched.get((rank.rank, generation)), time.monotonic()
        if state.state != "running" or last is None or now - last >= self.log_every_s:
            self._fetched[rank.rank, generation] = now
            self._fetch_log(rank, generation)
        return state

    def _fetch_log(self, rank: RankPlan, generation: str) -> None:
        """Add what is new; docker keeps the order, so a count of bytes is a position.

        It is written at that position, since `status` may fetch the same bytes meanwhile. A disk
        that is full here costs the log and hides no state.
        """
        with suppress(OSError):
            self._copy_log(rank, generation)

    def _copy_log(self, rank: RankPlan, generation: str) -> None:
        log = self.log(rank, generation)
        have = log.stat().st_size if log.exists() else 0
        script = f"docker logs {name_of(rank.rank)} 2>&1 | tail -c +{have + 1}"
        done = self.shells[rank.node].run(["sh", "-c", script])
        if done.ok and done.out and not done.out.startswith("Error response from daemon"):
            log.touch()
            with log.open("r+b") as stream:
                stream.seek(have)
                stream.write(done.out.encode())

    def _write_key(self, rank: RankPlan, secrets: Mapping[str, str]) -> str:
        """The key on the node, readable by root only; through standard input, never an argument."""
        if not rank.secret_env:
            return ""
        path = f"{self.key_folder}/{name_of(rank.rank)}.key"
        script = (
            f"umask 077 && mkdir -p {self.key_folder} && cat > {path}.new && mv {path}.new {path}"
        )
        key = secrets[rank.secret_env[0]]
        done = self.shells[rank.node].run(["sh", "-c", script], stdin=key)
        if not done.ok:
            raise LaunchFailedError(_not_started(rank, done))
        return path

    def _inspect(self, rank: RankPlan) -> Inspected | None:
        done = self._run(rank, ["docker", "inspect", name_of(rank.rank)])
        if _docker_failed(done):
            raise LaunchFailedError(_docker_finding(rank, done))
        return docker_cli.parse_inspect(done.out)

    def _run(self, rank: RankPlan, command: list[str], timeout_s: float = START_S) -> Done:
        done = self.shells[rank.node].run(command, timeout_s=timeout_s)
        if done.code in (ssh.SSH_FAILED, ssh.TIMED_OUT):
            raise LaunchFailedError(ssh.classify(done, self.shells[rank.node].name))
        return done


def _docker_failed(done: Done) -> bool:
    """Whether docker gave no answer, as opposed to: there is no such container."""
    return not done.ok and not re.search(r"no such (object|container)", done.err, re.IGNORECASE)


def _docker_finding(rank: RankPlan, done: Done) -> Finding:
    last = done.last_words
    return Finding(
        "docker-unusable",
        f"{rank.node}: docker does not answer: {last}",
        "what runs there cannot be seen or ended",
        f"on {rank.node}: sudo systemctl start docker; docker ps -a",
    )


def _state(base: NodeState, seen: Inspected) -> NodeState:
    state = _STATES.get(seen.status, "lost")
    ended = state != "running"
    return replace(
        base,
        state=state,
        pid=seen.pid or None,
        exit_code=seen.exit_code if ended else None,
        started_at=_seconds(seen.started),
        ended_at=_seconds(seen.ended) if ended else None,
    )


def _seconds(text: str) -> float | None:
    """Docker's time (nanoseconds, `Z`) as seconds since 1970; None for its zero."""
    head, _, fraction = text.removesuffix("Z").partition(".")
    if not head or head.startswith("0001"):
        return None
    return datetime.fromisoformat(f"{head}+00:00").timestamp() + float(f"0.{fraction or 0}")


def _not_started(rank: RankPlan, done: Done) -> Finding:
    if done.code == ssh.SSH_FAILED:
        return ssh.classify(done, rank.node)
    said = done.last_words
    if "is already in use by container" in done.err:
        said = f"a container called {name_of(rank.rank)} is already there and is not stopped"
        fix = f"./start.sh stop; or, if it is not needed, on {rank.node}: docker rm -f " + (
            name_of(rank.rank)
        )
    elif "No such image" in done.err or "Unable to find image" in done.err:
        fix = "unset SKIP_PULL, so that the image is shipped"
    else:
        fix = f"on {rank.node}: journalctl -u docker; ./start.sh doctor"
    return Finding("not-started", f"{rank.node}: {said}", "the model needs every node", fix)
