"""The requests of one step as host numbers, shared by the back ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Requests:
    """Boundaries of one step.

    starts: `count + 1` token offsets; lengths: tokens of each request after the step, its own
    included; of_token: int64 `[tokens]`, the request of each token.
    """

    starts: list[int]
    lengths: list[int]
    of_token: Tensor

    @property
    def count(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        return self.starts[-1]


def requests_of(common: Any) -> Requests:
    """Read vLLM's `CommonAttentionMetadata`; its tensors are on the CPU, so this copies little."""
    count = int(common.num_reqs)
    starts = common.query_start_loc[: count + 1].tolist()
    lengths = common.seq_lens[:count].tolist()
    sizes = torch.tensor([starts[i + 1] - starts[i] for i in range(count)])
    return Requests(starts, lengths, torch.repeat_interleave(torch.arange(count), sizes))
