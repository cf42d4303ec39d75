"""From settings, facts and mounted models to the plan over nodes, and what speaks against it. Pure.

The number of ranks and the arguments come from the same `plan.build` that local ranks use; this
adds the container of each node: image, mounts, GPUs, RDMA, cores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from glm_launch import kv_view
from glm_launch import plan as local_plan
from glm_launch.errors import Finding
from glm_launch.facts import Facts
from glm_launch.nodes import memory, presets
from glm_launch.nodes.fabric import Choice
from glm_launch.nodes.facts import NodeFacts
from glm_launch.nodes.manifest import Manifest
from glm_launch.nodes.memory import GIB, Reserve
from glm_launch.nodes.models import weight_bytes
from glm_launch.nodes.plan import Mounted, Place, over_nodes
from glm_launch.nodes.presets import Hardware
from glm_launch.nodes.ray_cluster import Ray
from glm_launch.nodes.sites import Survey, owner_name
from glm_launch.plan import Box, LaunchPlan, RankPlan
from glm_launch.settings import Settings

NCCL_INSIDE = "/opt/host-nccl/libnccl.so.2"
CPU_RESERVE = Reserve(workspace=0, context=0, head_extra=0, host=0, floor=0)
Mounts = Mapping[str, tuple[tuple[str, str], ...]]


def plan(
    settings: Settings,
    looked: Survey,
    choices: Sequence[Choice],
    mounted: Sequence[Mounted],
    mounts: Mounts,
    image: str,
) -> LaunchPlan:
    """One container per node; `mounts` by address, the head's under the empty name."""
    ranks = settings.tensor_parallel
    here = settings.model_copy(update={"RANKS": ranks})
    gpus = ranks if settings.DEVICE == "cuda" else 0
    cores = tuple(range(looked.facts[0].cores or 1))
    template = local_plan.build(here, Facts(cores=cores, gpus=gpus, engine=("vllm",)))
    places = [
        Place(name, site.address, choice, settings.GPUS_PER_NODE)
        for name, (site, _), choice in zip(looked.names(), looked.known, choices, strict=True)
    ]
    drafter = mounted[1] if len(mounted) > 1 else None
    made = over_nodes(
        template, places, mounted[0], drafter, watch_port=settings.WATCH_PORT,
        preset=settings.PRESET, ray=Ray.of(settings),
    )  # fmt: skip
    boxes = []
    for rank, (site, facts), choice in zip(made.ranks, looked.known, choices, strict=True):
        mine = mounts[site.address if rank.rank else ""]
        boxes.append(_boxed(settings, rank, facts, choice, site.ssh, mine, image))
    unverified = () if all(one.digest for one in mounted) else (
        "the weights are not verified yet: their digests and folders are filled in by start",
    )  # fmt: skip
    return replace(made, ranks=tuple(boxes), warnings=unverified)


def _boxed(
    settings: Settings, rank: RankPlan, facts: NodeFacts, choice: Choice, ssh: str,
    mounts: tuple[tuple[str, str], ...], image: str,
) -> RankPlan:  # fmt: skip
    env = dict(rank.env)
    if settings.DEVICE == "cpu":
        env |= cpu_environment(settings, rank.rank, facts.cores or 1)
    if settings.USE_HOST_NCCL and facts.nccl:
        mounts = (*mounts, (facts.nccl, NCCL_INSIDE))
        env |= {"LD_PRELOAD": NCCL_INSIDE, "VLLM_NCCL_SO_PATH": NCCL_INSIDE}
    box = Box(
        image=image, mounts=mounts, gpus=gpu_request(settings, facts), rdma=bool(choice.hcas),
        owner=owner_name(),
    )  # fmt: skip
    return replace(rank, env=tuple(sorted(env.items())), ssh=ssh, box=box)


