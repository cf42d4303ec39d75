"""Which back end serves which GPU and rows, and what vLLM accepts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from glm_exl3.attention import cache_types, install, tiles
from glm_exl3.format.kv import LAYOUTS, VLLM_NAMES

ARCHITECTURES = st.sampled_from([80, 86, 89, 90, 100, 120, 121])


@pytest.mark.parametrize(
    ("architecture", "dtype", "wanted"),
    [
        (80, "auto", "TritonSparseMla"),
        (86, "glm_int8", "TritonSparseMla"),
        (89, "glm_fp8", "TritonSparseMla"),
        (90, "auto", None),
        (90, "bfloat16", None),
        (90, "glm_int8", "TritonSparseMla"),
        (120, "auto", None),
        (120, "bfloat16", "TritonSparseMla"),
        (120, "glm_fp8", "Sm120Rows"),
        (121, "glm_int8", "TritonSparseMla"),
    ],
)
def test_triton_serves_what_vllm_does_not(architecture: int, dtype: str, wanted: object) -> None:
    assert install.attention_choice("auto", architecture, dtype) == wanted


def test_a_word_insists() -> None:
    assert install.attention_choice("triton", 90, "auto") == "TritonSparseMla"
    assert install.attention_choice("vllm", 80, "auto") is None
    assert install.triton_indexer("auto", 89)
    assert not install.triton_indexer("auto", 90)
    assert install.triton_indexer("triton", 90)


def test_the_names_are_in_vllm_s_lists() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    install.register_names()
    install.register_names()
    listed = {install.listed_name(a) for a in (80, 90, 100, 120)}
    listed |= {"FLASHINFER_MLA_SPARSE_SM90", "FLASH_ATTN_MLA_SPARSE", "GLM_TRITON_MLA_SPARSE"}
    for name in listed:
        assert AttentionBackendEnum[name]


def test_vllm_s_configuration_takes_the_registered_types() -> None:
    from vllm.config import CacheConfig
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, is_quantized_kv_cache

    cache_types.register()
    cache_types.register()
    for name, layout in LAYOUTS.items():
        dtype = VLLM_NAMES[name]
        assert CacheConfig(cache_dtype=dtype).cache_dtype == dtype
        assert not is_quantized_kv_cache(dtype)
        spec = MLAAttentionSpec(
            block_size=64,
            num_kv_heads=1,
            head_size=512,
            dtype=STR_DTYPE_TO_TORCH_DTYPE[dtype],
            cache_dtype_str=dtype,
        )
        sized = cache_types.with_rows(spec)
        assert sized.state_content_size_bytes == layout.row_bytes
    assert STR_DTYPE_TO_TORCH_DTYPE["glm_int8"] is torch.uint8


@given(
    ARCHITECTURES,
    st.sampled_from([8, 16, 32, 64]),
    st.sampled_from(list(LAYOUTS.values())),
    st.integers(1, 9000),
)
def test_tiles_and_splits_cover_every_head_and_key(architecture, heads, layout, tokens) -> None:
    tile = tiles.tile_for(architecture, heads, layout, tokens)
    assert tile.heads >= 16
    assert tile.keys >= 16
    assert tile.native_e4m3 == (architecture >= 89)
    splits = tiles.splits_for(tokens, heads, tile, 132)
    width = tiles.split_columns(2176, splits, tile.keys)
    used = -(-2176 // width)
    assert used <= splits
    assert width % tile.keys == 0
    programs = tokens * -(-heads // tile.heads)
    assert splits == 1 or programs * splits <= 132
