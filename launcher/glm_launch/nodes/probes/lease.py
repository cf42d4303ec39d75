"""Take, renew or give back the right to change what runs on this node; prints JSON.

    python3 - REQUEST < lease.py
    REQUEST: {"do": "take" | "renew" | "give" | "look", "path", "owner", "token", "verb", "for_s",
              "steal", "process", "replace"}
    prints:  {"held": bool, "by": {"owner", "token", "verb", "since", "until", "process"}}

The file at `path` holds who has the right and until when. Every change happens under a lock of the
file beside it, so of two that take at once one gets it. A lease that ran out is only taken over
with `steal`; one whose token is `replace` always, since its owner knows that its process is gone.
Runs on Python 3.8.
"""

from __future__ import annotations

import fcntl
import json
import sys
import time
from pathlib import Path
from typing import Any


def read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def perform(request: dict[str, Any]) -> dict[str, Any]:
    path = Path(request["path"]).expanduser()
    if request["do"] == "look":
        return change(path, request)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return change(path, request)


def change(path: Path, request: dict[str, Any]) -> dict[str, Any]:
    now = time.time()
    before = read(path)
    mine = before.get("token") == request["token"]
    if request["do"] == "give":
        if mine:
            path.unlink()
        return {"held": False, "by": before}
    if request["do"] == "look":
        return {"held": False, "by": before, "ended": float(before.get("until", 0)) < now}
    ended = float(before.get("until", 0)) < now
    gone = bool(before) and before.get("token") == request.get("replace")
    if before and not (mine or gone or (ended and request.get("steal"))):
        return {"held": False, "by": before, "ended": ended}
    entry = {
        "owner": request["owner"], "token": request["token"], "verb": request["verb"],
        "since": before["since"] if mine else now, "until": now + float(request["for_s"]),
        "process": request["process"],
    }  # fmt: skip
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(entry))
    draft.replace(path)
    return {"held": True, "by": entry}


if __name__ == "__main__":
    json.dump(perform(json.loads(sys.argv[1])), sys.stdout)
