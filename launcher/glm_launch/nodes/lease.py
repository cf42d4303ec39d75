"""One operator at a time on every node: a lease file with owner and time, renewed while we work.

What must stay true: either all nodes gave the lease or none keeps one; a lease of somebody else
that still runs is never taken; one that ran out only when asked to (`--steal`). After READY the
labels of the containers say whose they are, so the lease is given back.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from glm_launch import procs
from glm_launch.errors import Finding, RefusedError
from glm_launch.nodes import ssh
from glm_launch.nodes.probes import lease as program
from glm_launch.nodes.sites import Site, at_once
from glm_launch.nodes.ssh import Shell
from glm_launch.procs import Identity

PATH = "~/.cache/glm-exl3/lease.json"
FOR_S = 180.0
RENEW_S = 30.0


@contextmanager
def held(
    sites: Sequence[Site], owner: str, verb: str, *, steal: bool = False, path: str = PATH
) -> Iterator[None]:
    """Inside, this command alone may change what runs on the nodes; raises `RefusedError`."""
    me = procs.identify(os.getpid())
    assert me is not None
    request = {
        "path": path, "owner": owner, "token": secrets.token_hex(8), "verb": verb,
        "for_s": FOR_S, "steal": steal, "process": asdict(me),
    }  # fmt: skip
    shells = [site.shell for site in sites]
    stop = threading.Event()

    def renew() -> None:
        while not stop.wait(RENEW_S):
            at_once(lambda shell: _ask(shell, request | {"do": "renew", "steal": True}), shells)

    answers = at_once(lambda shell: _ask(shell, request | {"do": "take"}), shells)
    refused = [found for found in answers if isinstance(found, Finding)]
    keeper = threading.Thread(target=renew, daemon=True)
    try:
        if refused:
            raise RefusedError(*refused)
        keeper.start()
        yield
    finally:
        stop.set()
        if keeper.is_alive():
            keeper.join()
        at_once(lambda shell: _ask(shell, request | {"do": "give"}), shells)


def others(sites: Sequence[Site], owner: str, path: str = PATH) -> list[Finding]:
    """Leases of others that still run on any node; takes none."""
    request = {"do": "look", "path": path, "token": "", "owner": owner, "verb": "", "for_s": 0}
    found = at_once(lambda site: _ask(site.shell, request), sites)
    return [one for one in found if one and one.code == "leased"]


def _ask(shell: Shell, request: dict[str, Any]) -> Finding | None:
    """Nothing when the lease is ours or given back."""
    script = Path(program.__file__).read_text()
    done = shell.run(["python3", "-", json.dumps(request)], stdin=script)
    if done.code in (ssh.SSH_FAILED, ssh.TIMED_OUT):
        return ssh.classify(done, shell.name)
    try:
        answer = json.loads(done.out)
    except ValueError:
        last = done.last_words
        return Finding(
            "no-lease",
            f"{shell.name}: {request['path']} cannot be written: {last}",
            "two operators at once would start two clusters on one node",
            f"on {shell.name}: make ~/.cache/glm-exl3 writable for this user",
        )
    if answer["held"] or request["do"] == "give" or not answer["by"]:
        return None
    if request["do"] == "look" and (answer.get("ended") or _left_behind(answer["by"], request)):
        return None
    first = request["do"] == "take" and not request.get("replace")
    if first and _left_behind(answer["by"], request):
        return _ask(shell, request | {"replace": answer["by"]["token"]})
    return _taken(shell.name, answer)


def _left_behind(by: dict[str, Any], request: dict[str, Any]) -> bool:
    """Whether a lease is of this user and machine, and the command that took it was killed."""
    try:
        gone = not procs.is_alive(Identity(**by["process"]))
    except (KeyError, TypeError):
        return False
    return bool(by.get("owner") == request["owner"] and gone)


def _taken(node: str, answer: dict[str, Any]) -> Finding:
    by = answer["by"]
    times = [time.strftime("%H:%M:%S", time.localtime(float(by[name]))) for name in
             ("since", "until")]  # fmt: skip
    if answer.get("ended"):
        state, fix = f"ran out at {times[1]}", "--steal takes it over, if that command is gone"
    else:
        state, fix = f"runs until {times[1]}", f"wait, or ask {by['owner']}; then start again"
    return Finding(
        "leased",
        f"{node} is being changed by {by['owner']} (`{by['verb']}` since {times[0]}); "
        f"the lease {state}",
        "two operators at once would start two clusters on one node",
        fix,
    )
