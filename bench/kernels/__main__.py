"""`python -m kernels [--out FILE]`: measure the kernel table on this GPU."""

from __future__ import annotations

import argparse
from pathlib import Path

from kernels.table import HERE, measure

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure the kernel table on this GPU.")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "local.json")
    measure(parser.parse_args().out)
