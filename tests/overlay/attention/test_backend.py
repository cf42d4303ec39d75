"""What the back ends answer when vLLM asks, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.platforms.interface import DeviceCapability
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from glm_exl3.attention import backend, cache_types
from glm_exl3.format.kv import VLLM_NAMES


@pytest.fixture(autouse=True)
def types() -> None:
    cache_types.register()


def spec(dtype: str) -> MLAAttentionSpec:
    stored = torch.uint8 if dtype.startswith("glm_") else torch.bfloat16
    return MLAAttentionSpec(
        block_size=128, num_kv_heads=1, head_size=512, dtype=stored, cache_dtype_str=dtype
    )


def reasons(kind: type, rows: str, major: int, **changed: object) -> list[str]:
    asked = {
        "head_size": 512,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": rows,
        "block_size": None,
        "use_mla": True,
        "has_sink": False,
        "use_sparse": True,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": DeviceCapability(major, 0),
        "attn_type": "decoder",
    }
    return kind.validate_configuration(**(asked | changed))


@pytest.mark.parametrize("major", [8, 9, 12])
@pytest.mark.parametrize("dtype", list(VLLM_NAMES.values()))
def test_triton_takes_every_layout_from_sm80_on(dtype: str, major: int) -> None:
    assert reasons(backend.TritonSparseMla, dtype, major) == []


def test_triton_refuses_what_it_is_not_written_for() -> None:
    kind = backend.TritonSparseMla
    assert reasons(kind, "auto", 7)
    assert reasons(kind, "fp8", 8)
    assert reasons(kind, "auto", 8, head_size=576)
    assert reasons(kind, "auto", 8, dtype=torch.float16)
    assert reasons(kind, "auto", 8, use_sparse=False)


@pytest.mark.parametrize(
    ("dtype", "row"), [("bfloat16", 1024), ("glm_fp8", 528), ("glm_int8", 528)]
)
def test_pages_have_the_rows_of_the_layout(dtype: str, row: int) -> None:
    sized = backend.TritonSparseMla.customize_spec(spec(dtype))
    assert sized.page_size_bytes == 128 * row
    assert sized.block_stride_alignment % row == 0


def test_sm120_pages_of_our_rows_are_what_its_kernel_views() -> None:
    sized = backend.Sm120Rows.customize_spec(spec("glm_fp8"))
    assert sized.page_size_bytes == 128 * 528
    assert sized.block_stride_alignment == 64 * 528


def test_sm120_asks_its_parent_with_a_type_that_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def parent(*arguments: object, **_: object) -> None:
        asked.append(arguments[2])

    monkeypatch.setattr(
        backend.FlashInferMLASparseSM120Backend, "supports_combination", staticmethod(parent)
    )
    for dtype in ("glm_fp8", "auto"):
        backend.Sm120Rows.supports_combination(512, torch.bfloat16, dtype, None)
    assert asked == ["fp8", "auto"]


def test_writes_of_own_rows_take_the_own_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(backend, "write", lambda *arguments: seen.append(arguments[3].name))
    latents, cache = torch.zeros(2, 512), torch.zeros(1, 16, 528, dtype=torch.uint8)
    slots = torch.zeros(2, dtype=torch.int64)
    ours = SimpleNamespace(own_rows=True)
    backend.Sm120RowsImpl.do_kv_cache_update(ours, latents, latents, cache, slots)
    assert seen == ["fp8"]
