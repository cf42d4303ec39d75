"""The operation for bf16 rows: what the kernel is asked for, and the twin everywhere else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from glm_exl3.ops import dense_rows, ext

BF16 = torch.bfloat16


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(BF16)


@pytest.mark.parametrize("shape", [(0, 64), (1, 64), (3, 64), (40, 64), (2, 3, 64), (64,)])
def test_without_a_gpu_it_is_the_vendors_product(shape: tuple[int, ...]) -> None:
    x, weight = drawn(*shape), drawn(40, 64)
    assert torch.equal(dense_rows.linear(x, weight), F.linear(x, weight))


def test_a_compiled_graph_has_it_as_one_node() -> None:
    for x in (drawn(3, 64), drawn(2, 3, 64), drawn(3, 100)[:, 8:72]):
        arguments = (x, drawn(40, 64))
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(torch.ops.glm_exl3.dense_rows.default, arguments, test_utils=checks)


@pytest.mark.parametrize(
    ("x", "weight", "can"),
    [
        (drawn(1, 64), drawn(16, 64), True),
        (drawn(16, 4096), drawn(3, 4096), True),
        (drawn(2, 96), drawn(16, 96), True),
        (drawn(5, 256)[:, 64:192], drawn(16, 128), True),  # a slice of wider rows
        (drawn(1, 129)[:, :128], drawn(16, 128), True),  # one row has no step
        (drawn(16, 64), drawn(32, 64)[8:16], True),  # rows of a merged matrix
        (drawn(17, 64), drawn(16, 64), False),
        (drawn(0, 64), drawn(16, 64), False),
        (drawn(1, 80), drawn(16, 80), False),
        (drawn(2, 129)[:, :128], drawn(16, 128), False),
        (drawn(2, 256)[:, 1:129], drawn(16, 128), False),
        (drawn(64, 2).t(), drawn(16, 64), False),
        (drawn(1, 64), drawn(64, 16).t(), False),
        (drawn(1, 64), drawn(16, 128)[:, :64], False),
        (drawn(1, 64), drawn(1025)[1:].view(16, 64), False),
        (drawn(1, 64).half(), drawn(16, 64), False),
        (drawn(1, 64), drawn(16, 64).float(), False),
    ],
)
def test_what_the_kernel_serves(
    x: torch.Tensor, weight: torch.Tensor, can: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ext, "runs_on", lambda _: True)
    assert dense_rows.can_serve(x, weight) is can
    monkeypatch.setattr(ext, "runs_on", lambda _: False)
    assert not dense_rows.can_serve(x, weight)


def test_the_kernel_reads_rows_and_tokens_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.Tensor] = []

    def kernel(x: torch.Tensor, weight: torch.Tensor, urgent: bool, out: torch.Tensor) -> None:
        assert not urgent
        asked.extend((x, weight))
        out.copy_(F.linear(x, weight))

    monkeypatch.setattr(ext, "runs_on", lambda _: True)
    monkeypatch.setattr(ext, "operators", lambda: SimpleNamespace(dense_rows=kernel))
    x, weight = drawn(3, 320)[:, 128:256], drawn(48, 128)[16:]
    y = dense_rows.linear(x, weight)
    assert torch.equal(y, F.linear(x, weight))
    found = [(t.data_ptr(), t.stride()) for t in asked]
    assert found == [(t.data_ptr(), t.stride()) for t in (x, weight)]
    assert dense_rows.linear(drawn(2, 4, 128), weight).shape == (2, 4, 32)


def test_no_gpu_no_kernel() -> None:
    assert not ext.runs_on(torch.device("cpu"))
