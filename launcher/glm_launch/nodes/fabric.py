"""Choose the network device, the RDMA device and the GID of every node from facts, and say why.

Pure. What must stay true: nothing is guessed. A device is chosen because it holds the node's fabric
address, an RDMA port because its GID table holds a RoCE v2 entry of that very address. A wrong pick
does not fail: it hangs after minutes, or runs over sockets at a fraction of the speed. The GID
index is not passed on unless it was forced, since indexes move while a machine runs; NCCL finds the
entry by type and address.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from glm_launch.errors import Finding
from glm_launch.nodes.facts import Gid, Hca, Nic, NodeFacts

ROCE = "RoCE v2"
JUMBO = 9000
PING_HEADERS = 28


@dataclass(frozen=True)
class Endpoint:
    """A node as the settings name it; `nic` and `hca` override what would be chosen."""

    address: str
    facts: NodeFacts
    nic: str = ""
    hca: str = ""
    gid_index: int | None = None


@dataclass(frozen=True)
class Choice:
    """What one node uses; no `hcas` means sockets. `why` explains each part."""

    nic: str
    hcas: tuple[str, ...]
    mtu: int
    why: tuple[str, ...]
    gid_index: int | None = None

    def environment(self, address: str) -> dict[str, str]:
        """The variables of this node's rank."""
        env = {
            "VLLM_HOST_IP": address,
            "GLOO_SOCKET_IFNAME": self.nic,
            "NCCL_SOCKET_IFNAME": f"={self.nic}",
        }
        if self.hcas:
            env["NCCL_IB_HCA"] = "=" + ",".join(self.hcas)
            if self.gid_index is not None:
                env["NCCL_IB_GID_INDEX"] = str(self.gid_index)
        return env


def choose(
    endpoints: Sequence[Endpoint], *, require_rdma: bool = False
) -> tuple[list[Choice], list[Finding]]:
    """One choice per endpoint (an empty one where none was possible), and everything wrong."""
    choices, findings = [], []
    for endpoint in endpoints:
        choice, found = _choose_one(endpoint)
        choices.append(choice)
        findings += found
    if len(endpoints) > 1 and all(choice.nic for choice in choices):
        findings += _subnets(endpoints, choices)
        findings += _mtus(endpoints, choices)
        findings += _transports(endpoints, choices, require_rdma)
    return choices, findings


def _choose_one(endpoint: Endpoint) -> tuple[Choice, list[Finding]]:
    facts, address = endpoint.facts, endpoint.address
    nic = facts.nic_of(address)
    if nic is None:
        return Choice("", (), 0, ()), [_not_here(endpoint)]
    findings = _nic_findings(endpoint, nic)
    why = [f"{nic.name}: holds {address}, MTU {nic.mtu}"]
    ports = [hca for hca in facts.hcas if usable_gid(hca, address)]
    wanted = [hca for hca in facts.hcas if endpoint.hca in (hca.name, f"{hca.name}:{hca.port}")]
    if endpoint.hca:
        findings += _override_findings(endpoint, wanted)
        ports = [hca for hca in wanted if usable_gid(hca, address)]
    elif facts.hcas and not ports:
        findings.append(_no_gid(endpoint, nic))
    active = [hca for hca in ports if hca.state == "ACTIVE"]
    findings += [_inactive(endpoint, hca) for hca in ports if hca.state != "ACTIVE"]
    for hca in active:
        gid = usable_gid(hca, address)
        assert gid is not None
        why.append(f"{hca.name}:{hca.port}: GID {gid.index} is {ROCE} of {address} on {gid.netdev}")
    if not facts.hcas:
        why.append("no RDMA device: NCCL uses sockets")
    names = tuple(f"{hca.name}:{hca.port}" for hca in active)
    return Choice(nic.name, names, nic.mtu, tuple(why), endpoint.gid_index), findings


def usable_gid(hca: Hca, address: str) -> Gid | None:
    """The RoCE v2 entry of exactly this address; index and order mean nothing."""
    wanted = str(ipaddress.ip_address(address))
    entries = (gid for gid in hca.gids if gid.type == ROCE and gid.address == wanted)
    return next(entries, None)


def _nic_findings(endpoint: Endpoint, nic: Nic) -> list[Finding]:
    where = endpoint.facts.host
    found = []
    if endpoint.nic and endpoint.nic != nic.name:
        found.append(
            Finding(
                "nic-without-address",
                f"{where}: {endpoint.nic} was asked for, but {endpoint.address} is on {nic.name}",
                "ranks would look for each other on a device that does not hold their address",
                f"leave the override empty, or give {endpoint.nic} that address",
            )
        )
    if not nic.up or not nic.carrier:
        found.append(
            Finding(
                "link-down",
                f"{where}: {nic.name} ({endpoint.address}) has no link",
                "the ranks cannot reach each other",
                f"check the cable; ip link set {nic.name} up",
            )
        )
    return found


