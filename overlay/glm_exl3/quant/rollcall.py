"""The roll call of a launch over several nodes, before the ranks form a process group.

A node without this plugin, or whose process died, never joins; vLLM's own rendezvous then waits in
silence. The roll call uses the same address and a store of its own: every rank writes its digest
and reads all others', so a missing rank is named after GLM_EXL3_JOIN_TIMEOUT_S and a different one
at once. The store stays open: torch's rendezvous behind it shares the port inside the head's
process.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from glm_exl3 import envs
from glm_exl3.format.errors import GlmExl3Error
from glm_exl3.log import logger
from glm_exl3.quant import startup
from glm_exl3.quant.startup import Digest

_log = logger(__name__)
_stores: list[Any] = []
_POLL_S = 0.2


@dataclass(frozen=True)
class Meeting:
    """Where ranks meet: the head's address and port, this rank, how many there are."""

    address: str
    port: int
    rank: int
    ranks: int


def call(meeting: Meeting) -> None:
    """Wait for every rank and compare digests. Raises GlmExl3Error naming who is missing or
    differs."""
    digest = startup.digest()
    if digest is None or meeting.ranks == 1:
        return
    timeout_s = envs.JOIN_TIMEOUT_S.read()
    deadline = time.monotonic() + timeout_s
    store = _open(meeting, timeout_s)
    _stores.append(store)
    store.set(_key(meeting.rank), json.dumps(digest.entries))
    digests = _collect(store, meeting, deadline, timeout_s)
    startup.check_equal(digests)
    _log.info("all %d ranks answered the roll call", meeting.ranks)


def _key(rank: int) -> str:
    return f"glm_exl3/digest/{rank}"


def _open(meeting: Meeting, timeout_s: float) -> Any:
    from torch.distributed import TCPStore

    try:
        return TCPStore(
            meeting.address,
            meeting.port,
            meeting.ranks,
            is_master=meeting.rank == 0,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        raise GlmExl3Error(
            code="ranks",
            seen=f"rank {meeting.rank} cannot reach the head at {meeting.address}:{meeting.port} "
            f"within {timeout_s:g} s: {error}",
            why="all ranks must run for the model to be whole",
            fix="look at the head's log; check address, port and firewall",
        ) from error


def _collect(store: Any, meeting: Meeting, deadline: float, timeout_s: float) -> list[Digest]:
    """Digests of all ranks in order, as soon as the last one has written its own."""
    missing = set(range(meeting.ranks))
    while missing:
        missing = {rank for rank in missing if not store.check([_key(rank)])}
        if missing and time.monotonic() > deadline:
            names = ", ".join(str(rank) for rank in sorted(missing))
            raise GlmExl3Error(
                code="ranks",
                seen=f"rank {names} of {meeting.ranks} did not answer within {timeout_s:g} s",
                why="a rank without this plugin, or one that died, cannot serve its share",
                fix="look at the log of that rank; every node needs the same image and settings",
            )
        if missing:
            time.sleep(_POLL_S)
    found = [json.loads(store.get(_key(rank))) for rank in range(meeting.ranks)]
    return [Digest(tuple((name, value) for name, value in entries)) for entries in found]
