"""DFlash2 with lookup: per request the one or the other proposes, inside the drafter's CUDA graph.

What: the drafter drafts as ever, its query is 1 + its own number of tokens; behind it a lookup
(`spec.lookup`) overwrites the rows of requests whose last tokens occurred before. Both may propose
different numbers of tokens: the target verifies the larger one, which also sizes look-ahead and the
KDA states, and where the drafter has fewer its last token is repeated.

Why a subclass: DFlash2's `_generate_draft` is what its graphs capture, and everything the lookup
reads (tokens and lengths of requests, which request a row is) has fixed addresses.

What must stay true: a proposal that was not sampled has a point mass as its distribution, else
rejection sampling would change the text of sampled requests. Without cached draft logits vLLM takes
every draft for one; with them the lookup writes it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import DFlash2Speculator

from glm_exl3 import envs
from glm_exl3.format.errors import GlmExl3Error
from glm_exl3.log import logger
from glm_exl3.spec.lookup import Lookup

_log = logger(__name__)


def own_tokens(config: Any, wanted: int) -> int:
    """How many tokens the drafter drafts: `wanted`, or what the step verifies and its block hold.

    Raises GlmExl3Error when that is not between 1 and what a step verifies or leaves the block.
    """
    verified = int(config.num_speculative_tokens)
    block = int(getattr(config.draft_model_config.hf_config, "block_size", 0) or verified + 1)
    own = wanted or min(verified, block - 1)
    if not 1 <= own <= min(verified, block - 1):
        raise GlmExl3Error(
            code="draft-tokens",
            seen=f"{envs.DRAFTER_TOKENS.name}={wanted}; a step verifies {verified} tokens and the "
            f"drafter was trained for blocks of {block}",
            why="the drafter's first token is the last one of the text, the others are drafts",
            fix=f"use 1 to {min(verified, block - 1)}",
        )
    return own


def narrowed(vllm_config: Any, own: int) -> Any:
    """The configuration as the drafter sees it: `own` tokens, in every step."""
    config, speculation = copy.copy(vllm_config), copy.copy(vllm_config.speculative_config)
    speculation.num_speculative_tokens = own
    speculation.num_speculative_tokens_per_batch_size = None
    config.speculative_config = speculation
    return config


class HybridSpeculator(DFlash2Speculator):
    """DFlash2 whose rows are overwritten by lookups of enough matching tokens."""

    _speculator_name = "DFlash2 with lookup"

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        self.verified = int(vllm_config.num_speculative_tokens)
        own = own_tokens(vllm_config.speculative_config, envs.DRAFTER_TOKENS.read())
        super().__init__(narrowed(vllm_config, own), device)
        self.req_states = req_states
        least = envs.HYBRID_MATCH.read()
        self.lookup = Lookup(
            self.max_num_reqs, req_states.max_model_len, self.verified, device, least
        )
        self.repeated = torch.zeros(
            self.max_num_reqs, self.verified - own, dtype=torch.int64, device=device
        )
        self.draft_logits: Tensor | None = self._widened(self.draft_logits, vllm_config)
        _log.info(
            "hybrid drafting: %d tokens verified, DFlash2 drafts %d, lookup from %d matching on",
            self.verified, own, least,
        )  # fmt: skip

    def _widened(self, narrow: Tensor | None, vllm_config: Any) -> Tensor | None:
        """The cache of draft logits for all tokens that a step verifies."""
        if narrow is None or narrow.shape[1] == self.verified:
            return narrow
        kind, fill = self.draft_logits_spec(vllm_config)
        shape = (narrow.shape[0], self.verified, narrow.shape[2])
        return torch.full(shape, fill, dtype=kind, device=narrow.device)

    def _num_graph_context_tokens(self, num_reqs: int) -> int:
        return min(num_reqs * (self.verified + 1), self.max_num_tokens)

    def _generate_draft(self, num_reqs: int, *args: Any, **kwargs: Any) -> None:
        super()._generate_draft(num_reqs, *args, **kwargs)
        steps = self.num_speculative_steps
        requests = self.sample_idx_mapping[: num_reqs * steps : steps]
        states = self.req_states
        self.lookup.propose(
            states.all_token_ids.gpu, states.total_len.gpu, requests, self.draft_tokens
        )
        if self.draft_logits is not None:
            self.lookup.point_masses(
                self.draft_logits,
                self.candidate_sampler.cached_candidate_ids,
                self.repeated,
                requests,
            )

    def propose(self, input_batch: Any, *args: Any, **kwargs: Any) -> Tensor:
        drafted = super().propose(input_batch, *args, **kwargs)
        return self.lookup.drafts[: drafted.shape[0]]