def _not_here(endpoint: Endpoint) -> Finding:
    held = [
        f"{nic.name} {', '.join(nic.addresses)}" for nic in endpoint.facts.nics if nic.addresses
    ]
    return Finding(
        "address-not-here",
        f"{endpoint.facts.host} does not hold {endpoint.address}; it holds: {'; '.join(held)}",
        "ranks find each other by that address",
        "correct HEAD_IP or WORKER_IP, or assign the address to the fabric device",
    )


def _override_findings(endpoint: Endpoint, wanted: Sequence[Hca]) -> list[Finding]:
    where, names = endpoint.facts.host, [hca.name for hca in endpoint.facts.hcas]
    if not wanted:
        return [
            Finding(
                "no-such-hca",
                f"{where}: {endpoint.hca} was asked for; it has {', '.join(names) or 'none'}",
                "NCCL would fall back to sockets without an error",
                "leave the override empty, or name one of these",
            )
        ]
    if any(usable_gid(hca, endpoint.address) for hca in wanted):
        return []
    return [
        Finding(
            "hca-without-gid",
            f"{where}: {endpoint.hca} has no {ROCE} GID of {endpoint.address}\n{gid_table(wanted)}",
            "its port would time out after about a minute",
            "leave the override empty, or give its network device the address",
        )
    ]


def _no_gid(endpoint: Endpoint, nic: Nic) -> Finding:
    return Finding(
        "no-gid",
        f"{endpoint.facts.host}: no RDMA port has a {ROCE} GID of {endpoint.address} ({nic.name})\n"
        f"{gid_table(endpoint.facts.hcas)}",
        "without that entry a rank dies about 60 s after it joined",
        f"check that {nic.name} belongs to an RDMA device (rdma link) and holds the address",
    )


def _inactive(endpoint: Endpoint, hca: Hca) -> Finding:
    return Finding(
        "hca-inactive",
        f"{endpoint.facts.host}: {hca.name} port {hca.port} is {hca.state or 'in no known state'}",
        "it carries no traffic",
        "check the cable and `rdma link`",
    )


def gid_table(hcas: Sequence[Hca]) -> str:
    """The GID tables as lines for people."""
    lines = [
        f"  {hca.name}:{hca.port} index {gid.index} {gid.type or '?'} {gid.address} {gid.netdev}"
        for hca in hcas
        for gid in hca.gids
    ]
    return "\n".join(lines) or "  (no GIDs)"


def _subnets(endpoints: Sequence[Endpoint], choices: Sequence[Choice]) -> list[Finding]:
    networks = []
    for endpoint in endpoints:
        nic = endpoint.facts.nic_of(endpoint.address)
        entry = nic.interface(endpoint.address) if nic else None
        networks.append(str(entry.network) if entry else "?")
    if len(set(networks)) == 1:
        return []
    return [
        Finding(
            "other-subnet",
            "the fabric addresses lie in different networks: "
            + ", ".join(f"{e.facts.host} {n}" for e, n in zip(endpoints, networks, strict=True)),
            "traffic between the ranks would leave the direct link",
            "give every node an address of one network on the fabric device",
        )
    ]


def _mtus(endpoints: Sequence[Endpoint], choices: Sequence[Choice]) -> list[Finding]:
    if len({choice.mtu for choice in choices}) == 1:
        return []
    said = ", ".join(
        f"{endpoint.facts.host} {choice.nic} {choice.mtu}"
        for endpoint, choice in zip(endpoints, choices, strict=True)
    )
    return [
        Finding(
            "mtu-differs",
            f"the MTUs differ: {said}",
            "large packets are lost and a collective hangs",
            f"ip link set DEVICE mtu {max(choice.mtu for choice in choices)} on every node",
        )
    ]


def _transports(
    endpoints: Sequence[Endpoint], choices: Sequence[Choice], require_rdma: bool
) -> list[Finding]:
    without = [
        e.facts.host for e, choice in zip(endpoints, choices, strict=True) if not choice.hcas
    ]
    if not without or not (require_rdma or len(without) < len(endpoints)):
        return []
    why = (
        "REQUIRE_RDMA=1 was asked for"
        if len(without) == len(endpoints)
        else "ranks that use RDMA cannot talk to ranks that do not"
    )
    return [
        Finding(
            "no-rdma",
            f"no usable RDMA port on {', '.join(without)}",
            why,
            "see the GID tables above, or set REQUIRE_RDMA=0 on a network without RDMA",
        )
    ]


def ping_size(mtu: int) -> int:
    """Payload of an IPv4 ping that fills one packet of this MTU."""
    return mtu - PING_HEADERS
