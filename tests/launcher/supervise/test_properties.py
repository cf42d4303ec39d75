"""Random faults, checked by the world at every tick: nothing healthy is stopped, no start over old
ranks or a missing node, no more restarts than allowed, nothing against another command.
"""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from world import World

from glm_launch.supervise.troubles import Rules

GENEROUS = Rules(max_restarts=3, window_s=60.0)
FAULTS = (
    "kill-0", "kill-1", "power-1", "plug-1", "plug-0", "ssh-1", "stall", "silent", "compile",
    "traffic", "lock", "broken", "sleep",
)  # fmt: skip


def cause(world: World, fault: str) -> None:
    name, _, number = fault.partition("-")
    node = world.nodes[int(number or 0)]
    if name == "kill":
        world.kill(int(number))
    elif name == "power":
        world.power(1, not node.powered)
    elif name == "plug":
        node.plugged = not node.plugged
    elif name == "ssh":
        node.ssh = not node.ssh
    elif name == "stall":
        world.stalled = not world.stalled
    elif name == "silent":
        world.silent = not world.silent
    elif name == "compile":
        world.compiling = not world.compiling
    elif name == "traffic":
        world.running = 0.0 if world.running else 2.0
    elif name == "lock":
        world.locked = not world.locked
    elif name == "broken":
        world.broken_start = not world.broken_start
    else:
        world.now += 1000.0


def repair(world: World) -> None:
    for node in world.nodes:
        node.powered = node.plugged = node.ssh = True
    world.locked = world.compiling = world.broken_start = False


moves = st.lists(st.tuples(st.sampled_from(FAULTS), st.floats(0.5, 200.0)), min_size=1, max_size=15)


@settings(max_examples=60, deadline=None)
@given(moves, st.integers(2, 4))
def test_any_faults_keep_the_invariants_and_repair_brings_it_back(faults, count) -> None:
    world = World(count=count, rules=GENEROUS)
    for fault, seconds in faults:
        cause(world, fault)
        world.run(seconds)
    if world.ended is not None:
        assert world.ended.down
        return
    repair(world)
    assert world.recover()


@settings(max_examples=30, deadline=None)
@given(moves)
def test_the_limit_of_restarts_holds_with_the_real_rules(faults) -> None:
    world = World()
    for fault, seconds in faults:
        cause(world, fault)
        world.run(seconds)


def test_a_hundred_seeded_faults() -> None:
    """One long life; when the supervisor gave up, `start` begins anew."""
    generator = random.Random(20261129)
    world = World(count=3, rules=GENEROUS)
    for _ in range(100):
        cause(world, generator.choice(FAULTS))
        world.run(generator.uniform(1, 120))
        if generator.random() < 0.5:
            repair(world)
        if world.ended is not None:
            world = World(count=3, rules=GENEROUS)
    repair(world)
    assert world.recover()
