"""What `start` would execute, command by command and node by node, for people to read. Pure.

Commands that only run where something is missing are left out when the facts show that nothing is;
what depends on contents (which weights to copy) is said as it would run for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from glm_launch.nodes import docker_cli, images, supply
from glm_launch.nodes.docker_cli import name_of
from glm_launch.nodes.facts import NodeFacts
from glm_launch.nodes.sites import Site, Survey
from glm_launch.nodes.ssh import Shell
from glm_launch.nodes.supply import Supply
from glm_launch.nodes.weights import rsync_argv
from glm_launch.plan import LaunchPlan

GENERATION = "GENERATION"


@dataclass(frozen=True)
class Step:
    """One command on one node; `into` is the command on `to` that reads its output."""

    node: str
    title: str
    argv: tuple[str, ...]
    to: str = ""
    into: tuple[str, ...] = ()


def image_steps(wanted: Supply, looked: Survey, docker: int) -> list[Step]:
    """Pull or build on the head, the self-check, and what is sent to the others."""
    head = looked.facts[0]
    name = supply.local_name(wanted.name)
    have = head.image(name)
    steps = []
    if have is None or wanted.build:
        steps += [
            Step(head.host, "bring the image", tuple(argv))
            for argv in supply.commands(wanted, head.arch)
        ]
    if not wanted.skip_check:
        steps.append(Step(head.host, "check the image", tuple(supply.check_argv(wanted))))
    if wanted.skip_pull:
        return steps
    arch = supply.ARCHITECTURES.get(head.arch, head.arch)
    for site, facts in looked.known[1:]:
        there = facts.image(name)
        if have and there and have.identity == there.identity and not wanted.build:
            continue
        save = images.save_argv(name, docker, f"linux/{arch}")
        load = site.shell.argv(["docker", "load"])
        steps.append(Step(head.host, "send the image", tuple(save), facts.host, tuple(load)))
    return steps


def weight_steps(roots: Sequence[tuple[Path, str]], site: Site, facts: NodeFacts) -> list[Step]:
    """The copies to one worker: (root here, root there) of each model."""
    return [
        Step(facts.host, "copy weights that differ from their manifest",
             tuple(rsync_argv(here, site.shell, there, site.address)))
        for here, there in roots
    ]  # fmt: skip


def rank_steps(plan: LaunchPlan, shells: Sequence[Shell], keys: Path) -> list[Step]:
    """The containers, in the order in which they are started."""
    steps = []
    for number in plan.start_order:
        rank = plan.ranks[number]
        assert rank.box is not None
        key = str(keys / f"{name_of(number)}.key") if rank.secret_env else ""
        argv = docker_cli.run_argv(
            rank.box, rank.rank, GENERATION, rank.argv, rank.env,
            grace_s=plan.stop_grace_s, key_file=key,
        )  # fmt: skip
        steps.append(Step(rank.node, f"start {rank.role} rank {number}",
                          tuple(shells[number].argv(argv))))  # fmt: skip
    return steps
