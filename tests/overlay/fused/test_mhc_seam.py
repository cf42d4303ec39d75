"""The fused mHC seam: what it takes, and its kernel's arithmetic without a GPU."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from glm_exl3 import envs
from glm_exl3.format.errors import GlmExl3Error
from glm_exl3.fused import install, mhc_seam, seam_cuda, seam_triton
from glm_exl3.ops import ext
from glm_exl3.ref import mhc


def test_the_kernel_computes_the_reference(interpreted: Callable[..., str]) -> None:
    for streams, post, comb, block_input in json.loads(interpreted("interpreted_seam.py")):
        assert streams < 6e-3  # the interpreter cuts bf16 off where a GPU rounds
        assert post < 3e-3
        assert comb < 3e-3
        assert block_input < 8e-3


def path_of(shape: tuple[int, int, int], dtype: torch.dtype = torch.bfloat16) -> str | None:
    norm = torch.empty(shape[2], dtype=torch.bfloat16)
    return mhc_seam.path_for(torch.empty(shape, dtype=dtype), norm)


@pytest.mark.parametrize(
    ("shape", "dtype", "path"),
    [
        ((1, 4, 4096), torch.bfloat16, mhc_seam.TRITON),
        ((2, 4, 256), torch.bfloat16, mhc_seam.TRITON),
        ((3, 4, 4096), torch.bfloat16, None),
        ((0, 4, 4096), torch.bfloat16, None),
        ((1, 2, 4096), torch.bfloat16, None),
        ((1, 4, 3072), torch.bfloat16, None),
        ((1, 4, 4096), torch.float16, None),
    ],
)
def test_without_clusters_only_calls_of_two_tokens_are_taken(
    shape: tuple[int, int, int], dtype: torch.dtype, path: str | None
) -> None:
    assert path_of(shape, dtype) == path
    norm = torch.empty(shape[2], dtype=torch.bfloat16)
    assert mhc_seam.takes(torch.empty(shape, dtype=dtype), norm) is (path is not None)


@pytest.mark.parametrize(
    ("shape", "dtype", "path"),
    [
        ((1, 4, 4096), torch.bfloat16, mhc_seam.CUDA),
        ((mhc_seam.MAX_TOKENS, 4, 4096), torch.bfloat16, mhc_seam.CUDA),
        ((mhc_seam.MAX_TOKENS + 1, 4, 4096), torch.bfloat16, None),
        ((3, 4, 256), torch.bfloat16, mhc_seam.CUDA),
        ((1, 4, 128), torch.bfloat16, mhc_seam.TRITON),
        ((3, 4, 128), torch.bfloat16, None),
        ((1, 4, 1280), torch.bfloat16, None),
        ((1, 4, 8192), torch.bfloat16, mhc_seam.TRITON),
        ((0, 4, 4096), torch.bfloat16, None),
        ((1, 2, 4096), torch.bfloat16, None),
        ((1, 4, 4096), torch.float16, None),
    ],
)
def test_with_clusters_every_decode_step_is_taken(
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    path: str | None,
) -> None:
    monkeypatch.setattr(seam_cuda, "has_kernel", lambda device: True)
    assert path_of(shape, dtype) == path


def test_a_norm_of_another_dtype_is_left_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seam_cuda, "has_kernel", lambda device: True)
    streams = torch.empty(1, 4, 4096, dtype=torch.bfloat16)
    assert not mhc_seam.takes(streams, torch.empty(4096))


@pytest.mark.parametrize(
    ("capability", "refusal", "runs"),
    [
        ((9, 0), None, True),
        ((12, 1), None, True),
        ((8, 9), None, False),
        ((9, 0), "no nvcc", False),
    ],
)
def test_the_kernel_needs_clusters_and_the_library(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    refusal: str | None,
    runs: bool,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(ext, "refusal", lambda capability: refusal)
    ext.runs_on.cache_clear()
    assert seam_cuda.has_kernel(torch.device("cuda", 0)) is runs
    assert not seam_cuda.has_kernel(torch.device("cpu"))
    ext.runs_on.cache_clear()


@pytest.mark.parametrize("has_kernel", [True, False])
def test_a_call_goes_where_it_was_taken(monkeypatch: pytest.MonkeyPatch, has_kernel: bool) -> None:
    monkeypatch.setattr(seam_cuda, "has_kernel", lambda device: has_kernel)
    for module in (seam_cuda, seam_triton):
        monkeypatch.setattr(module, "seam", lambda *call, name=module.__name__: (name, call))
    streams, norm = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((1, 4, 256), (256,)))
    call = ("x", streams, "post", "comb", "fn", "scale", "base", "parameters", norm, 1e-5)
    name, given = cast(Any, mhc_seam).seam(*call)
    assert name == (seam_cuda if has_kernel else seam_triton).__name__
    assert all(a is b for a, b in zip(given, call, strict=True))


def test_the_operator_gets_what_its_schema_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors and numbers stand in the order of csrc/bindings_seam.cpp."""
    text = (ext.SOURCES / "bindings_seam.cpp").read_text()
    joined = re.sub(r'"\s+"', "", text)
    schema = re.search(r'"seam\((.*)\) -> \(\)"', joined)
    assert schema is not None
    names = [argument.split()[-1] for argument in schema[1].split(", ")]
    calls: list[tuple[object, ...]] = []
    operators = SimpleNamespace(seam=lambda *call: calls.append(call))
    monkeypatch.setattr(ext, "operators", lambda: operators)
    x, streams = (torch.empty(3, *rest, dtype=torch.bfloat16) for rest in ((256,), (4, 256)))
    parameters = mhc.HyperParameters(1.0, 2.0, 3.0, 4.0, 5)
    rest = [torch.empty(1) for _ in range(6)]
    post, comb, fn, scale, base, norm = rest
    found = seam_cuda.seam(
        x, streams, post, comb, fn, scale, base, parameters, norm, 6.0, blocks=7
    )  # fmt: skip
    given = dict(zip(names, calls[0], strict=True))
    for name, value in (
        ("x", x), ("streams", streams), ("post", post), ("comb", comb), ("fn", fn),
        ("scale", scale), ("base", base), ("norm_weight", norm), ("rms_eps", 1.0), ("pre_eps", 2.0),
        ("sinkhorn_eps", 3.0), ("post_multiplier", 4.0), ("norm_eps", 6.0), ("iterations", 5),
        ("blocks", 7), ("new_streams", found[0]), ("post_out", found[1]), ("comb_out", found[2]),
        ("block_input", found[3]),
    ):  # fmt: skip
        assert given[name] is value or given[name] == value, name
    assert [tuple(t.shape) for t in found] == [(3, 4, 256), (3, 4, 1), (3, 4, 4), (3, 256)]
    assert [t.dtype for t in found] == [
        torch.bfloat16,
        torch.float32,
        torch.float32,
        torch.bfloat16,
    ]


def test_the_limits_are_those_of_the_source() -> None:
    text = (ext.SOURCES / "seam.cuh").read_text()
    columns, blocks = (
        int(re.search(rf"{name} = (\d+)", text)[1])  # type: ignore[index]
        for name in ("kUnit", "kMostBlocks")
    )
    assert min(seam_cuda.HIDDEN_SIZES) == columns
    assert max(seam_cuda.HIDDEN_SIZES) == columns * blocks


def test_the_switch_names_known_ops_only() -> None:
    assert envs.FUSED_OPS.read({"GLM_EXL3_FUSED_OPS": "mhc"}) == ("mhc",)
    assert envs.FUSED_OPS.read({"GLM_EXL3_FUSED_OPS": "none"}) == ()
    assert envs.FUSED_OPS.read({}) == (envs.AUTO,)
    with pytest.raises(GlmExl3Error, match="nonsense"):
        envs.FUSED_OPS.read({"GLM_EXL3_FUSED_OPS": "mhc,nonsense"})
    assert set(install.OPS) == set(envs.FUSED_NAMES)


def test_nothing_is_installed_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLM_EXL3_FUSED_OPS", "mhc")
    assert install.install() == ()
