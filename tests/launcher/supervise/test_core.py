"""What the supervisor decides in each situation, and how soon."""

from __future__ import annotations

import pytest
from world import World

from glm_launch.supervise import core
from glm_launch.supervise.signs import Outcome, Signs
from glm_launch.supervise.troubles import Rules, Trouble


def warm(**changes: object) -> World:
    world = World(**changes)
    world.run(70)
    return world


def test_nothing_happens_to_a_healthy_launch_idle_or_busy() -> None:
    world = World()
    world.run(1800)
    world.running = 4.0
    world.run(7200)
    assert (world.stops, world.told, world.ended) == ([], [], None)


@pytest.mark.parametrize("number", [0, 1])
def test_a_dead_rank_stops_and_restarts_all(number: int) -> None:
    world = warm()
    world.kill(number)
    begin = world.now
    world.run(60)
    at, code = world.stops[0]
    assert code == "rank-ended" and at - begin <= 5
    assert world.healthy and world.generation == "g1"
    assert world.told[-1][0] - begin <= world.boot_s + 60


def test_a_stalled_step_is_found_under_traffic() -> None:
    world = warm(running=2.0)
    world.stalled = True
    begin = world.now
    world.run(200)
    at, code = world.stops[0]
    assert code == "stalled" and at - begin <= 90
    assert world.healthy


def test_a_stall_is_found_by_the_canary_when_idle() -> None:
    world = warm()
    world.stalled = True
    begin = world.now
    world.run(300)
    at, code = world.stops[0]
    assert code == "canary" and at - begin <= 150


def test_an_api_that_does_not_answer_is_found() -> None:
    world = warm(running=1.0)
    world.silent = True
    begin = world.now
    world.run(120)
    assert world.stops[0][1] == "silent" and world.stops[0][0] - begin <= 90


def test_a_compiler_postpones_a_stall_up_to_the_ceiling() -> None:
    world = warm(running=1.0)
    world.stalled = world.compiling = True
    begin = world.now
    world.run(1700)
    assert world.stops == [] and world.told[0][1] == "postponed-stalled"
    assert len(world.told) == 1
    world.run(300)
    assert 1790 <= world.stops[0][0] - begin <= 1810


@pytest.mark.parametrize("running", [0.0, 1.0])
def test_the_first_step_may_take_its_time_after_a_compiler(running: float) -> None:
    """What was compiled has to be loaded, and the next compiler may only be seen a little later."""
    world = warm(running=running)
    world.stalled = True
    for _ in range(3):
        world.compiling = True
        world.run(300)
        world.compiling = False
        world.run(40)
    world.stalled = False
    world.run(600)
    assert world.stops == []


def test_a_stall_that_outlives_its_compiler_is_found() -> None:
    world = warm(running=1.0)
    world.stalled = world.compiling = True
    world.run(300)
    world.compiling = False
    begin = world.now
    world.run(200)
    assert world.stops[0][1] == "stalled" and world.stops[0][0] - begin <= 90


def test_a_compile_pause_that_ends_is_no_trouble() -> None:
    world = warm(running=1.0)
    world.stalled = world.compiling = True
    world.run(900)
    world.stalled = world.compiling = False
    world.run(600)
    assert world.stops == []


def test_a_short_link_loss_is_said_and_nothing_else() -> None:
    world = warm()
    world.nodes[1].plugged = False
    begin = world.now
    world.run(6)
    world.nodes[1].plugged = True
    world.run(60)
    assert world.first("link-down") - begin <= 5
    assert [said for _, said in world.told] == ["link-down", "link-back"]
    assert world.stops == []


def test_a_long_link_loss_waits_for_the_link_and_counts_once() -> None:
    world = warm()
    world.nodes[1].plugged = False
    world.run(3600)
    assert [code for _, code in world.stops] == ["link-lost"]
    assert world.starts == [] and world.mind.phase == "waiting"
    world.nodes[1].plugged = True
    world.run(60)
    assert world.healthy and len(world.starts) == 1


