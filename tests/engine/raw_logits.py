"""Every logit of greedy answers by one engine configuration, as the bits that the model gave.

    python raw_logits.py JOB.json RESULT.npz

The job holds `engine` (keyword arguments of `vllm.LLM`), `prompts` and `max_tokens`. The result has
one array per call of the model's head, in order, bf16 as uint16, and under `facts` where the plugin
came from and which of its modules were imported.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def bits(tensor: Any) -> np.ndarray:
    """The tensor's memory as unsigned integers of its width."""
    import torch

    width = {2: torch.uint16, 4: torch.uint32}[tensor.element_size()]
    found: np.ndarray = tensor.detach().cpu().contiguous().view(width).numpy().copy()
    return found


def collect(job: dict[str, Any]) -> tuple[list[np.ndarray], list[list[int]]]:
    """Logits of every call, and the tokens that were chosen."""
    from vllm import LLM, SamplingParams

    from glm_exl3.models.glm5next import Exl3Glm5NextForConditionalGeneration as Model

    kept: list[np.ndarray] = []
    plain = Model.compute_logits

    def keeping(self: Any, *arguments: Any, **named: Any) -> Any:
        logits = plain(self, *arguments, **named)
        kept.append(bits(logits))
        return logits

    Model.compute_logits = keeping
    defaults = {"enforce_eager": True, "seed": 0, "max_model_len": 1024}
    defaults |= {"language_model_only": True, "enable_prefix_caching": False}
    llm = LLM(**defaults, **job["engine"])
    kept.clear()
    parameters = SamplingParams(
        max_tokens=job["max_tokens"], temperature=0, ignore_eos=True, prompt_logprobs=0
    )
    asked = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    outputs = [llm.generate([one], parameters, use_tqdm=False)[0] for one in asked]
    return kept, [list(output.outputs[0].token_ids) for output in outputs]


def main() -> None:
    kept, tokens = collect(json.loads(Path(sys.argv[1]).read_text()))
    import glm_exl3

    imported = sorted(name for name in sys.modules if name.startswith("glm_exl3."))
    facts = {"package": str(glm_exl3.__file__), "imported": imported, "tokens": tokens}
    arrays = {str(number): array for number, array in enumerate(kept)}
    np.savez(sys.argv[2], facts=json.dumps(facts), **arrays)


if __name__ == "__main__":
    main()
