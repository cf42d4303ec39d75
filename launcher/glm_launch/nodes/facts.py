"""What is known about one node: the probe's JSON as typed values.

`read` accepts what `probes/facts.py` prints and what `doctor --record` stored; a missing field gets
the value that means "not known", so that records of older probes still load.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

SCHEMA = 1
_T = TypeVar("_T")


@dataclass(frozen=True)
class Memory:
    """Bytes of host memory."""

    total: int = 0
    available: int = 0
    swap_used: int = 0


@dataclass(frozen=True)
class GpuProcess:
    """A process that uses a device."""

    pid: int
    name: str
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Gpu:
    """One device; `memory_bytes` is None where it shares the host's memory."""

    index: int
    name: str
    uuid: str = ""
    memory_bytes: int | None = None
    driver: str = ""
    capability: str = ""
    processes: tuple[GpuProcess, ...] = ()

    @property
    def unified(self) -> bool:
        return self.memory_bytes is None


@dataclass(frozen=True)
class Nic:
    """One network device; `addresses` in the form `10.0.0.1/24`."""

    name: str
    up: bool = False
    carrier: bool = False
    mtu: int = 0
    speed_mbps: int | None = None
    addresses: tuple[str, ...] = ()

    def interface(self, address: str) -> ipaddress.IPv4Interface | ipaddress.IPv6Interface | None:
        """The entry that holds `address`, or None."""
        wanted = ipaddress.ip_address(address)
        entries = (ipaddress.ip_interface(entry) for entry in self.addresses)
        return next((entry for entry in entries if entry.ip == wanted), None)


@dataclass(frozen=True)
class Gid:
    """One entry of an RDMA port's GID table."""

    index: int
    gid: str
    type: str = ""
    netdev: str = ""

    @property
    def address(self) -> str:
        """The IPv4 address that the GID holds, else the GID as an IPv6 address."""
        found = ipaddress.IPv6Address(self.gid)
        return str(found.ipv4_mapped or found)


@dataclass(frozen=True)
class Hca:
    """One port of an RDMA device."""

    name: str
    port: int = 1
    state: str = ""
    rate: str = ""
    gids: tuple[Gid, ...] = ()


@dataclass(frozen=True)
class Image:
    """An image on a node; two are the same when their `identity` is."""

    name: str
    os: str = ""
    arch: str = ""
    layers: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    config: str = ""
    digests: tuple[str, ...] = ()
    bytes: int | None = None

    @property
    def identity(self) -> tuple[str, str, str, tuple[str, ...], str]:
        """Platform, plugin label, configuration and layers: `.Id` differs between engines."""
        return self.os, self.arch, self.labels.get(PLUGIN_LABEL, ""), self.layers, self.config

    @property
    def fingerprint(self) -> str:
        """Short hash of the identity."""
        return hashlib.sha256(repr(self.identity).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Container:
    """A container, running or not."""

    name: str
    image: str = ""
    state: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    created: str = ""
    gpus: bool = False


@dataclass(frozen=True)
class Docker:
    """`error` is empty when the daemon answered."""

    present: bool = False
    error: str = "not looked at"
    version: str = ""
    root: str = ""
    arch: str = ""
    runtimes: tuple[str, ...] = ()
    cdi: tuple[str, ...] = ()
    toolkit: bool = False
    images: tuple[Image, ...] = ()
    containers: tuple[Container, ...] = ()


@dataclass(frozen=True)
class PathFacts:
    """A folder that may not exist yet; space is that of the nearest parent that does."""

    path: str
    full: str = ""
    exists: bool = False
    free_bytes: int = 0
    free_inodes: int | None = None
    device: int = 0
    owner: int = 0
    writable: bool = False
    read_only: bool = False
    foreign: tuple[str, ...] = ()


@dataclass(frozen=True)
class Listener:
    """A listening TCP port; address `*` is every address."""

    address: str
    port: int


@dataclass(frozen=True)
class NodeFacts:
    """Everything the probe saw on one node."""

    schema: int = SCHEMA
    host: str = ""
    arch: str = ""
    system: str = ""
    kernel: str = ""
    python: str = ""
    user: str = ""
    uid: int = 0
    home: str = ""
    cores: int = 0
    rsync: bool = False
    nccl: str = ""
    memory: Memory = Memory()
    gpus: tuple[Gpu, ...] = ()
    nics: tuple[Nic, ...] = ()
    hcas: tuple[Hca, ...] = ()
    docker: Docker = Docker()
    paths: tuple[PathFacts, ...] = ()
    listening: tuple[Listener, ...] = ()

    def nic_of(self, address: str) -> Nic | None:
        """The network device that holds `address`."""
        return next((nic for nic in self.nics if nic.interface(address)), None)

    def path(self, path: str) -> PathFacts | None:
        return next((entry for entry in self.paths if entry.path == path), None)

    def image(self, name: str) -> Image | None:
        return next((image for image in self.docker.images if image.name == name), None)


PLUGIN_LABEL = "io.glm-exl3.plugin"

_NESTED: Mapping[tuple[type, str], type] = {
    (NodeFacts, "memory"): Memory, (NodeFacts, "gpus"): Gpu, (NodeFacts, "nics"): Nic,
    (NodeFacts, "hcas"): Hca, (NodeFacts, "docker"): Docker, (NodeFacts, "paths"): PathFacts,
    (NodeFacts, "listening"): Listener, (Gpu, "processes"): GpuProcess, (Hca, "gids"): Gid,
    (Docker, "images"): Image, (Docker, "containers"): Container,
}  # fmt: skip


def read(value: Mapping[str, Any]) -> NodeFacts:
    """Facts from their JSON; raises ValueError when it is not a record of this schema."""
    if not isinstance(value, Mapping) or value.get("schema") != SCHEMA:
        raise ValueError(f"not facts of schema {SCHEMA}")
    try:
        return _read(NodeFacts, value)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"broken facts: {error}") from error


def read_image(value: Mapping[str, Any]) -> Image:
    """One image from the probe's JSON."""
    return _read(Image, value)


def _read(kind: type[_T], value: Mapping[str, Any]) -> _T:
    known: dict[str, Any] = {}
    for entry in fields(kind):  # type: ignore[arg-type]  # every kind here is a dataclass
        found = value.get(entry.name)
        if found is None:
            continue
        nested = _NESTED.get((kind, entry.name))
        if isinstance(found, list):
            known[entry.name] = tuple(_read(nested, one) if nested else one for one in found)
        else:
            known[entry.name] = _read(nested, found) if nested else found
    return kind(**known)
