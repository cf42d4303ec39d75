"""Gather the facts of all nodes at once by piping the probe to each; changes nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from glm_launch.errors import Finding
from glm_launch.nodes import facts, ssh
from glm_launch.nodes.facts import NodeFacts
from glm_launch.nodes.probes import facts as program
from glm_launch.nodes.ssh import Shell

PROBE_S = 60.0


def look(
    shell: Shell, paths: Sequence[str] = (), images: Sequence[str] = ()
) -> NodeFacts | Finding:
    """The facts of one node, or why there are none."""
    request = json.dumps({"paths": list(paths), "images": list(images)})
    script = Path(program.__file__).read_text()
    done = shell.run(["python3", "-", request], stdin=script, timeout_s=PROBE_S)
    if done.code in (ssh.SSH_FAILED, ssh.TIMED_OUT):
        return ssh.classify(done, shell.name)
    try:
        return facts.read(json.loads(done.out))
    except ValueError:
        said = done.last_words
        return Finding(
            "no-facts",
            f"{shell.name}: the probe did not run: {said}",
            "nothing is known about that node",
            f"on {shell.name}: python3 --version (3.8 or newer is needed)",
        )


def look_all(
    shells: Sequence[Shell], paths: Sequence[str] = (), images: Sequence[str] = ()
) -> tuple[list[NodeFacts], list[Finding]]:
    """Facts of every node that answered, and a finding for every other."""
    with ThreadPoolExecutor(max(1, len(shells))) as pool:
        seen = list(pool.map(lambda shell: look(shell, paths, images), shells))
    return (
        [one for one in seen if isinstance(one, NodeFacts)],
        [one for one in seen if isinstance(one, Finding)],
    )
