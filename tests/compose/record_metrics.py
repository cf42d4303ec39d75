"""Write down which metrics exist: `record_metrics.py URL VERSION FILE`, for a server that runs.

The file holds one `name type` line for each metric, as `test_monitoring` reads it. vLLM shows most
of its metrics only after a request, and those of drafting only with a drafter.
"""

from __future__ import annotations

import sys
import time
import urllib.request
from pathlib import Path


def names(text: str) -> list[str]:
    """`name type` of every sample; a histogram's parts are named one by one."""
    kinds: dict[str, str] = {}
    found: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            kinds[name] = kind
        elif line and not line.startswith("#"):
            name = line.partition("{")[0].partition(" ")[0]
            base = next((n for n in (name, name.rpartition("_")[0]) if n in kinds), "")
            found[name] = kinds.get(base, "untyped")
    return [f"{name} {kind}" for name, kind in sorted(found.items())]


def main(url: str, version: str, file: str) -> None:
    with urllib.request.urlopen(url, timeout=30) as reply:
        lines = names(reply.read().decode())
    head = f"# {version}, recorded {time.strftime('%Y-%m-%d')}"
    Path(file).write_text("\n".join([head, *lines]) + "\n")
    print(f"{len(lines)} metrics of {version} in {file}")


if __name__ == "__main__":
    main(*sys.argv[1:])
