"""Rows of the latent cache as arithmetic."""

from __future__ import annotations

import pytest

from glm_exl3.format import kv
from glm_exl3.format.errors import GlmExl3Error


def test_rows_have_the_bytes_that_kernels_address() -> None:
    sizes = {name: layout.row_bytes for name, layout in kv.LAYOUTS.items()}
    assert sizes == {"bf16": 1024, "fp8": 528, "int8": 528}
    assert all(size % 16 == 0 for size in sizes.values())


@pytest.mark.parametrize(
    ("capability", "wanted"),
    [(None, kv.BF16), ((8, 0), kv.BF16), ((9, 0), kv.BF16), ((10, 0), kv.FP8), ((12, 1), kv.FP8)],
)
def test_auto_stores_what_vllm_stores(
    capability: tuple[int, int] | None, wanted: kv.RowLayout
) -> None:
    assert kv.layout_of("auto", capability) is wanted


def test_an_unknown_layout_is_refused_by_name() -> None:
    with pytest.raises(GlmExl3Error, match="int4"):
        kv.layout_of("int4", (8, 0))


def test_every_choice_has_a_name_in_vllm_and_back() -> None:
    assert set(kv.VLLM_NAMES) == set(kv.CHOICES)
    for name, layout in kv.LAYOUTS.items():
        expected = None if layout is kv.BF16 else layout
        assert kv.registered_layout(kv.VLLM_NAMES[name]) is expected
    assert kv.registered_layout(None) is None


@pytest.mark.parametrize(("drafts", "slots"), [(0, 16), (1, 32), (7, 32), (16, 32), (17, 64)])
def test_the_ring_holds_a_pool_and_the_drafts(drafts: int, slots: int) -> None:
    assert kv.tail_ring_tokens(drafts) == slots
    assert kv.tail_ring_bytes(drafts) == slots * 512
