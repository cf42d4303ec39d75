"""Which layers of a model are steered, and that without a vector none is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from glm_exl3.format.donor import EditError
from glm_exl3.quant import edits


def write_vector(path: Path, layers: tuple[int, ...], width: int) -> None:
    writer = gguf.GGUFWriter(path, "controlvector")
    writer.add_string("glp.mode", "project")
    writer.add_string("glp.hook_point", "residual_stream_post_layer")
    for layer in layers:
        values = np.random.default_rng(layer).normal(size=width)
        writer.add_tensor(
            f"direction.{layer}", (values / np.linalg.norm(values)).astype(np.float32)
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.slow
def test_without_settings_nothing_is_built_in(
    pristine: Callable[[str], Path], build: Callable[..., Any]
) -> None:
    """The layers are vLLM's own, so they compute the same bits."""
    from vllm.models.glm5next.common.model import Glm5NextDecoderLayer

    model = build(pristine("tr3"))
    layers = model.language_model.model.layers
    assert {type(layer) for layer in layers} == {Glm5NextDecoderLayer}
    assert edits.registered() == ()
    assert not [name for name, _ in model.named_buffers() if "steer" in name]


@pytest.mark.slow
def test_a_layer_behind_a_steered_one_projects_what_it_gets(
    pristine: Callable[[str], Path],
    build: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from glm_exl3.models.steer import SteeredLayer

    write_vector(tmp_path / "v.gguf", (1, 3), 4 * 256)
    monkeypatch.setenv("GLM_EXL3_STEER_VECTOR", str(tmp_path / "v.gguf"))
    monkeypatch.setenv("GLM_EXL3_STEER_ALPHA", "1")
    monkeypatch.setenv("GLM_EXL3_STEER_LAYERS", "1,3")
    model = build(pristine("tr3"))
    layers = model.language_model.model.layers
    assert [isinstance(layer, SteeredLayer) for layer in layers] == [False, False, True, True]
    streams = torch.randn(2, 4, 256).bfloat16()
    post, comb = torch.zeros(2, 4, 1), torch.eye(4).expand(2, 4, 4).contiguous()
    left = layers[3].hc_post(torch.zeros(2, 256).bfloat16(), streams, post, comb)
    along = left.flatten(1).float() @ layers[3].steer_after
    assert float(along.abs().max()) <= 1e-2 * float(streams.flatten(1).float().norm(dim=1).max())
    assert hasattr(layers[2], "steer_before") and not hasattr(layers[2], "steer_after")

    monkeypatch.setenv("GLM_EXL3_STEER_LAYERS", "1-3")
    with pytest.raises(EditError, match=r"no direction for layer\(s\) 2"):
        build(pristine("tr3"))
