"""The fused mHC seam: what it takes, and its kernel's arithmetic without a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch

from glm_exl3 import envs
from glm_exl3.format.errors import GlmExl3Error
from glm_exl3.fused import install, mhc_seam


def test_the_kernel_computes_the_reference(interpreted: Callable[..., str]) -> None:
    for streams, post, comb, block_input in json.loads(interpreted("interpreted_seam.py")):
        assert streams < 6e-3  # the interpreter cuts bf16 off where a GPU rounds
        assert post < 3e-3
        assert comb < 3e-3
        assert block_input < 8e-3


@pytest.mark.parametrize(
    ("shape", "dtype", "taken"),
    [
        ((1, 4, 4096), torch.bfloat16, True),
        ((2, 4, 256), torch.bfloat16, True),
        ((3, 4, 4096), torch.bfloat16, False),
        ((0, 4, 4096), torch.bfloat16, False),
        ((1, 2, 4096), torch.bfloat16, False),
        ((1, 4, 3072), torch.bfloat16, False),
        ((1, 4, 4096), torch.float16, False),
    ],
)
def test_only_calls_it_is_made_for_are_taken(
    shape: tuple[int, int, int], dtype: torch.dtype, taken: bool
) -> None:
    norm = torch.empty(shape[2], dtype=torch.bfloat16)
    assert mhc_seam.takes(torch.empty(shape, dtype=dtype), norm) is taken


def test_the_switch_names_known_ops_only() -> None:
    assert envs.FUSED_OPS.read({"GLM_EXL3_FUSED_OPS": "mhc"}) == ("mhc",)
    assert envs.FUSED_OPS.read({"GLM_EXL3_FUSED_OPS": "none"}) == ()
    with pytest.raises(GlmExl3Error, match="nonsense"):
        envs.FUSED_OPS.read({"GLM_EXL3_FUSED_OPS": "mhc,nonsense"})
    assert set(install.OPS) == set(envs.FUSED_NAMES)


def test_nothing_is_installed_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLM_EXL3_FUSED_OPS", "mhc")
    assert install.install() == ()
