"""8-bit rows: the codes, their products, the path for a number of tokens, and the layers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from glm_exl3.ops import ext, recoded, tuning
from glm_exl3.ref import recode


def test_the_kernel_computes_the_reference_in_its_interpreter(
    interpreted: Callable[..., str],
) -> None:
    for case in json.loads(interpreted("interpreted_rows.py")):
        assert case["error"] < 5e-3, case
        assert case["alone"], case


@given(
    scheme=st.sampled_from(["fp8", "int8"]),
    rows=st.integers(1, 9),
    columns=st.integers(1, 40),
    magnitude=st.sampled_from([1e-30, 1e-6, 1.0, 3e4]),
    seed=st.integers(0, 2**20),
)
def test_codes_are_near_and_do_not_depend_on_the_cut(
    scheme: str, rows: int, columns: int, magnitude: float, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=random) * magnitude
    weight[0] = 0
    codes, scale = recode.quantize_rows(weight, scheme)
    back = recode.dequantize_rows(codes, scale)
    amax = recode.row_maxima(weight)
    step = amax / 127 / 2 if scheme == "int8" else weight.abs().amax(1) / 16
    floor = 1e-12 * 448
    assert ((back - weight).abs() <= step[:, None] * 1.001 + floor).all()
    cut = columns // 2
    parts = [
        recode.quantize_rows(part, scheme, amax)[0].float()
        for part in (weight[:, :cut], weight[:, cut:])
    ]
    assert torch.equal(torch.cat(parts, 1), codes.float())


@pytest.mark.parametrize("scheme", ["fp8", "int8"])
def test_the_cpu_multiplies_with_the_same_codes(scheme: str) -> None:
    random = torch.Generator().manual_seed(1)
    weight = torch.randn(48, 256, generator=random).bfloat16()
    codes, scale = recode.quantize_rows(weight, scheme)
    matrix = recoded.encode_rows(weight, scheme)
    assert torch.equal(matrix.codes.float(), codes.float())
    for tokens in (1, 4, 30):
        x = torch.randn(tokens, 256, generator=random).bfloat16()
        want = recode.linear(x, codes, scale).float()
        error = (recoded.linear(x, matrix).float() - want).norm() / want.norm()
        assert error < 6e-3


def test_quantised_activations_are_a_knob_and_spare_a_few_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLM_EXL3_RECODE_PATH", "scaled")
    random = torch.Generator().manual_seed(1)
    matrix = recoded.encode_rows(torch.randn(16, 128, generator=random).bfloat16(), "fp8")
    x = torch.randn(9, 128, generator=random).bfloat16()
    exact = recode.linear(x, matrix.codes, matrix.scale).float()
    error = (recoded.linear(x, matrix).float() - exact).norm() / exact.norm()
    assert 0.01 < error < 0.06
    few = recoded.linear(x[:8], matrix).float()
    assert (few - exact[:8]).norm() / exact[:8].norm() < 6e-3


@pytest.mark.parametrize(
    ("scheme", "capability", "tokens", "wanted", "path"),
    [
        ("fp8", (9, 0), 8, "auto", "streamed"),
        ("fp8", (8, 0), 1, "auto", "streamed"),
        ("fp8", (9, 0), 17, "auto", "scaled"),
        ("fp8", (8, 0), 17, "auto", "rows"),
        ("fp8", (8, 6), 257, "auto", "widened"),
        ("fp8", (9, 0), 4096, "auto", "scaled"),
        ("fp8", (8, 0), 4096, "auto", "widened"),
        ("fp8", (12, 1), 4096, "widened", "widened"),
        ("fp8", (12, 1), 4, "widened", "streamed"),
        ("int8", (9, 0), 1, "auto", "streamed"),
        ("int8", (9, 0), 64, "auto", "rows"),
        ("int8", (9, 0), 4096, "auto", "widened"),
        ("int8", (9, 0), 4096, "scaled", "widened"),
    ],
)
def test_the_path_follows_table_knob_and_device(
    scheme: str,
    capability: tuple[int, int],
    tokens: int,
    wanted: str,
    path: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLM_EXL3_RECODE_PATH", wanted)
    codes = torch.zeros(128, 256, dtype=torch.int8)
    matrix = recoded.RowCodes(scheme, codes, torch.ones(128))
    assert recoded.path_for(matrix, capability, tokens) == path


def test_rules_keep_a_verify_step_in_one_path() -> None:
    for scheme in ("fp8", "int8"):
        steps = tuning.plan(tuning.Problem(scheme, 4096, 4096, 8, scheme), (9, 0))
        assert steps[0].path == recoded.STREAMED
        assert steps[0].tokens >= tuning.ALIKE


@pytest.mark.parametrize(
    ("tokens", "k", "dtype", "library", "can"),
    [
        (1, 1024, torch.bfloat16, True, True),
        (16, 64, torch.bfloat16, True, True),
        (17, 1024, torch.bfloat16, True, False),
        (1, 1008, torch.bfloat16, True, False),
        (1, 1024, torch.float16, True, False),
        (1, 1024, torch.bfloat16, False, False),
    ],
)
def test_the_kernel_serves_few_tokens_of_bf16_where_its_library_is(  # noqa: PLR0913, PLR0917
    tokens: int,
    k: int,
    dtype: torch.dtype,
    library: bool,
    can: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ext, "runs_on", lambda _: library)
    assert recoded.can_stream(torch.zeros(tokens, k, dtype=dtype)) is can


def test_the_kernel_and_its_rule_agree_on_what_it_takes() -> None:
    text = (ext.SOURCES / "byte_rows.h").read_text()
    found = dict(re.findall(r"(kRows\w+) = (\d+)", text))
    limits = (recoded.STREAMED_TOKENS, recoded.STREAMED_BYTES)
    assert (int(found["kRowsTokens"]), int(found["kRowsUnitBytes"])) == limits


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(ValueError, match="int4"):
        recode.quantize_rows(torch.ones(2, 2), "int4")
