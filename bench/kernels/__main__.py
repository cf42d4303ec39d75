"""`python -m kernels [--peer LIBRARY] [--out FILE]`: measure the kernel table on this GPU.

`--show FILE` prints a stored table instead and needs no GPU.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from kernels.table import HERE, PEER_LIBRARY, lines_of, measure


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the kernel table on this GPU.")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "local.json")
    parser.add_argument("--peer", type=Path, default=PEER_LIBRARY, help="see kernels.peer.build")
    parser.add_argument("--show", type=Path, help="print this stored table")
    given = parser.parse_args()
    if given.show is not None:
        print("\n".join(lines_of(json.loads(given.show.read_text()))))
        return
    library = given.peer if given.peer.is_file() else None
    if library is None:
        print(f"no {given.peer}: the peer's column stays empty (python -m kernels.peer.build)")
    print("\n".join(measure(given.out, library)))


if __name__ == "__main__":
    main()
