"""`python -m kernels.every_lane FOLDER`: the library in which every lane frees a stage itself.

The warpgroup tiles free a stage through one lane of each warp, behind a barrier of the warp.
Racecheck reports the bulk copy that refills it as a race with the other lanes' reads. This builds
the same sources with `GLM_EXL3_EVERY_LANE_FREES`, where each lane arrives for its own reads, for a
second run: no report there means that the first ones were about that barrier and nothing else.

A process with XDG_CACHE_HOME=FOLDER loads this library, as long as none is shipped.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from glm_exl3.ops import ext

SWITCH = "GLM_EXL3_EVERY_LANE_FREES"


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


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the library whose every lane frees.")
    parser.add_argument("folder", type=Path, help="its XDG_CACHE_HOME")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    print(build(given.folder.resolve(), given.jobs))


if __name__ == "__main__":
    main()