def cpu_environment(settings: Settings, node: int, cores: int) -> dict[str, str]:
    """Cores of the ranks of one node: even shares, unless CPU_THREADS says how many each gets.

    Nodes start at different cores, so that ranks of one machine's nodes do not share them.
    """
    here = settings.GPUS_PER_NODE
    share = min(settings.CPU_THREADS or max(1, cores // here), cores)
    sets = []
    for local in range(here):
        first = (node * here + local) * share
        sets.append(",".join(map(str, sorted({(first + i) % cores for i in range(share)}))))
    return {"OMP_NUM_THREADS": str(share), "VLLM_CPU_OMP_THREADS_BIND": "|".join(sets)}


def gpu_request(settings: Settings, facts: NodeFacts) -> str:
    """What docker's --gpus gets: all of them, or the first ones."""
    if settings.DEVICE == "cpu":
        return ""
    if len(facts.gpus) <= settings.GPUS_PER_NODE:
        return "all"
    return f'"device={",".join(str(gpu.index) for gpu in facts.gpus[: settings.GPUS_PER_NODE])}"'


def hardware_of(settings: Settings) -> Hardware | None:
    """What the preset says about the nodes."""
    name = presets.preset(settings.PRESET).hardware if settings.PRESET else None
    return presets.hardware(name) if name else None


def reserve_of(settings: Settings) -> Reserve:
    if settings.DEVICE == "cpu":
        return CPU_RESERVE
    kind = hardware_of(settings)
    return kind.reserve if kind else Reserve()


def floors(settings: Settings, looked: Survey) -> dict[str, int]:
    """Bytes of available memory below which a load is stopped, by node; 0 for none.

    Cards with memory of their own fail instead of freezing the machine, so they have no floor
    unless MEM_FLOOR_GIB asks for one.
    """
    asked = int(settings.MEM_FLOOR_GIB * GIB)
    reserve = reserve_of(settings)
    found = {}
    for name, facts in zip(looked.names(), looked.facts, strict=True):
        unified = bool(facts.gpus) and facts.gpus[0].unified
        found[name] = asked or (reserve.floor if unified else 0)
    return found


def memory_findings(
    settings: Settings, looked: Survey, known: Sequence[Manifest | None]
) -> list[Finding]:
    """What does not fit; a model whose size is not known yet counts as nothing.

    Unless the settings name the cache's bytes, it is the least that vLLM starts with: one request
    of MAX_MODEL_LEN.
    """
    kv_cache = settings.KV_CACHE_MEMORY_BYTES or kv_view.least_pool(settings, card(looked))
    if settings.DEVICE == "cpu":
        kv_cache = settings.CPU_KV_GIB * GIB
    sizes = [weight_bytes(one) for one in known]
    need = memory.demand(
        sizes[0], sum(sizes[1:]), kv_cache, ranks=settings.tensor_parallel,
        draft_ranks=settings.DFLASH_DRAFT_TP,
    )  # fmt: skip
    reserve = replace(reserve_of(settings))
    if settings.MEM_FLOOR_GIB:
        reserve = replace(reserve, floor=int(settings.MEM_FLOOR_GIB * GIB))
    predictions = []
    for index, facts in enumerate(looked.facts):
        predictions += memory.predict(
            facts, need, reserve, head=index == 0, ranks_here=settings.GPUS_PER_NODE
        )
    return memory.findings(predictions)


def card(looked: Survey) -> kv_view.Card:
    """The first GPU of the first node that has one; where none is known, an SM90."""
    known = [gpu for facts in looked.facts for gpu in facts.gpus[:1] if gpu.capability]
    if not known:
        return kv_view.Card()
    major, _, minor = known[0].capability.partition(".")
    return kv_view.Card(known[0].memory_bytes or 0, (int(major), int(minor or 0)))


def nccl_findings(settings: Settings, looked: Survey) -> list[Finding]:
    """USE_HOST_NCCL needs a library on every node."""
    without = [facts.host for facts in looked.facts if not facts.nccl]
    if not settings.USE_HOST_NCCL or not without:
        return []
    return [
        Finding(
            "no-host-nccl",
            f"USE_HOST_NCCL=1, and {', '.join(without)} has no libnccl.so.2",
            "ranks with different NCCL versions may hang",
            "install libnccl2 there, or leave USE_HOST_NCCL empty",
        )
    ]


def hardware_warnings(settings: Settings, looked: Survey) -> list[Finding]:
    """GPUs that are not those of the preset."""
    kind = hardware_of(settings)
    if kind is None:
        return []
    other = [
        f"{facts.host} {gpu.name} ({gpu.capability})"
        for facts in looked.facts
        for gpu in facts.gpus[:1]
        if gpu.capability and gpu.capability != kind.capability
    ]
    if not other:
        return []
    return [
        Finding(
            "other-hardware",
            f"PRESET={settings.PRESET} is for {kind.name} ({kind.capability}), found: "
            f"{', '.join(other)}",
            "its limits were chosen for other memory",
            "choose the preset of this hardware, or leave PRESET empty",
        )
    ]
