"""Run the table of GPU jobs, or one call's part of it.

    python -m h200.run OUT --plan one --gpus 0,1 [--budget-s 560]
    python -m h200.run OUT --only NAME... [--gpus 0]
    python -m h200.run OUT --plan one,two,three --gpus 0,1 --dry-run

Logs and results go to OUT, what they say into OUT/verdicts.json and a line per job, everything also
into OUT/all.tar.xz at the end; then OUT/jit-*.tar.xz get what engines compiled (`h200.caches`). All
of that is over after `--budget-s`. WORK/done names the jobs that succeeded: a later run on the same
machine leaves them out unless `--only` names them. `--list` shows the table, with `--json` for
programs; `--dry-run` shows when each job would start, several plans as calls one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from e2e.plugged import ROOT, python_path
from h200 import caches, engines, plans, programs, verdicts
from h200.job import Job
from h200.pack import inner_logs, pack
from h200.schedule import Running, State, next_job, plan

JOBS = (*programs.JOBS, *engines.JOBS)
NAMES = tuple(job.name for job in JOBS)
CACHED = frozenset({"warm", "peer.engine4"})
"""Jobs that others follow for what they compile; caches of an earlier visit hold it."""
PACKING_S, CACHES_S = 30, 24
"""Seconds kept for what follows the last job, and those of them that compiled kernels may take."""


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
    names |= {"root": str(ROOT), "name": job.name, "port": str(2000 + NAMES.index(job.name))}
    names |= {f"gpu{i}": str(gpu) for i, gpu in enumerate(gpus)}
    env = {**os.environ, **caches.environment(work, os.environ), "PYTHONUNBUFFERED": "1"}
    env |= filled(dict(job.env), names)
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


def names_in(path: Path) -> frozenset[str]:
    """Names of jobs of earlier runs: WORK/done has those that ended well, WORK/tried all."""
    return frozenset(path.read_text().split()) if path.exists() else frozenset()


def tried(options: argparse.Namespace) -> frozenset[str]:
    """Jobs that need not be followed: what ended before, and what only fills carried caches."""
    kept = CACHED if caches.archives(options.files) else frozenset[str]()
    return names_in(options.work / "tried") | kept


def keep(name: str, process: Any, seconds: float, work: Path) -> None:
    """Say how a job ended, and note it."""
    print(f"{name:22} rc {process.returncode:4} {seconds:6.0f} s", flush=True)
    for note in ("tried", "done") if process.returncode == 0 else ("tried",):
        with (work / note).open("a") as notes:
            notes.write(f"{name}\n")


def stop(process: Any) -> None:
    """End a job with all that it started."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def pack_caches(options: argparse.Namespace) -> None:
    """What was compiled, within its time: the results are packed already."""
    env = {**os.environ, **caches.environment(options.work, os.environ)}
    env["PYTHONPATH"] = python_path(options.work)
    command = [sys.executable, "-m", "h200.caches", str(options.out), str(options.work)]
    try:
        subprocess.run(command, env=env, timeout=CACHES_S, check=False, cwd=ROOT / "bench")
    except subprocess.TimeoutExpired:
        print(f"compiled kernels: not packed within {CACHES_S} s", flush=True)


def finish(
    options: argparse.Namespace, ended: Mapping[str, tuple[int, float]], left: Sequence[Job],
    seconds: float,
) -> int:  # fmt: skip
    """Say how every job stands and pack; the exit status of the visit."""
    found = verdicts.read(options.out, ended)
    (options.out / "verdicts.json").write_text(json.dumps(found, indent=1) + "\n")
    for name, one in found.items():
        print(verdicts.line(name, one))
    print("left:", " ".join(job.name for job in left) or "nothing", flush=True)
    inner = inner_logs(options.work, time.time() - seconds)
    left_out = pack(options.out, options.out / "all.tar.xz", inner)
    print("not in all.tar.xz:", " ".join(left_out) or "nothing", flush=True)
    pack_caches(options)
    return int(any(rc for rc, _ in ended.values()))


