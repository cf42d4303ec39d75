from __future__ import annotations

import json

import pytest

from glm_exl3.format.layout import HADAMARD
from glm_exl3.format.sharding import block_cuts
from glm_exl3.ref.tiny.geometry import GEOMETRY_FILE, geometry, parse

TEXT = geometry().text
DRAFT = geometry().draft
CUT_ALONG_HEADS_OR_WIDTH = {
    "KDA": TEXT.linear_width,
    "MLA query": TEXT.num_attention_heads * TEXT.qk_nope_head_dim,
    "MLA output": TEXT.num_attention_heads * TEXT.v_head_dim,
    "dense MLP": TEXT.intermediate_size,
    "experts": TEXT.moe_intermediate_size,
    "draft query": DRAFT.query_width,
    "draft key": DRAFT.key_width,
    "draft MLP": DRAFT.intermediate_size,
}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("part", CUT_ALONG_HEADS_OR_WIDTH)
def test_every_packed_part_has_equal_shares_of_whole_blocks(part: str, ranks: int) -> None:
    cuts = block_cuts(CUT_ALONG_HEADS_OR_WIDTH[part], ranks)
    widths = {cut.stop - cut.start for cut in cuts}
    assert len(widths) == 1
    assert widths.pop() % HADAMARD == 0


def test_the_vocabulary_is_cut_unevenly_at_four_ranks() -> None:
    cuts = block_cuts(TEXT.vocab_size, 4)
    assert [(cut.stop - cut.start) // HADAMARD for cut in cuts] == [4, 4, 4, 3]


def test_the_geometry_has_every_part_of_the_real_architecture() -> None:
    assert [TEXT.is_linear(layer) for layer in range(5)] == [True, True, True, False, False]
    assert [TEXT.is_sparse_mlp(layer) for layer in range(5)] == [False, True, True, True, True]
    assert TEXT.kv_lora_rank == 512
    assert TEXT.index_head_dim == HADAMARD
    assert TEXT.index_topk % TEXT.index_kpool == 0
    assert TEXT.num_attention_heads >= 16


@pytest.mark.parametrize("field", ["hidden_size", "index_kpool"])
def test_a_missing_dim_is_named(field: str) -> None:
    document = json.loads(GEOMETRY_FILE.read_text(encoding="utf-8"))
    del document["text"][field]
    with pytest.raises(TypeError, match=field):
        parse(document)
