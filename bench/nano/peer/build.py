"""`python -m nano.peer.build WHEEL OUT`: the peer's encoder as one library, for the GPU at hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kernels.peer.build import build

BINDINGS = Path(__file__).with_name("bindings.cpp")
UNITS = ("quantize.cu", "pack.cu", "exl3_devctx.cu", "util.cu", "comp_units/quantize_tiles_*.cu")


def units(root: Path) -> list[Path]:
    """The sources of the encoder and what it calls."""
    return [BINDINGS, *(p for name in UNITS for p in sorted((root / "quant").glob(name)))]


def main() -> int:
    failures = build(Path(sys.argv[1]), Path(sys.argv[2]), "9.0", None, units)
    print("\n".join(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as error:
        raise SystemExit(str(error)) from error
