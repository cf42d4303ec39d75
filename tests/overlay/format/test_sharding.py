"""Cuts cover everything once, on whole blocks, as evenly as blocks allow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm_exl3.format.errors import FormatError
from glm_exl3.format.sharding import block_cuts


@given(
    blocks=st.integers(1, 1300),
    ranks=st.integers(1, 16),
    equal=st.booleans(),
    block=st.sampled_from([16, 128]),
)
def test_cuts_cover_every_feature_once(blocks: int, ranks: int, equal: bool, block: int) -> None:
    size = blocks * block
    if blocks < ranks:
        with pytest.raises(FormatError, match="TP cannot cut"):
            block_cuts(size, ranks, block=block, equal=equal)
        return
    cuts = block_cuts(size, ranks, block=block, equal=equal)
    assert [cut.start for cut in cuts] == [0, *(cut.stop for cut in cuts[:-1])]
    assert (len(cuts), cuts[-1].stop) == (ranks, size)
    widths = [cut.width for cut in cuts]
    assert all(width % block == 0 and width > 0 for width in widths)
    assert widths == sorted(widths, reverse=True)
    assert max(widths) - min(widths) <= block
    assert all(cut.padded == (max(widths) if equal else cut.width) for cut in cuts)
    assert all(cut.padding == cut.padded - cut.width for cut in cuts)


def test_known_cuts() -> None:
    assert [cut.width for cut in block_cuts(2048, 3)] == [768, 640, 640]
    assert [cut.padded for cut in block_cuts(2048, 3, equal=True)] == [768, 768, 768]
    assert [cut.width // 128 for cut in block_cuts(154880, 4)] == [303, 303, 302, 302]


@pytest.mark.parametrize(("size", "ranks"), [(130, 1), (128, 2), (0, 1), (256, 0)])
def test_what_blocks_cannot_fill_is_refused(size: int, ranks: int) -> None:
    with pytest.raises(FormatError, match="TP cannot cut"):
        block_cuts(size, ranks)
