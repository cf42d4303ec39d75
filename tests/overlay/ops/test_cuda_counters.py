"""Which counters a call gets, with the device and its streams replaced by stand-ins."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from glm_exl3.ops import cuda_backend


@pytest.fixture
def streams(monkeypatch):
    state = SimpleNamespace(current=1, capturing=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=state.current)
    )
    monkeypatch.setattr(cuda_backend, "_counters", {})
    return state


def test_streams_and_matrices_have_their_own_counters(streams):
    first, second = torch.zeros(4), torch.zeros(4)
    mine = cuda_backend._zeroed_counters(first, 8)
    assert cuda_backend._zeroed_counters(first, 8) is mine
    assert cuda_backend._zeroed_counters(second, 8) is not mine
    streams.current = 2
    assert cuda_backend._zeroed_counters(first, 8) is not mine


def test_captures_use_counters_that_an_eager_call_zeroed(streams):
    matrix = torch.zeros(4)
    eager = cuda_backend._zeroed_counters(matrix, 8)
    streams.capturing = True
    captured = cuda_backend._zeroed_counters(matrix, 8)
    assert captured is not eager
    assert cuda_backend._zeroed_counters(matrix, 8) is captured


def test_a_capture_without_counters_zeroes_its_own(streams):
    matrix = torch.zeros(4)
    streams.capturing = True
    first = cuda_backend._zeroed_counters(matrix, 8)
    assert cuda_backend._zeroed_counters(matrix, 8) is not first
    assert not cuda_backend._counters


def test_outgrown_counters_stay_alive_for_graphs(streams):
    matrix = torch.zeros(4)
    small = cuda_backend._zeroed_counters(matrix, 8)
    assert cuda_backend._zeroed_counters(matrix, 16).numel() == 16
    assert any(kept is small for kept in cuda_backend._outgrown)
