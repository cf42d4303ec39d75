"""The nodes of a launch as the settings name them, and what a look at each of them gave.

`sites_of` is pure. `survey` asks every node at once and changes nothing; a node that does not
answer is a finding in its place, so that everything known about the others is still judged.
"""

from __future__ import annotations

import getpass
import os
import platform
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

from glm_launch import procs
from glm_launch.errors import Finding
from glm_launch.nodes import fabric
from glm_launch.nodes.fabric import Choice, Endpoint
from glm_launch.nodes.facts import NodeFacts
from glm_launch.nodes.look import look
from glm_launch.nodes.ssh import LocalShell, Shell, SshShell
from glm_launch.settings import Settings

_A = TypeVar("_A")
_T = TypeVar("_T")
PING_S = 10.0


@dataclass(frozen=True)
class Site:
    """One node: `address` between the nodes, `ssh` is empty for this machine."""

    address: str
    shell: Shell
    ssh: str = ""
    nic: str = ""
    hca: str = ""


def owner_name() -> str:
    """Who starts containers here, as their label says."""
    return f"{getpass.getuser()}@{platform.node()}"


def sites_of(settings: Settings) -> list[Site]:
    """This machine, then the workers in the order of WORKER_IP."""
    head = Site(settings.HEAD_IP, LocalShell(), "", settings.HEAD_CX7_IF, settings.HEAD_CX7_IB)
    found = [head]
    for number, address in enumerate(settings.WORKER_IP):
        name = settings.WORKER_SSH[number] if settings.WORKER_SSH else address
        if settings.WORKER_USER and "@" not in name:
            name = f"{settings.WORKER_USER}@{name}"
        nic = _nth(settings.WORKER_CX7_IF, number)
        hca = _nth(settings.WORKER_CX7_IB, number)
        found.append(Site(address, SshShell(name, name), name, nic, hca))
    return found


def _nth(values: Sequence[str], number: int) -> str:
    if not values:
        return ""
    return values[0] if len(values) == 1 else values[number]


@dataclass(frozen=True)
class Survey:
    """What was seen, one entry per site."""

    sites: tuple[Site, ...]
    seen: tuple[NodeFacts | Finding, ...]

    @property
    def missing(self) -> list[Finding]:
        return [one for one in self.seen if isinstance(one, Finding)]

    @property
    def known(self) -> list[tuple[Site, NodeFacts]]:
        """The sites that answered."""
        pairs = zip(self.sites, self.seen, strict=True)
        return [(site, one) for site, one in pairs if isinstance(one, NodeFacts)]

    @property
    def facts(self) -> list[NodeFacts]:
        return [facts for _, facts in self.known]

    def names(self) -> list[str]:
        """A name per site that answered; `survey` made them different."""
        return [facts.host for facts in self.facts]

    def endpoints(self, gid_index: int) -> list[Endpoint]:
        forced = gid_index if gid_index >= 0 else None
        return [
            Endpoint(site.address, facts, site.nic, site.hca, forced) for site, facts in self.known
        ]

    def choices(self, settings: Settings) -> tuple[list[Choice], list[Finding]]:
        """Devices of every node; a launch on one machine needs none."""
        if len(self.sites) == 1:
            return [Choice("", (), 0, ())], []
        endpoints = self.endpoints(settings.NCCL_IB_GID_INDEX)
        return fabric.choose(endpoints, require_rdma=settings.REQUIRE_RDMA)


def survey(sites: Sequence[Site], paths: Sequence[Sequence[str]], image: str) -> Survey:
    """Look at every node at once; `paths` are those to look at on each.

    Nodes with the same host name get their address behind it, so that messages tell them apart.
    """

    def one(pair: tuple[Site, Sequence[str]]) -> NodeFacts | Finding:
        site, wanted = pair
        return look(site.shell, wanted, [image] if image else [])

    seen = at_once(one, list(zip(sites, paths, strict=True)))
    hosts = [found.host for found in seen if isinstance(found, NodeFacts)]
    named = [
        replace(found, host=f"{found.host} ({site.address})")
        if isinstance(found, NodeFacts) and hosts.count(found.host) > 1
        else found
        for site, found in zip(sites, seen, strict=True)
    ]
    return Survey(tuple(sites), tuple(named))


def at_once(work: Callable[[_A], _T], items: Sequence[_A]) -> list[_T]:
    """`work` on every item in a thread each; results in the order of the items.

    When the wait for them is interrupted, the programs that they run are ended.
    """
    pool = ThreadPoolExecutor(max(1, len(items)))
    try:
        return list(pool.map(work, items))
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        procs.send(procs.children(os.getpid()), signal.SIGTERM)
        raise
    finally:
        pool.shutdown()


def path_mtu(looked: Survey, choices: Sequence[Choice]) -> list[Finding]:
    """A full unfragmented packet between the head and each worker, both ways.

    Says nothing where ping is missing or a device has no address.
    """
    pairs = list(zip(looked.known, choices, strict=True))
    if len(pairs) < 2 or not all(choice.nic for choice in choices):
        return []
    (head, head_facts), head_choice = pairs[0]
    ways = []
    for (site, facts), choice in pairs[1:]:
        ways.append((head.shell, head_facts.host, head_choice, site.address, facts.host))
        ways.append((site.shell, facts.host, choice, head.address, head_facts.host))
    return [found for found in at_once(lambda way: _ping(*way), ways) if found]


def _ping(shell: Shell, here: str, choice: Choice, address: str, there: str) -> Finding | None:
    size = fabric.ping_size(choice.mtu)
    command = ["ping", "-c", "2", "-W", "1", "-M", "do", "-s", str(size), address]
    done = shell.run(command, timeout_s=PING_S)
    if done.code not in (1, 2) or "not permitted" in done.err:
        return None
    return Finding(
        "mtu-path",
        f"{here} cannot reach {there} ({address}) with packets of {choice.mtu} bytes "
        f"over {choice.nic}",
        "large packets are lost and a collective hangs",
        f"on {here}: {' '.join(command)}; set the MTU of both devices and of the switch between",
    )
