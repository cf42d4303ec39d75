"""`parity.py` with the same steering in transformers as in the engine.

    GLM_EXL3_STEER_VECTOR=FILE ... python steered_parity.py JOB.json RESULT.json

The file is read here by itself, with a projection written anew, so an engine that steers another
tensor, another layer or with another sign gives other logits.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gguf
import torch

import parity


def steer_transformers() -> None:
    """Every decoder layer of transformers' model projects what it returns.

    Called when the engine exists: its plugin lets transformers' model be imported without the
    compiled part of torchvision.
    """
    from transformers.models.glm5_next import modeling_glm5_next as modeling

    alpha = float(os.environ["GLM_EXL3_STEER_ALPHA"])
    reader = gguf.GGUFReader(os.environ["GLM_EXL3_STEER_VECTOR"])
    directions = {
        int(tensor.name.split(".")[1]): torch.tensor(tensor.data) for tensor in reader.tensors
    }
    original = modeling.Glm5NextTextDecoderLayer.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        streams, rest = original(self, *args, **kwargs)
        direction = directions.get(self.self_attn.layer_idx)
        if direction is None:
            return streams, rest
        wide = streams.float()
        axis = direction.view(wide.shape[-2:])
        along = (wide * axis).sum((-1, -2), keepdim=True)
        return (wide - alpha * along * axis).to(streams.dtype), rest

    modeling.Glm5NextTextDecoderLayer.forward = forward


def served_logprobs(*arguments: Any) -> Any:
    found = plain(*arguments)
    steer_transformers()
    return found


if __name__ == "__main__":
    plain, parity.served_logprobs = parity.served_logprobs, served_logprobs
    parity.main()
