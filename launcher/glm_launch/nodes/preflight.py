"""Everything that would make a launch over nodes fail, from facts, all at once, each with its fix.

Pure: facts and needs in, a `Report` out. `findings` refuse the launch, `warnings` do not. What must
stay true: nothing here changes a node or asks it anything; a check that cannot know says nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from glm_launch.errors import Finding
from glm_launch.nodes.facts import Container, Gpu, Image, NodeFacts
from glm_launch.nodes.memory import gib

PROJECT_LABEL = "io.glm-exl3.project"
GENERATION_LABEL = "io.glm-exl3.generation"
OWNER_LABEL = "io.glm-exl3.owner"
MIN_DOCKER = 24
MIN_DRIVER = 580
MIN_PYTHON = (3, 8)
CAPABILITIES = ("8.0", "9.0", "12.0", "12.1")
DISK_MARGIN = 1.1
MIN_INODES = 1000
HELD = frozenset({"port-in-use", "too-little-memory", "gpu-in-use"})


@dataclass(frozen=True)
class Port:
    """A port that a rank will bind."""

    key: str
    address: str
    number: int


@dataclass(frozen=True)
class Needs:
    """What the plan wants of one node; `writes` maps a probed path to bytes still to come."""

    gpus: int = 0
    ports: tuple[Port, ...] = ()
    writes: tuple[tuple[str, int], ...] = ()
    image: str = ""
    owner: str = ""
    receives: bool = False


@dataclass(frozen=True)
class Report:
    """Findings refuse, warnings are said."""

    findings: tuple[Finding, ...] = ()
    warnings: tuple[Finding, ...] = field(default=())


def check(nodes: Sequence[tuple[NodeFacts, Needs]]) -> Report:
    """Every node by itself, then all against each other."""
    findings: list[Finding] = []
    warnings: list[Finding] = []
    for facts, needs in nodes:
        findings += [
            *check_programs(facts, needs), *check_docker(facts, needs), *check_gpus(facts, needs),
            *check_ports(facts, needs), *check_disk(facts, needs), *check_folders(facts, needs),
            *check_containers(facts, needs),
        ]  # fmt: skip
        warnings += foreign_containers(facts, needs)
    everyone = [facts for facts, _ in nodes]
    findings += check_equal("arch", "architectures", everyone, "one image cannot serve both")
    findings += check_images(nodes)
    warnings += check_drivers(everyone)
    return Report(tuple(findings), tuple(warnings))


def check_programs(facts: NodeFacts, needs: Needs) -> list[Finding]:
    found = []
    version = tuple(int(part) for part in facts.python.split(".")[:2] if part.isdigit())
    if version and version < MIN_PYTHON:
        found.append(
            Finding(
                "old-python",
                f"{facts.host}: python3 is {facts.python}",
                "the probes need 3.8",
                "install a newer python3",
            )
        )
    if needs.receives and not facts.rsync:
        found.append(
            Finding(
                "no-rsync",
                f"{facts.host}: rsync is not installed",
                "weights are copied with it",
                f"on {facts.host}: sudo apt install rsync; or SKIP_SYNC=1 with the weights there",
            )
        )
    return found


def check_docker(facts: NodeFacts, needs: Needs) -> list[Finding]:
    docker, host = facts.docker, facts.host
    if not docker.present:
        seen, fix = "docker is not installed", "install Docker Engine 24 or newer"
    elif "permission denied" in docker.error.lower():
        seen = f"{facts.user or 'this user'} may not use docker"
        fix = f"on {host}: sudo usermod -aG docker {facts.user or 'USER'}, then log in again"
    elif docker.error:
        seen = f"the docker daemon does not answer ({docker.error})"
        fix = f"on {host}: sudo systemctl start docker; journalctl -u docker"
    elif (major := _major(docker.version)) is not None and major < MIN_DOCKER:
        seen, fix = f"docker is {docker.version}", f"upgrade to {MIN_DOCKER} or newer"
    elif needs.gpus and not (docker.toolkit or "nvidia" in docker.runtimes or docker.cdi):
        seen = "docker has no NVIDIA runtime and no CDI devices"
        fix = "install nvidia-container-toolkit, then: sudo nvidia-ctk runtime configure"
    else:
        return []
    return [Finding("docker-unusable", f"{host}: {seen}", "every node runs one container", fix)]


def check_gpus(facts: NodeFacts, needs: Needs) -> list[Finding]:
    if not needs.gpus:
        return []
    if len(facts.gpus) < needs.gpus:
        return [
            Finding(
                "too-few-gpus",
                f"{facts.host}: {len(facts.gpus)} GPU(s) visible, {needs.gpus} needed",
                "every rank needs a GPU of its own",
                "nvidia-smi there; choose a preset with fewer ranks per node",
            )
        ]
    used = facts.gpus[: needs.gpus]
    return [
        finding
        for gpu in used
        for finding in (*_gpu_findings(facts.host, gpu), *_gpu_users(facts.host, gpu))
    ]


def _gpu_findings(host: str, gpu: Gpu) -> list[Finding]:
    found = []
    major = _major(gpu.driver)
    if major is not None and major < MIN_DRIVER:
        found.append(
            Finding(
                "old-driver",
                f"{host}: GPU {gpu.index} has driver {gpu.driver}",
                f"CUDA 13.0 needs {MIN_DRIVER} or newer",
                "upgrade the NVIDIA driver",
            )
        )
    if gpu.capability and gpu.capability not in CAPABILITIES:
        found.append(
            Finding(
                "unknown-gpu",
                f"{host}: {gpu.name} has compute capability {gpu.capability}",
                f"kernels are built for {', '.join(CAPABILITIES)}",
                "use one of those, or build the image for this one",
            )
        )
    return found


def _gpu_users(host: str, gpu: Gpu) -> list[Finding]:
    users = ", ".join(f"{process.name} (pid {process.pid})" for process in gpu.processes)
    if not users:
        return []
    return [
        Finding(
            "gpu-in-use",
            f"{host}: GPU {gpu.index} is used by {users}",
            "its memory would be missing while loading",
            "stop that process; the launcher ends only what carries its label",
        )
    ]


def check_ports(facts: NodeFacts, needs: Needs) -> list[Finding]:
    taken = {(entry.address, entry.port) for entry in facts.listening}
    found = []
    for port in needs.ports:
        holders = [where for where, number in taken if number == port.number]
        if any(_collides(port.address, where) for where in holders):
            found.append(
                Finding(
                    "port-in-use",
                    f"{facts.host}: {port.key}={port.number} is taken at {', '.join(holders)}",
                    f"a rank binds it at {port.address}",
                    f"on {facts.host}: ss -ltnp 'sport = :{port.number}'; "
                    f"or set {port.key}={_free(port.number, taken)}",
                )
            )
    return found


def _collides(wanted: str, taken: str) -> bool:
    everything = ("*", "0.0.0.0", "::")  # noqa: S104 (compared, not bound)
    return wanted == taken or wanted in everything or taken in everything


def _free(number: int, taken: set[tuple[str, int]]) -> int:
    used = {port for _, port in taken}
    return next(port for port in range(number + 1, number + 1000) if port not in used)


def check_disk(facts: NodeFacts, needs: Needs) -> list[Finding]:
    """Space per file system: several paths on one share it."""
    wanted: dict[int, int] = {}
    for path, size in needs.writes:
        entry = facts.path(path)
        if entry is not None:
            wanted[entry.device] = wanted.get(entry.device, 0) + size
    found = []
    for device, size in wanted.items():
        entry = next(path for path in facts.paths if path.device == device)
        need = int(size * DISK_MARGIN)
        if size and entry.free_bytes < need:
            found.append(
                Finding(
                    "disk-full",
                    f"{facts.host}: {entry.path} has {gib(entry.free_bytes)} free, "
                    f"{gib(need)} are still to come",
                    "a copy that runs out of space has to be done again",
                    f"on {facts.host}: du -xh -d2 {entry.path} | sort -h; docker system df",
                )
            )
        if size and entry.free_inodes is not None and entry.free_inodes < MIN_INODES:
            found.append(
                Finding(
                    "no-inodes",
                    f"{facts.host}: {entry.path} has {entry.free_inodes} inodes left",
                    "every file needs one",
                    "remove small files there",
                )
            )
    return found


def check_folders(facts: NodeFacts, needs: Needs) -> list[Finding]:
    found = []
    for path in [path for path, size in needs.writes if size]:
        entry = facts.path(path)
        if entry is None or (entry.writable and not entry.foreign):
            continue
        where = entry.foreign[0] if entry.foreign else entry.path
        owner = "a read-only file system" if entry.read_only else "another user (often root)"
        found.append(
            Finding(
                "not-writable",
                f"{facts.host}: {where} belongs to {owner}",
                "weights and caches are written there",
                f"on {facts.host}: sudo chown -R {facts.user or '$USER'} {entry.full}",
            )
        )
    return found


def check_containers(facts: NodeFacts, needs: Needs) -> list[Finding]:
    """Running containers of ours that somebody else started; stopped ones are cleaned up."""
    return [
        Finding(
            "other-owner",
            f"{facts.host}: container {one.name} of {one.labels.get(OWNER_LABEL)} runs "
            f"(launch {one.labels.get(GENERATION_LABEL, '?')}, since {one.created[:19]})",
            "two clusters on one node would share its memory and ports",
            f"ask its owner, or on {facts.host}: docker rm -f {one.name}",
        )
        for one in _running(facts)
        if PROJECT_LABEL in one.labels and one.labels.get(OWNER_LABEL) != needs.owner
    ]


def unknown_containers(nodes: Sequence[NodeFacts], owner: str, generation: str) -> list[Finding]:
    """Running containers of this user that are not of the launch that is known here."""
    return [
        Finding(
            "unknown-container",
            f"{facts.host}: container {one.name} is yours and runs, and its launch "
            f"{one.labels.get(GENERATION_LABEL, '?')} is not the one known here",
            "its name, ports and memory are taken",
            f"stop it from where it was started, or on {facts.host}: docker rm -f {one.name}",
        )
        for facts in nodes
        for one in _running(facts)
        if one.labels.get(OWNER_LABEL) == owner and one.labels.get(GENERATION_LABEL) != generation
    ]


def foreign_containers(facts: NodeFacts, needs: Needs) -> list[Finding]:
    """Containers of others that hold GPUs: said, not touched."""
    return [
        Finding(
            "foreign-container",
            f"{facts.host}: container {one.name} ({one.image}) has GPUs",
            "it may hold memory that this launch counts on",
            f"on {facts.host}: docker stop {one.name}, if it is not needed",
        )
        for one in _running(facts)
        if PROJECT_LABEL not in one.labels and one.gpus and needs.gpus
    ]


def _running(facts: NodeFacts) -> Iterable[Container]:
    return (one for one in facts.docker.containers if one.state in ("running", "paused"))


def check_equal(name: str, plural: str, facts: Sequence[NodeFacts], why: str) -> list[Finding]:
    """One attribute that all nodes must share, the odd one out marked."""
    values = [str(getattr(one, name)) for one in facts]
    if len(set(values)) <= 1:
        return []
    usual = max(values, key=values.count)
    said = ", ".join(
        f"{one.host} {value}{' (differs)' if value != usual else ''}"
        for one, value in zip(facts, values, strict=True)
    )
    return [Finding(f"{name}-differs", f"the {plural} differ: {said}", why, "use equal nodes")]


def check_images(nodes: Sequence[tuple[NodeFacts, Needs]]) -> list[Finding]:
    """Nodes that have the image have the same one; a missing one is shipped."""
    have: list[tuple[str, Image]] = [
        (facts.host, image) for facts, needs in nodes if (image := facts.image(needs.image))
    ]
    if len({image.identity for _, image in have}) <= 1:
        return []
    first = have[0][1].identity
    names = ("os", "architecture", "plugin", "layers", "configuration")
    odd = []
    for host, image in have[1:]:
        pairs = zip(names, first, image.identity, strict=True)
        if differing := ", ".join(name for name, ours, theirs in pairs if ours != theirs):
            odd.append(f"{host}: {differing}")
    return [
        Finding(
            "image-differs",
            f"{have[0][1].name} is not the same image as on {have[0][0]}: {'; '.join(odd)}",
            "ranks with different code compute different numbers or hang",
            "unset SKIP_PULL so that the image is shipped, or remove it there",
        )
    ]


def check_drivers(facts: Sequence[NodeFacts]) -> list[Finding]:
    drivers = {one.host: one.gpus[0].driver for one in facts if one.gpus}
    if len(set(drivers.values())) <= 1:
        return []
    said = ", ".join(f"{host} {driver}" for host, driver in drivers.items())
    return [
        Finding("driver-differs", f"the drivers differ: {said}", "NCCL is tested with equal ones",
                "upgrade the older one")
    ]  # fmt: skip


def _major(version: str) -> int | None:
    head = version.partition(".")[0]
    return int(head) if head.isdigit() else None
