"""`start.sh demo`: a small model, two real ranks, one answer, and an endpoint to play with.

It serves the trained miniature of the repository; in a checkout without it, a constructed
checkpoint of the same architecture, made once, whose answers are tokens without sense.

What must stay true: READY is said after a real completion; Ctrl-C, SIGTERM and SIGHUP leave no
process at any moment; the ranks are owned by this process, so they end even when it is killed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from glm_launch import health, procs, signals, verbs
from glm_launch.errors import (
    ExitCode,
    Finding,
    InterruptedLaunchError,
    LaunchFailedError,
    UnhealthyError,
)
from glm_launch.paths import MODELS, REPOSITORY
from glm_launch.session import Session, open_session
from glm_launch.state import Current
from glm_launch.ui import Ui

MINIATURE = REPOSITORY / "bench" / "nano" / "model"
CONSTRUCTED = MODELS / "demo"
SOURCES = ("overlay/glm_exl3/format", "overlay/glm_exl3/ref")
QUESTION = "Who are you?"
DEFAULTS = {
    "SPEC_METHOD": "none",
    "MAX_MODEL_LEN": 2048,
    "LANGUAGE_MODEL_ONLY": True,
}
HERE = {"RUNTIME": "local", "PRESET": "", "WORKER_IP": (), "HEAD_IP": "127.0.0.1",
        "EXECUTOR": "mp", "RAY_ADDRESS": "",
        "ABLIT": False, "STEER_VECTOR": "", "STEER_SHA256": ""}  # fmt: skip
ANSWER_TOKENS = 120
MEASURED_TOKENS = 128
LOOK_S = 0.5


@dataclass(frozen=True)
class Weights:
    """What the demo serves; `remark` tells how much to expect from its answers."""

    model: Path
    drafter: Path
    remark: str
    build_in: Path | None = None


def weights(constructed: Path | None = None) -> Weights:
    """The miniature where it lies in the checkout, unless `constructed` names a folder."""
    model = MINIATURE / "full-4bpw"
    if constructed is None and (model / "model.safetensors").is_file():
        return Weights(
            model, MINIATURE / "drafter", "a miniature: it reads well and is often wrong"
        )
    folder = constructed or CONSTRUCTED
    remark = "the weights are constructed: tokens, not sense"
    return Weights(folder / "model", folder / "drafter", remark, build_in=folder)


def run(ui: Ui, *, once: bool, constructed: Path | None = None) -> int:
    """The whole demo; returns the exit code."""
    with signals.as_exceptions():
        served = weights(constructed)
        overrides = HERE | {"MODEL": str(served.model), "DFLASH_MODEL": str(served.drafter)}
        session = open_session(ui, overrides, DEFAULTS)
        try:
            current = bring_up(session, served)
            show(session, current, served.remark)
            if not once:
                serve(session, current)
            return ExitCode.OK
        except InterruptedLaunchError:
            ui.line()
            return ExitCode.OK if session.store.current() else ExitCode.INTERRUPTED
        finally:
            tear_down(session)


def bring_up(session: Session, served: Weights) -> Current:
    """Checkpoint, checks, ranks, READY."""
    with session.store.lock("demo"):
        session.cluster.clean_up()
        session.cluster.refuse_second()
        if served.build_in is not None:
            ensure_checkpoint(session.ui, served.build_in)
        plan = session.plan()
        session.check()
        return session.launch(plan, owned=True)


def tear_down(session: Session) -> None:
    """Stop what this demo started; another command may be at it, or have done so already."""
    procs.wait_until(lambda: not session.store.is_locked(), session.settings.STOP_GRACE_S + 30)
    current = session.store.current()
    if current is None or current.launcher.pid != os.getpid():
        return
    with signals.shielded(), session.store.lock("demo"):
        session.cluster.stop()
    session.ui.line("stopped, no process is left")


def ensure_checkpoint(ui: Ui, folder: Path) -> None:
    """Build the demo's checkpoint and drafter unless the ones there come from the same sources."""
    stamp = sources_digest()
    marker = folder / "stamp"
    if marker.is_file() and marker.read_text() == stamp:
        return
    ui.line("building a small checkpoint and its drafter (once)")
    ui.clock("building")
    begin = time.monotonic()
    draft = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    build_checkpoint(draft)
    (draft / "stamp").write_text(stamp)
    shutil.rmtree(folder, ignore_errors=True)
    draft.rename(folder)
    ui.line(f"built in {time.monotonic() - begin:.0f} s: {folder}")


def build_checkpoint(draft: Path) -> None:
    """Run the builder; raises `LaunchFailedError` with what it said."""
    log = draft / "build.log"
    command = [
        *(sys.executable, "-m", "glm_exl3.ref.tiny", "--family", "full"),
        *("--out", str(draft / "model"), "--drafter", str(draft / "drafter")),
    ]
    with log.open("wb") as output:
        builder = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            code = builder.wait()
        finally:
            builder.kill()
            builder.wait()
    if code:
        raise LaunchFailedError(
            Finding(
                "no-demo-checkpoint",
                f"the checkpoint builder ended with exit code {code}: {health.cause(log)}",
                "the demo has nothing to serve",
                f"its output is in {log}",
            )
        )


def sources_digest() -> str:
    """Hash of the code that makes the checkpoint, so that a changed builder builds again."""
    digest = hashlib.sha256()
    for source in SOURCES:
        for path in sorted((REPOSITORY / source).rglob("*")):
            if path.suffix in (".py", ".json", ".jinja"):
                digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def show(session: Session, current: Current, remark: str) -> None:
    """One streamed answer, the speed, and how to talk to the model."""
    from glm_bench import decode
    from glm_bench.client import Endpoint, stream_chat

    ui, plan = session.ui, current.plan
    key = session.settings.secrets().get("VLLM_API_KEY")
    endpoint = Endpoint(f"{plan.base_url}/v1", plan.served_name, key)
    ui.line(f"\nyou     {QUESTION}")
    stream_chat(
        endpoint,
        [{"role": "user", "content": QUESTION}],
        max_tokens=ANSWER_TOKENS,
        on_text=Transcript(ui),
    )
    ui.line(f"\n        ({remark})\n")
    report = decode.measure(endpoint, "prose", runs=1, max_tokens=MEASURED_TOKENS, ignore_eos=True)
    ui.line(f"speed     {decode.one_line(report)}")
    verbs.say_endpoint(ui, plan)


class Transcript:
    """Writes an answer as it comes in, the reasoning apart from what is said."""

    def __init__(self, ui: Ui) -> None:
        self.ui = ui
        self.speaker = ""

    def __call__(self, thought: str, said: str) -> None:
        for speaker, text in (("thinks", thought), ("says", said)):
            if not text:
                continue
            if speaker != self.speaker:
                self.ui.write(("\n" if self.speaker else "") + f"{speaker:8}")
                self.speaker = speaker
            self.ui.write(text.replace("\n", "\n        "))


def serve(session: Session, current: Current) -> None:
    """Watch the ranks until interrupted, or until another command stops the launch."""
    session.ui.line("serving until Ctrl-C")
    while True:
        time.sleep(LOOK_S)
        now = session.store.current()
        if now is None or now.generation != current.generation or now.phase == "stopping":
            session.ui.line("stopped by another command")
            return
        try:
            health.raise_if_ended(session.cluster.observe())
        except LaunchFailedError as error:
            raise UnhealthyError(*error.findings) from None