def run(pending: list[Job], options: argparse.Namespace) -> int:
    """Run until nothing can start any more, a vital job failed, or the budget ends."""
    begin, at_work, ended = time.monotonic(), dict[str, Any](), dict[str, tuple[int, float]]()
    done, budget = names_in(options.work / "done"), options.budget_s - PACKING_S
    again = {job.name for job in pending if job.vital} | set(options.only)
    pending = [job for job in pending if job.name not in done or job.name in again]
    while True:
        now = time.monotonic() - begin
        lost = False
        for name, (process, one, since) in list(at_work.items()):
            if process.poll() is None and (now - since > one.job.limit_s or now > budget):
                stop(process)
            if process.poll() is not None:
                ended[name] = (process.returncode, now - since)
                del at_work[name]
                keep(name, process, now - since, options.work)
                codes = {name: rc for name, (rc, _) in ended.items()}
                (options.out / "ended.json").write_text(json.dumps(codes))
                lost = lost or (one.job.vital and process.returncode != 0)
        if lost:
            for process, _, _ in at_work.values():
                stop(process)
            print("a job that all others stand on failed: see its log", flush=True)
            return finish(options, ended, pending, now) or 1
        good = frozenset(name for name, (rc, _) in ended.items() if rc == 0)
        running = tuple(one for _, one, _ in at_work.values())
        state = State(now, budget, options.gpus, running, good, frozenset(ended))
        found = next_job(pending, state, done)
        if found is not None:
            job, gpus = found
            pending.remove(job)
            process = start(job, gpus, options.out, options.work, options.files)
            at_work[job.name] = (process, Running(job, gpus, now + job.expect_s), now)
        elif not at_work:
            return finish(options, ended, pending, now)
        else:
            time.sleep(0.3)


def show_plans(jobs: Sequence[Job], options: argparse.Namespace) -> None:
    """When everything would start, call after call."""
    done, budget = set[str](), options.budget_s - PACKING_S
    for name in options.plan or [""]:
        chosen = plans.planned([name], JOBS, tried(options) | done) if name else jobs
        chosen = [job for job in chosen if job.name not in done or job.vital]
        starts = plan(chosen, options.gpus, budget, done)
        length = {job.name: job.expect_s for job in chosen}
        print(f"{name or 'jobs'}: {max((starts[n] + length[n] for n in starts), default=0):.0f} s")
        for job, second in starts.items():
            print(f"{second:6.0f} s  {job:22} {length[job]:4} s")
        print(
            "  left:", " ".join(job.name for job in chosen if job.name not in starts) or "nothing"
        )
        done |= set(starts)


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
    parser.add_argument("--plan", type=lambda t: t.split(","), default=[], help="of h200.plans")
    parser.add_argument("--gpus", type=lambda t: tuple(map(int, t.split(","))), default=(0,))
    parser.add_argument("--budget-s", type=float, default=560)
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache" / "h200")
    parser.add_argument("--files", type=Path, default=ROOT / ".h200")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--json", action="store_true", help="with --list")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(arguments)
    options.out, options.work = options.out.absolute(), options.work.absolute()
    options.files = options.files.absolute()
    unknown = (set(options.only) - {job.name for job in JOBS}) | (
        set(options.plan) - set(plans.PLANS)
    )
    if unknown:
        parser.error(f"no {', '.join(sorted(unknown))}; --list names jobs, h200.plans plans")
    chosen = [job for job in JOBS if not options.only or job.name in options.only]
    if options.plan:
        chosen = plans.planned(options.plan, JOBS, tried(options))
    if options.list:
        listed(chosen, options.json)
        return 0
    if options.dry_run:
        show_plans(chosen, options)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    options.work.mkdir(parents=True, exist_ok=True)
    return run(chosen, options)


if __name__ == "__main__":
    sys.exit(main())
