"""The comparison itself: what counts as equal, as a near-tie and as broken."""

from __future__ import annotations

from collections.abc import Sequence

from equivalence import Line, compare

PROMPTS = [[1, 2], [3]]


def line(*tokens: int, margin: float = 1.0) -> Line:
    return Line(tokens, tuple(-0.1 for _ in tokens), tuple(margin for _ in tokens))


def answers(*rounds: list[Line]):
    remaining = list(rounds)

    def generate(prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[Line]:
        produced = remaining.pop(0)
        assert len(produced) == len(prompts) == len(lengths)
        return produced

    return generate


def test_equal_lines_are_equal() -> None:
    reference = [line(5, 6, 7), line(8, 9, 10)]
    result = compare(PROMPTS, reference, answers(reference))
    assert (result.positions, result.ties, result.broken) == (6, 0, [])


def test_a_clear_difference_is_broken() -> None:
    result = compare(PROMPTS, [line(5, 6), line(8, 9)], answers([line(5, 4), line(8, 9)]))
    assert len(result.broken) == 1
    assert "position 1: 4 instead of 6" in result.broken[0]


def test_a_near_tie_is_forced_and_the_rest_compared() -> None:
    reference = [line(5, 6, 7, margin=0.01), line(8, 9, 10)]
    result = compare(PROMPTS, reference, answers([line(4, 0, 0), line(8, 9, 10)], [line(6, 7)]))
    assert (result.ties, result.broken) == (1, [])


def test_a_difference_behind_a_forced_tie_is_still_seen() -> None:
    reference = [Line((5, 6), (-0.1, -0.1), (0.01, 2.0)), line(8)]
    result = compare(PROMPTS, reference, answers([line(4, 0), line(8)], [line(3)]))
    assert "position 1: 3 instead of 6" in result.broken[0]


def test_one_clear_difference_is_borne_where_sums_are_ordered_otherwise() -> None:
    reference = [line(5, 6, 7), line(8, 9, 10)]
    rounds = answers([line(5, 4, 0), line(8, 9, 10)], [line(7)])
    result = compare(PROMPTS, reference, rounds, wide_share=0.005)
    assert (result.broken, len(result.wide), result.positions) == ([], 1, 6)


def test_two_clear_differences_are_broken_there_too() -> None:
    reference = [line(5, 6, 7), line(8, 9, 10)]
    rounds = answers([line(5, 4, 0), line(8, 9, 11)])
    result = compare(PROMPTS, reference, rounds, wide_share=0.005)
    assert len(result.broken) == 2


def test_a_share_of_many_positions_is_borne() -> None:
    def flips_every_200th(prompts: Sequence[Sequence[int]], _: Sequence[int]) -> list[Line]:
        done = len(prompts[0]) - 1
        return [line(*(-1 if i % 200 == 0 else i for i in range(done, 600)))]

    result = compare([[1]], [line(*range(600))], flips_every_200th, wide_share=0.005)
    assert (result.broken, len(result.wide), result.positions) == ([], 3, 600)
    strict = compare([[1]], [line(*range(600))], flips_every_200th)
    assert len(strict.broken) == 1


def test_a_short_answer_is_broken() -> None:
    result = compare([[1]], [line(5, 6, 7)], answers([line(5, 6)]))
    assert "2 tokens instead of 3" in result.broken[0]


def test_many_near_ties_are_broken() -> None:
    reference = [line(*range(20), margin=0.0)]
    rounds = [[line(*(99 for _ in range(20 - done)), margin=0.0)] for done in range(20)]
    result = compare([[1]], reference, answers(*rounds))
    assert "20 near-ties flipped" in result.broken[0]
