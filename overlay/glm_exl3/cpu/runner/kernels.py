"""Functions in the form in which vLLM launches a Triton kernel, `kernel[grid](...)`."""

from __future__ import annotations

from glm_exl3.cpu.replacements import Kernel
from glm_exl3.cpu.runner import inputs, rejection, sampling, states

HAS_KERNELS = True

ranks = Kernel(sampling.ranks)
fill_logprob_token_ids = Kernel(sampling.fill_logprob_token_ids)
next_power_of_2 = staticmethod(sampling.next_power_of_2)
grammar_bitmask = Kernel(sampling.apply_grammar_bitmask)
flatten_sampled = Kernel(rejection.flatten_sampled)
scatter_num_accepted = Kernel(inputs.scatter_num_accepted)
fill_num_accepted = Kernel(inputs.fill_num_accepted)
advance_state_columns = Kernel(states.advance_state_columns)
align_block_table = Kernel(states.align_block_table)
zero_blocks = Kernel(states.zero_blocks)
