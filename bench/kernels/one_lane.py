"""The library in which one lane of each warp frees a stage, and what freeing by every lane costs.

    python -m kernels.one_lane FOLDER                (compiles; no GPU)
    python -m kernels.one_lane FOLDER --compare OUT  (one GPU, a minute)

Every lane of the warpgroup tiles frees a stage for its own reads. One lane behind a barrier of the
warp would do, and did; racecheck reported the bulk copy that refills the stage as a race with the
other lanes' reads, and nothing once each lane spoke for itself. This builds the same sources with
`GLM_EXL3_ONE_LANE_FREES`, the older way.

A process with XDG_CACHE_HOME=FOLDER loads this library, as long as none is shipped. `--compare`
times the shapes that use these tiles with both libraries in turn, twice each in processes of their
own, and writes the lower time of each: `{rows: [{op, shape, m, k_bits, codebook, one_us, every_us,
ratio}]}`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from glm_exl3.ops import ext

SWITCH = "GLM_EXL3_ONE_LANE_FREES"
ROUNDS = 2
KEY = ("op", "shape", "m", "k_bits", "codebook")


def place(folder: Path) -> Path:
    """Where `ext.find_library` looks with XDG_CACHE_HOME=`folder`."""
    return folder / "glm_exl3" / ext.source_digest() / ext.LIBRARY_NAME


def build(folder: Path, jobs: int) -> Path:
    """Build for Hopper where it is missing; nvcc takes the switch from its own variable."""
    if ext.SHIPPED.is_file():
        raise SystemExit(f"{ext.SHIPPED} would be loaded in place of this one: move it away first")
    target = place(folder)
    if not target.is_file():
        os.environ["NVCC_APPEND_FLAGS"] = f"-D{SWITCH}"
        ext.build(target, (ext.HOPPER,), jobs)
    return target


def timed() -> list[dict[str, Any]]:
    """Rows of the kernel table that use these tiles, of the library that this process loads."""
    from dataclasses import asdict

    from kernels.cases import MCG, MUL1, DenseCase, RoutedCase
    from kernels.table import dense_rows, routed_rows

    rows = [
        *routed_rows(RoutedCase(4, MCG, 2048, (256, 1024, 4096, 8192)), 1.0, with_peer=False),
        *routed_rows(RoutedCase(3, MUL1, 2048, (64, 4096)), 1.0, with_peer=False),
        *dense_rows(DenseCase(4096, 24576, 4, MCG, (64, 2048, 8192)), 1.0, with_peer=False),
    ]
    return [asdict(row) for row in rows]


def child(folder: Path | None) -> list[dict[str, Any]]:
    """`timed` in a process that loads the library of FOLDER, or the usual one."""
    more = {} if folder is None else {"XDG_CACHE_HOME": str(folder)}
    command = [sys.executable, "-m", "kernels.one_lane", str(folder), "--child"]
    done = subprocess.run(command, env={**os.environ, **more}, stdout=subprocess.PIPE, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(folder: Path) -> list[dict[str, Any]]:
    """Both libraries in turn; the lower time of each row."""
    least: dict[tuple[Any, ...], dict[str, float]] = {}
    for _ in range(ROUNDS):
        for name, where in (("one_us", folder), ("every_us", None)):
            for row in child(where):
                times = least.setdefault(tuple(row[part] for part in KEY), {})
                times[name] = min(times.get(name, row["ours_us"]), row["ours_us"])
    return [
        dict(zip(KEY, key, strict=True))
        | times
        | {"ratio": round(times["every_us"] / times["one_us"], 4)}
        for key, times in least.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the library whose one lane frees.")
    parser.add_argument("folder", type=Path, help="its XDG_CACHE_HOME")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--compare", type=Path, metavar="OUT", help="time both libraries")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(timed()))
        return
    print(build(given.folder.resolve(), given.jobs))
    if given.compare is not None:
        rows = compare(given.folder.resolve())
        given.compare.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
        for row in rows:
            print(*row.values())


if __name__ == "__main__":
    main()
