"""Lookup of proposals on the device: `ref.lookup` in three launches without a host sync.

What: `scan` finds, per request and slice of its text, the best place where the end of the text
occurred before; `settle` picks the best slice and writes the proposals; `point_masses` gives them
their probabilities. Grids depend on the buffers' shapes only, so a CUDA graph can hold them; slices
behind the end of a text return at once. The text is read once: tokens in front of a place are only
loaded where the place itself holds the last token, since the buffer may be host memory.

What must stay true: a score is match * 2**32 + position, so that one maximum gives the longest
match and, among those, the latest, whatever order slices finish in.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm_exl3.ref import lookup as ref

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: ANN001, ANN202, PLR0913, PLR0917 - Triton code is untyped

MAX_SLICES = 256
MIN_SLICE = 1024


@triton.jit
def _scan_kernel(
    tokens, token_stride, lengths, requests, request_stride, scores, score_stride,
    MAX_MATCH: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    out = scores + row.to(tl.int64) * score_stride + part
    request = tl.load(requests + row * request_stride).to(tl.int64)
    length = tl.load(lengths + request, mask=request >= 0, other=0).to(tl.int64)
    if part * SLICE >= length - 1:
        tl.store(out, tl.zeros((), tl.int64))
        return
    text = tokens + request * token_stride
    place = part * SLICE + tl.arange(0, SLICE).to(tl.int64)
    alive = place < length - 1
    match = tl.zeros([SLICE], tl.int64)
    for back in range(MAX_MATCH):
        alive = alive & (place >= back)
        wanted = tl.load(text + length - 1 - back, mask=length > back, other=-1)
        seen = tl.load(text + place - back, mask=alive, other=-2)
        alive = alive & (seen == wanted)
        match += alive.to(tl.int64)
    score = tl.where(match > 0, match * 4294967296 + place, 0)
    tl.store(out, tl.max(score, axis=0))


@triton.jit
def _settle_kernel(
    tokens, token_stride, lengths, requests, request_stride, scores, score_stride,
    drafted, drafts, taken, least, slices,
    OWN: tl.constexpr, STEPS: tl.constexpr, STEPS_PADDED: tl.constexpr, SLICES_PADDED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    request = tl.load(requests + row * request_stride).to(tl.int64)
    if request < 0:
        tl.store(taken + row, -1)
        return
    part = tl.arange(0, SLICES_PADDED)
    best = tl.max(
        tl.load(scores + row.to(tl.int64) * score_stride + part, mask=part < slices, other=0),
        axis=0,
    )
    match = best // 4294967296
    wanted = tl.load(least)
    start = best % 4294967296 + 1
    length = tl.load(lengths + request).to(tl.int64)
    step = tl.arange(0, STEPS_PADDED)
    inside = step < STEPS
    take = match + tl.zeros_like(step) >= wanted
    period = tl.maximum(length - start, 1)
    looked_up = tl.load(
        tokens + request * token_stride + start + step % period, mask=inside & take, other=0
    ).to(tl.int64)
    own = tl.load(drafted + row * OWN + tl.minimum(step, OWN - 1), mask=inside, other=0)
    tl.store(drafts + row * STEPS + step, tl.where(take, looked_up, own), mask=inside)
    tl.store(taken + row, (match >= wanted).to(tl.int32))


@triton.jit
def _point_mass_kernel(
    logits, logits_stride_0, logits_stride_1, candidates, repeated, requests, request_stride,
    drafts, taken,
    OWN: tl.constexpr, STEPS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PADDED: tl.constexpr,
):  # fmt: skip
    row, step = tl.program_id(0), tl.program_id(1)
    request = tl.load(requests + row * request_stride).to(tl.int64)
    if request < 0:
        return
    token = tl.load(drafts + row * STEPS + step)
    line = logits + request * logits_stride_0 + step * logits_stride_1
    if step >= OWN:
        memory = repeated + request * (STEPS - OWN) + step - OWN
        old = tl.load(memory)
        tl.store(line + old, float("-inf"), mask=old != token)
        tl.store(line + token, 0.0)
        tl.store(memory, token)
    elif tl.load(taken + row) > 0:
        place = tl.arange(0, WIDTH_PADDED)
        inside = place < WIDTH
        places = candidates + (request * OWN + step) * WIDTH + place
        olds = tl.load(places, mask=inside, other=0)
        tl.store(line + olds, float("-inf"), mask=inside & (olds != token))
        tl.store(line + token, 0.0)
        tl.store(places, tl.zeros_like(olds) + token, mask=inside)


class Lookup:
    """Buffers of one device for `rows` requests with texts of at most `length` tokens.

    `least` tokens must match; the number lies on the device, so that graphs follow `require`.
    """

    def __init__(
        self, rows: int, length: int, steps: int, device: torch.device, least: int
    ) -> None:
        self.slice = max(MIN_SLICE, triton.next_power_of_2(-(-length // MAX_SLICES)))
        self.slices = -(-length // self.slice)
        self.scores = torch.zeros(rows, self.slices, dtype=torch.int64, device=device)
        self.drafts = torch.zeros(rows, steps, dtype=torch.int64, device=device)
        self.taken = torch.full((rows,), -1, dtype=torch.int32, device=device)
        self.least = torch.tensor(least, dtype=torch.int32, device=device)
        self.on_cpu = device.type == "cpu"

    def require(self, least: int) -> None:
        """Propose from `least` matching tokens on, captured graphs included."""
        self.least.fill_(least)

    def propose(self, tokens: Tensor, lengths: Tensor, requests: Tensor, drafted: Tensor) -> Tensor:
        """`ref.lookup.propose` into `drafts`; requests `[R]` may be strided, drafted may not."""
        count, steps = requests.shape[0], self.drafts.shape[1]
        if self.on_cpu:
            drafts, taken = self.drafts[:count], self.taken[:count]
            ref.propose(tokens, lengths, requests, drafted, drafts, taken, int(self.least))
            return drafts
        _scan_kernel[(count, self.slices)](
            tokens, tokens.stride(0), lengths, requests, requests.stride(0),
            self.scores, self.slices, MAX_MATCH=ref.MAX_MATCH, SLICE=self.slice, num_warps=4,
        )  # fmt: skip
        _settle_kernel[(count,)](
            tokens, tokens.stride(0), lengths, requests, requests.stride(0),
            self.scores, self.slices, drafted, self.drafts, self.taken, self.least, self.slices,
            OWN=drafted.shape[1], STEPS=steps, STEPS_PADDED=triton.next_power_of_2(steps),
            SLICES_PADDED=triton.next_power_of_2(self.slices), num_warps=1,
        )  # fmt: skip
        return self.drafts[:count]

    def point_masses(
        self, logits: Tensor, candidates: Tensor, repeated: Tensor, requests: Tensor
    ) -> None:
        """`ref.lookup.point_masses` for the rows of the last `propose`."""
        count, steps = requests.shape[0], self.drafts.shape[1]
        if self.on_cpu:
            drafts, taken = self.drafts[:count], self.taken[:count]
            ref.point_masses(logits, candidates, repeated, requests, drafts, taken)
            return
        width = candidates.shape[2]
        _point_mass_kernel[(count, steps)](
            logits, logits.stride(0), logits.stride(1), candidates, repeated,
            requests, requests.stride(0), self.drafts, self.taken,
            OWN=candidates.shape[1], STEPS=steps, WIDTH=width,
            WIDTH_PADDED=triton.next_power_of_2(width), num_warps=1,
        )  # fmt: skip
