#!/usr/bin/env python3
"""Stands in for runc where the lab itself lacks CAP_SYS_RESOURCE.

On `create` and `run` it keeps a copy of what was asked for (/lab/asked/CONTAINER.json), lowers each
rlimit to the current hard limit, takes the missing capability out, binds what /lab/mounts.json says
(`thin_image.py`), then becomes runc. On `exec` it does the first two to the process file.
"""

import json
import os
import resource
import sys
from pathlib import Path

MISSING = "CAP_SYS_RESOURCE"
RUNC = "/usr/sbin/runc"


def soften(process: dict) -> None:
    for limit in process.get("rlimits") or []:
        number = getattr(resource, limit["type"])
        hard = resource.getrlimit(number)[1]
        if hard != resource.RLIM_INFINITY:
            limit["hard"], limit["soft"] = min(limit["hard"], hard), min(limit["soft"], hard)
    for names in (process.get("capabilities") or {}).values():
        if MISSING in names:
            names.remove(MISSING)


def extra_mounts() -> list[dict]:
    """What /lab/mounts.json binds into every container: targets by source."""
    file = Path("/lab/mounts.json")
    pairs = json.loads(file.read_text()) if file.exists() else {}
    return [
        {"destination": target, "source": source, "type": "bind", "options": ["rbind", "ro"]}
        for source, target in pairs.items()
    ]


def option(*names: str) -> str:
    return next((sys.argv[sys.argv.index(n) + 1] for n in names if n in sys.argv), "")


def main() -> None:
    if "create" in sys.argv or "run" in sys.argv:
        bundle = Path(option("--bundle", "-b") or ".")
        config = json.loads((bundle / "config.json").read_text())
        asked = Path("/lab/asked")
        asked.mkdir(parents=True, exist_ok=True)
        (asked / f"{sys.argv[-1]}.json").write_text(json.dumps(config))
        soften(config["process"])
        config["mounts"] += extra_mounts()
        (bundle / "config.json").write_text(json.dumps(config))
    elif "exec" in sys.argv and (path := option("--process", "-p")):
        process = json.loads(Path(path).read_text())
        soften(process)
        Path(path).write_text(json.dumps(process))
    os.execv(RUNC, [RUNC, *sys.argv[1:]])


if __name__ == "__main__":
    main()
