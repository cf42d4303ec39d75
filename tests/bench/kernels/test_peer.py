"""The peer without a GPU: which of its files are built, how its inputs look."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from glm_exl3.format.layout import Codebook
from kernels import inputs
from kernels.cases import DENSE, ROUTED
from kernels.peer import build, calls

UNITS = "quant/comp_units"
CB = {Codebook.MCG: 1, Codebook.MUL1: 2}


@pytest.fixture
def built(tmp_path: Path) -> set[str]:
    """The files built from a package that has every rate."""
    names = [f"{UNITS}/exl3_comp_unit_{k}_cb{c}" for k in range(1, 9) for c in (0, 1, 2)]
    names += [f"{UNITS}/exl3_moe_coop_inst_k{k}" for k in range(1, 9)]
    names += [f"{UNITS}/exl3_moe_inst_k{k}_cb{c}" for k in range(9) for c in (1, 2)]
    names += [f"{UNITS}/exl3_moe_inst_k{k}_cb2_m{m}" for k in range(1, 9) for m in (32, 64)]
    for name in (*names, "quant/exl3_gemm", "hgemm", "attention", "sam"):
        path = tmp_path / f"{name}.cu"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return {path.stem for path in build.sources(tmp_path)}


def test_every_rate_of_the_table_is_built(built: set[str]) -> None:
    for dense in DENSE:
        assert f"exl3_comp_unit_{dense.bits}_cb{CB[dense.codebook]}" in built
    for routed in ROUTED:
        assert f"exl3_moe_coop_inst_k{routed.bits}" in built
        assert f"exl3_moe_inst_k{routed.bits}_cb{CB[routed.codebook]}" in built
    assert {"exl3_moe_inst_k3_cb2_m32", "exl3_moe_inst_k3_cb2_m64"} <= built


def test_what_the_table_does_not_call_is_left_out(built: set[str]) -> None:
    assert {"exl3_gemm", "hgemm"} <= built
    assert not built & {"attention", "sam", "exl3_comp_unit_8_cb1", "exl3_moe_inst_k8_cb2"}


def test_pairs_are_sorted_by_expert_with_their_weights() -> None:
    ids = torch.tensor([[3, 1], [1, 0]])
    weights = torch.tensor([[0.1, 0.2], [0.3, 0.4]])
    found = calls.Sorted.of(inputs.Routed(torch.zeros(2, 8), ids, weights), 5)
    assert found.counts == [1, 2, 0, 1, 0, 0]
    assert found.tokens.tolist()[0] == 1 and found.tokens.tolist()[3] == 0
    assert sorted(found.tokens.tolist()[1:3]) == [0, 1]
    torch.testing.assert_close(found.weights[[0, 3]], torch.tensor([0.4, 0.1]).half())


def test_address_tables_point_at_every_expert() -> None:
    stack = torch.zeros(3, 2, 4, dtype=torch.int16)
    assert calls._addresses(stack[:, 1]).tolist() == [stack[e, 1].data_ptr() for e in range(3)]
