"""A packed `lm_head` is exact under vLLM's vocabulary cut, wherever that cut falls."""

from __future__ import annotations

import pytest
import torch

from glm_exl3.format.errors import FormatError
from glm_exl3.quant.lm_head import cover
from glm_exl3.ref.linear import exl3_linear


def test_cover_of_a_range_inside_blocks() -> None:
    cut = cover(480, 480, 1920)
    assert (cut.blocks.start, cut.blocks.stop, cut.blocks.padded) == (384, 1024, 640)
    assert (cut.skip, cut.width) == (96, 480)


def test_cover_behind_the_stored_matrix_is_padding() -> None:
    cut = cover(1920, 640, 1920)
    assert (cut.blocks.start, cut.blocks.stop, cut.blocks.padded) == (1920, 1920, 640)


@pytest.mark.parametrize(
    ("vocabulary", "ranks"), [(1920, 1), (1920, 2), (1920, 4), (1152, 4), (1216, 1), (1000, 4)]
)
def test_logits_of_all_ranks_are_those_of_the_whole_matrix(
    vocabulary: int, ranks: int, packed, exl3_config, at_rank, load
) -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    stored = packed(128, -(-vocabulary // 128) * 128, 3)
    config = exl3_config(stored.named("lm_head"))
    x, parts = torch.randn(2, 128), []
    for rank in range(ranks):
        at_rank(rank, ranks)
        head = ParallelLMHead(
            vocabulary, 128, quant_config=config, prefix="lm_head", params_dtype=torch.float32
        )
        load(head, stored.tensors)
        head.quant_method.process_weights_after_loading(head)
        part = head.quant_method.apply(head, x)
        assert part.shape == (2, head.num_embeddings_per_partition)
        parts.append(part)
    m = stored.matrix
    want = exl3_linear(x, m.trellis, m.suh, m.svh, m.codebook)[:, :vocabulary]
    got = torch.cat(parts, -1)[:, :vocabulary]
    torch.testing.assert_close(got, want, rtol=1e-3, atol=2e-4)


def test_a_packed_head_keeps_its_blocks_and_skips(packed) -> None:
    from glm_exl3.quant.linear import LoadedLinear, Term
    from glm_exl3.quant.lm_head import _without_skip

    loaded = LoadedLinear((Term(packed(128, 640).matrix, 640, 128),), "reference")
    same, skip = _without_skip(loaded, cover(480, 480, 1920))
    assert same is loaded
    assert skip == 96


def test_a_head_of_another_vocabulary_is_refused(packed, exl3_config, at_rank) -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    at_rank(0, 1)
    config = exl3_config(packed(128, 256).named("lm_head"))
    with pytest.raises(FormatError, match=r"lm_head\.trellis.*128 x 256.*128 x 512"):
        ParallelLMHead(512, 128, quant_config=config, prefix="lm_head")


def test_a_dense_head_keeps_vllms_method(packed, exl3_config, at_rank) -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        UnquantizedEmbeddingMethod,
    )

    at_rank(0, 1)
    config = exl3_config(packed(128, 128).named("a.o_proj"))
    head = ParallelLMHead(256, 128, quant_config=config, prefix="lm_head")
    assert isinstance(head.quant_method, UnquantizedEmbeddingMethod)
