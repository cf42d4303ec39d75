"""How many blocks of a small grid a multiprocessor takes, by their shared memory."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest

MULTIPROCESSORS, WHOLE, RESERVED = 132, 228 * 1024, 1024  # of the H200 that the host stands for


@pytest.fixture(scope="module")
def spread(compiled: Callable[..., Callable[..., bytearray]]) -> Callable[[int, int], int]:
    program = compiled("spread")

    def run(blocks: int, wanted: int) -> int:
        return int(struct.unpack("i", program(tensors=[], blocks=blocks, bytes=wanted))[0])

    return run


@pytest.mark.parametrize("wanted", [9000, 33000, 54000])
@pytest.mark.parametrize("blocks", [1, 128, 132, 133, 256, 264, 265, 396])
def test_an_even_share_fits_and_one_block_more_does_not(
    spread: Callable[[int, int], int], blocks: int, wanted: int
) -> None:
    even = -(-blocks // MULTIPROCESSORS)
    found = spread(blocks, wanted)
    assert found >= wanted
    assert even * (found + RESERVED) <= WHOLE
    assert (even + 1) * (found + RESERVED) > WHOLE


@pytest.mark.parametrize("blocks", [397, 512, 4096])
def test_more_blocks_keep_what_they_ask_for(spread: Callable[[int, int], int], blocks: int) -> None:
    assert spread(blocks, 33000) == 33000
