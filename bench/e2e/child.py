"""One job in a process of its own: the job goes in and its result comes out as JSON.

Engines share nothing with each other that way. The process stays in the caller's group, so whoever
ends that ends the engines, too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TAIL = 1500


def run(
    arguments: Sequence[str],
    job: Mapping[str, Any],
    out: Path,
    limit_s: float | None,
    environment: Mapping[str, str],
) -> dict[str, Any]:
    """What this interpreter, given `arguments`, wrote to `out`, or `error`: its last words.

    {job} and {out} in the arguments become paths: OUT.job.json holds `job`, OUT.log what was said.
    `environment` comes on top of this process's own.
    """
    given = out.with_suffix(".job.json")
    given.write_text(json.dumps(job))
    out.unlink(missing_ok=True)
    paths = {"{job}": str(given), "{out}": str(out)}
    command = [sys.executable, *(paths.get(word, word) for word in arguments)]
    env = {**os.environ, **environment}
    with out.with_suffix(".log").open("w+") as log:
        try:
            subprocess.run(command, env=env, stdout=log, stderr=log, timeout=limit_s, check=True)
            found: dict[str, Any] = json.loads(out.read_text())
        except (subprocess.SubprocessError, OSError) as error:
            log.seek(0)
            return {"error": f"{type(error).__name__}: {log.read()[-TAIL:]}"}
    return found
