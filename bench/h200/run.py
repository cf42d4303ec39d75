"""Run the table of GPU jobs: `python -m h200.run OUT [--only NAME...] [--gpus 0,1] [--list]`.

Logs and results go to OUT, everything also into OUT/all.tar.xz at the end. WORK/done names the jobs
that succeeded: a later run on the same machine leaves them out unless `--only` names them. `--list`
shows the table, with `--json` for programs; `--dry-run` shows when each job would start.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from e2e.plugged import ROOT, python_path
from h200 import engines, programs
from h200.job import Job
from h200.pack import pack
from h200.schedule import Running, State, next_job, plan

JOBS = (*programs.JOBS, *engines.JOBS)
PACKING_S = 15


def filled(value: Any, names: dict[str, str]) -> Any:
    """`value` with {placeholders} replaced in every string."""
    if isinstance(value, str):
        for name, text in names.items():
            value = value.replace("{" + name + "}", text)
        return value
    if isinstance(value, dict):
        return {key: filled(part, names) for key, part in value.items()}
    return [filled(p, names) for p in value] if isinstance(value, (list, tuple)) else value


def start(job: Job, gpus: tuple[int, ...], out: Path, work: Path, files: Path) -> Any:
    """The job's process, leader of a group of its own."""
    names = {"python": sys.executable, "out": str(out), "work": str(work), "files": str(files)}
    names |= {"root": str(ROOT), "name": job.name, "port": str(2000 + JOBS.index(job))}
    names |= {f"gpu{i}": str(gpu) for i, gpu in enumerate(gpus)}
    env = {**os.environ, "PYTHONUNBUFFERED": "1", **filled(dict(job.env), names)}
    paths = [str(ROOT / "bench/h200/quick")] if job.quick else []
    paths += [env["PYTHONPATH"]] if "PYTHONPATH" in job.env else []
    env["PYTHONPATH"] = os.pathsep.join([*paths, python_path(work)])
    if gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    if job.data is not None:
        (out / f"{job.name}.job.json").write_text(json.dumps(filled(dict(job.data), names)))
    with (out / f"{job.name}.log").open("wb") as log:
        return subprocess.Popen(
            filled(list(job.command), names), stdout=log, stderr=subprocess.STDOUT, env=env,
            cwd=ROOT / "bench", start_new_session=True,
        )  # fmt: skip


def succeeded(work: Path) -> frozenset[str]:
    """Names of the jobs that ended well in earlier runs."""
    done = work / "done"
    return frozenset(done.read_text().split()) if done.exists() else frozenset()


def keep(name: str, process: Any, seconds: float, work: Path) -> None:
    """Say how a job ended, and note it if it ended well."""
    print(f"{name:22} rc {process.returncode:4} {seconds:6.0f} s", flush=True)
    if process.returncode == 0:
        with (work / "done").open("a") as done:
            done.write(f"{name}\n")


def run(pending: list[Job], options: argparse.Namespace) -> int:
    """Run until nothing can start any more or the budget ends."""
    begin, at_work, ended = time.monotonic(), dict[str, Any](), dict[str, int]()
    done = succeeded(options.work)
    pending = [job for job in pending if job.name not in done or job.name in options.only]
    while True:
        now = time.monotonic() - begin
        for name, (process, one, since) in list(at_work.items()):
            late = now - since > one.job.limit_s or now > options.budget_s - PACKING_S
            if process.poll() is None and late:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if process.poll() is not None:
                ended[name] = process.returncode
                del at_work[name]
                keep(name, process, now - since, options.work)
                (options.out / "ended.json").write_text(json.dumps(ended))
        good = frozenset(name for name, rc in ended.items() if rc == 0)
        running = tuple(one for _, one, _ in at_work.values())
        budget = options.budget_s - PACKING_S
        state = State(now, budget, options.gpus, running, good, frozenset(ended))
        found = next_job(pending, state, done)
        if found is not None:
            job, gpus = found
            pending.remove(job)
            process = start(job, gpus, options.out, options.work, options.files)
            at_work[job.name] = (process, Running(job, gpus, now + job.expect_s), now)
        elif not at_work:
            print("left:", " ".join(job.name for job in pending))
            pack(options.out, options.out / "all.tar.xz")
            return int(any(ended.values()))
        else:
            time.sleep(0.3)


def listed(jobs: Sequence[Job], as_json: bool) -> None:
    """Print the table, first what starts first."""
    ordered = sorted(jobs, key=lambda job: job.priority)
    if as_json:
        print(json.dumps([asdict(job) for job in ordered], indent=1))
        return
    for job in ordered:
        print(f"{job.priority:3} {job.name:22} gpus {job.gpus} {job.expect_s:4} s")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m h200.run")
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--gpus", type=lambda t: tuple(map(int, t.split(","))), default=(0,))
    parser.add_argument("--budget-s", type=float, default=560)
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache" / "h200")
    parser.add_argument("--files", type=Path, default=ROOT / ".h200")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--json", action="store_true", help="with --list")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(arguments)
    options.out = options.out.absolute()
    unknown = set(options.only) - {job.name for job in JOBS}
    if unknown:
        parser.error(f"no job {', '.join(sorted(unknown))}; --list names them")
    chosen = [job for job in JOBS if not options.only or job.name in options.only]
    if options.list:
        listed(chosen, options.json)
        return 0
    if options.dry_run:
        for name, second in plan(chosen, options.gpus, options.budget_s).items():
            print(f"{second:6.0f} s  {name}")
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    options.work.mkdir(parents=True, exist_ok=True)
    return run(chosen, options)


if __name__ == "__main__":
    sys.exit(main())
