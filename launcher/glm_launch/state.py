"""The launcher's memory between commands: which launch is current, and who may change it.

    FOLDER/lock                        held (flock) by the command that changes something
    FOLDER/cluster.json                the current launch, absent when nothing should run
    FOLDER/launches/GENERATION/        plan, records and logs of one launch; the last ten are kept
    FOLDER/timings.json                how long each phase took, for the expected times
    FOLDER/images.json                 images that passed their self-check
    FOLDER/good.json                   image and preset of the last launches that answered

What must stay true: `cluster.json` is written before the first rank starts and removed after the
last one is gone, each time by an atomic rename, so a launcher killed at any moment leaves a state
that the next command can clean up. No secret is ever written.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from glm_launch import procs
from glm_launch.errors import Finding, RefusedError
from glm_launch.files import held, is_held, replace_text
from glm_launch.plan import LaunchPlan
from glm_launch.procs import Identity

KEPT_LAUNCHES = 10
KEPT_GOOD = 3
Phase = Literal["starting", "ready", "stopping"]


@dataclass(frozen=True)
class Current:
    """The launch that should run; `owner` is the demo that must outlive it, if one does."""

    generation: str
    phase: Phase
    plan: LaunchPlan
    started_at: float
    launcher: Identity
    owned: bool = False
    ready_at: float | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"plan": self.plan.as_json()}


@dataclass(frozen=True)
class Good:
    """A launch that answered: the image by fingerprint, a tag that keeps it, and the preset."""

    image: str
    fingerprint: str
    tag: str
    preset: str
    ready_at: float

    @property
    def what(self) -> tuple[str, str]:
        return self.fingerprint, self.preset


def new_generation() -> str:
    """A name for a launch; later ones sort behind earlier ones."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


class StateStore:
    """Reads and writes the state folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.launches = folder / "launches"
        self._cluster = folder / "cluster.json"
        self._timings = folder / "timings.json"
        self._images = folder / "images.json"
        self._good = folder / "good.json"

    @contextmanager
    def lock(self, verb: str) -> Iterator[None]:
        """Hold the right to change something; refuses at once when another command has it."""
        me = {"pid": os.getpid(), "verb": verb, "since": time.time()}
        with held(self.folder / "lock", me, lambda: RefusedError(_locked(self.holder()))) as handle:
            try:
                yield
            finally:
                handle.truncate(0)

    def holder(self) -> dict[str, Any]:
        """Who holds the lock, as far as it said; empty when nobody did."""
        return _read(self.folder / "lock")

    def is_locked(self) -> bool:
        """Whether some command is changing something."""
        return is_held(self.folder / "lock")

    def begin(self, plan: LaunchPlan, generation: str, *, owned: bool) -> Current:
        """Record a launch that is about to start."""
        launcher = procs.identify(os.getpid())
        assert launcher is not None
        current = Current(generation, "starting", plan, time.time(), launcher, owned)
        (self.launches / generation).mkdir(parents=True)
        _write(self.launches / generation / "plan.json", plan.as_json())
        self._save(current)
        self._prune(generation)
        return current

    def mark(self, current: Current, phase: Phase) -> Current:
        """Record the next phase of a launch."""
        ready_at = time.time() if phase == "ready" else current.ready_at
        changed = replace(current, phase=phase, ready_at=ready_at)
        self._save(changed)
        return changed

    def current(self) -> Current | None:
        """The launch that should run, or None."""
        found = _read(self._cluster)
        if not found:
            return None
        return Current(
            **found
            | {
                "plan": LaunchPlan.from_json(found["plan"]),
                "launcher": Identity(**found["launcher"]),
            }
        )

    def forget(self) -> None:
        """Nothing should run any more."""
        self._cluster.unlink(missing_ok=True)

    def last_generation(self) -> str | None:
        """The newest launch whose logs are kept."""
        names = sorted(path.parent.name for path in self.launches.glob("*/plan.json"))
        return names[-1] if names else None

    def timings(self, key: str) -> dict[str, float]:
        """Seconds per phase of the last launch like this one."""
        return dict(_read(self._timings).get(key, {}))

    def keep_timings(self, key: str, seconds: Mapping[str, float]) -> None:
        """Remember them."""
        _write(self._timings, _read(self._timings) | {key: dict(seconds)})

    def image_passed(self, fingerprint: str) -> bool:
        """Whether an image with this fingerprint passed its self-check before."""
        return fingerprint in _read(self._images)

    def keep_passed(self, fingerprint: str) -> None:
        _write(self._images, _read(self._images) | {fingerprint: time.time()})

    def keep_good(self, good: Good) -> None:
        """Remember what answered; the newest of each kind, the last few kinds."""
        others = [one for one in self.goods() if one.what != good.what]
        kept = [*others, good][-KEPT_GOOD:]
        _write(self._good, {"launches": [asdict(one) for one in kept]})

    def goods(self) -> list[Good]:
        """What answered, the newest last."""
        return [Good(**one) for one in _read(self._good).get("launches", [])]

    def _save(self, current: Current) -> None:
        _write(self._cluster, current.as_json())

    def _prune(self, keep: str) -> None:
        folders = sorted(path for path in self.launches.iterdir() if path.name != keep)
        for folder in folders[: -(KEPT_LAUNCHES - 1)]:
            shutil.rmtree(folder, ignore_errors=True)


def _locked(holder: Mapping[str, Any]) -> Finding:
    who = f"`{holder.get('verb', '?')}` (pid {holder.get('pid', '?')})"
    since = time.strftime("%H:%M:%S", time.localtime(holder.get("since", time.time())))
    return Finding(
        "locked",
        f"another command is at work: {who}, since {since}",
        "two commands at once would start the ranks twice",
        "wait for it, or interrupt it; ./start.sh status shows what runs",
    )


def _write(path: Path, value: object) -> None:
    replace_text(path, json.dumps(value, indent=1))


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
