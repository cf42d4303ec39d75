"""Predictions for kits, and the floor while loading."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from glm_launch.nodes import memory
from glm_launch.nodes.memory import GIB, Reserve

TR3 = memory.demand(164 * GIB, 8 * GIB, 14 * GIB, ranks=2)


def test_a_gb10_pair_has_one_pool_with_the_floor_in_it(kit) -> None:
    head, worker = kit("gb10-pair").nodes
    (first,) = memory.predict(head, TR3, Reserve(), head=True)
    (second,) = memory.predict(worker, TR3, Reserve(), head=False)
    assert first.pool == second.pool == "memory"
    assert first.needed - second.needed == Reserve().head_extra
    assert dict(first.parts)["weights"] == 82 * GIB
    assert memory.findings([first, second]) != []


def test_what_does_not_fit_says_which_knob_and_by_how_much(kit) -> None:
    need = memory.demand(164 * GIB, 0, 20 * GIB, ranks=2)
    (prediction,) = memory.predict(kit("gb10-pair").nodes[0], need, Reserve(), head=True)
    (finding,) = memory.findings([prediction])
    assert "spark-a: memory would need" in finding.seen and "KV cache 20.0 GiB" in finding.seen
    limit = 20 * GIB - prediction.short
    assert f"KV_CACHE_MEMORY_BYTES to {limit}" in finding.fix
    lower = memory.demand(164 * GIB, 0, limit, ranks=2)
    assert not memory.findings(
        memory.predict(kit("gb10-pair").nodes[0], lower, Reserve(), head=True)
    )


def test_cards_with_memory_of_their_own_are_judged_apart(kit) -> None:
    (node,) = kit("h200-2x").nodes
    found = memory.predict(node, TR3, Reserve(), head=True, ranks_here=2)
    assert [one.pool for one in found] == ["GPU 0", "GPU 1", "host memory"]
    assert not memory.findings(found)
    one_card = memory.demand(164 * GIB, 8 * GIB, 14 * GIB, ranks=1)
    (finding,) = memory.findings(memory.predict(node, one_card, Reserve(), head=True))
    assert "GPU 0" in finding.seen and "add a node" in finding.fix


def test_the_small_host_of_two_ampere_cards_counts(kit) -> None:
    (node,) = kit("cmp170hx-2x").with_(lambda n: n["memory"].update(available=4 * GIB)).nodes
    need = memory.demand(117 * GIB, 0, 2 * GIB, ranks=2)
    found = memory.findings(memory.predict(node, need, Reserve(), head=True, ranks_here=2))
    assert any("host memory" in finding.seen for finding in found)


@given(st.integers(0, 2**41), st.integers(0, 2**38), st.integers(0, 2**38), st.integers(1, 8))
def test_more_ranks_never_need_more_each(model, drafter, kv, ranks) -> None:
    one = memory.demand(model, drafter, kv, ranks=ranks)
    more = memory.demand(model, drafter, kv, ranks=ranks + 1)
    assert more.total <= one.total
    assert one.weights * ranks >= model


def test_one_low_sample_is_noise_and_two_are_not() -> None:
    floor = 6 * GIB
    assert memory.below_floor([7 * GIB, 5 * GIB, 7 * GIB, 5 * GIB], floor) is None
    assert memory.below_floor([9 * GIB, 5 * GIB, 4 * GIB, 9 * GIB], floor) == 4 * GIB
    assert "5.0 GiB left" in memory.aborted("spark-a", 5 * GIB, floor).seen