def test_a_lost_ping_means_nothing_while_steps_are_made() -> None:
    world = warm(running=3.0)
    signs = world.signs()
    lost = tuple(core.replace(link, reachable=False) for link in signs.links)
    mind = world.mind
    for number in range(200):
        moving = core.replace(signs.engine, steps=float(number))
        now = core.replace(signs, at=world.now + number, links=lost, engine=moving)
        mind, actions = core.step(mind, now, Rules())
        assert actions == ()


def test_a_node_that_only_ssh_does_not_reach_is_left_alone() -> None:
    world = warm(running=1.0)
    world.nodes[1].ssh = False
    world.run(600)
    world.nodes[1].ssh = True
    world.run(10)
    assert [said for _, said in world.told] == ["no-ssh", "ssh-back"]
    assert world.stops == []


def test_f22_a_node_without_power_is_waited_for() -> None:
    world = warm()
    world.power(1, False)
    world.run(600)
    assert world.starts == [] and world.mind.phase == "waiting"
    assert world.mind.waits_for and "n1" in world.mind.waits_for[0]
    world.power(1, True)
    world.run(60)
    assert world.healthy


def test_three_restarts_within_half_an_hour_then_down() -> None:
    world = warm()
    for _ in range(4):
        world.kill(1)
        world.run(120)
    assert len(world.starts) == 3
    assert world.ended is not None and world.ended.down
    assert "3 restarts within 30 minutes" in world.ended.text and "gone" in world.ended.text


def test_failed_restarts_count_and_back_off() -> None:
    world = warm()
    world.broken_start = True
    world.kill(0)
    world.run(600)
    pauses = [b - a - world.boot_s for a, b in zip(world.starts, world.starts[1:], strict=False)]
    assert len(world.starts) == 3 and 10 <= pauses[0] < 15 and 30 <= pauses[1] < 35
    assert world.ended is not None and "planted" in world.ended.text


def test_restarts_long_ago_do_not_count() -> None:
    world = warm()
    for _ in range(6):
        world.kill(1)
        world.run(1900)
    assert len(world.starts) == 6 and world.healthy


def test_a_command_at_work_is_not_disturbed_and_its_stop_is_final() -> None:
    world = warm()
    world.locked = True
    world.kill(1)
    world.run(30)
    assert world.stops == []
    world.command_stops()
    world.locked = False
    world.run(5)
    assert world.ended is not None and not world.ended.down and world.starts == []


def test_a_stop_by_a_command_while_waiting_is_final() -> None:
    world = warm()
    world.power(1, False)
    world.run(60)
    assert world.mind.phase == "waiting" and not world.mind.clean
    world.power(1, True)
    world.command_stops()
    world.run(30)
    assert world.ended is not None and world.starts == []


def test_a_launch_that_a_command_made_meanwhile_is_left_to_it() -> None:
    world = warm()
    world.kill(1)
    while world.mind.phase != "pausing":
        world.advance()
    world.generation = "other"
    for node in world.nodes:
        node.rank = "other"
    world.run(60)
    assert world.ended is not None and not world.ended.down
    assert world.starts == [] and world.healthy


def test_time_in_which_nobody_looked_is_not_counted() -> None:
    world = warm(running=1.0)
    world.stalled = True
    world.run(10)
    world.now += 3600
    world.run(30)
    assert world.stops == []
    world.run(60)
    assert len(world.stops) == 1


def test_a_supervisor_that_ended_before_its_restart_goes_on() -> None:
    world = World()
    world.mind = core.resume(Trouble("abandoned", "x"), "g0", world.now)
    for node in world.nodes:
        node.rank = ""
    world.run(60)
    assert world.healthy and len(world.starts) == 1


def test_a_stop_that_found_another_launch_ends_the_supervisor() -> None:
    mind = core.Mind("stopping", "g0", 0.0, trouble=Trouble("abandoned", "x"))
    for found in ("g9", None):
        signs = Signs(1.0, found, outcome=Outcome("stop", False, False, found))
        after, actions = core.step(mind, signs, Rules())
        assert after.phase == "done" and isinstance(actions[-1], core.End)
