"""Draft counters from vLLM's `/metrics` page, and the acceptance between two readings."""

from __future__ import annotations

import re
from dataclasses import dataclass

import httpx

from glm_bench.client import Endpoint

_LINE = re.compile(r"^vllm:spec_decode_(\w+?)(?:_total)?(?:\{(.*)\})?\s+([-+.\deE]+|NaN)$")
_POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True)
class DraftCounters:
    """Totals since the server started; `per_position[i]` counts accepted drafts at position i."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    per_position: tuple[int, ...] = ()

    def since(self, before: DraftCounters) -> DraftCounters:
        """What was added after `before`."""
        earlier = before.per_position + (0,) * len(self.per_position)
        return DraftCounters(
            self.drafts - before.drafts,
            self.draft_tokens - before.draft_tokens,
            self.accepted_tokens - before.accepted_tokens,
            tuple(now - then for now, then in zip(self.per_position, earlier, strict=False)),
        )

    @property
    def acceptance(self) -> float | None:
        """Share of draft tokens accepted; None when nothing was drafted."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else None

    @property
    def acceptance_per_position(self) -> list[float]:
        """Share of drafts accepted at each position."""
        return [count / self.drafts for count in self.per_position] if self.drafts else []


def parse(page: str) -> DraftCounters:
    """Read the page; counters of several engines are added up, absent ones are zero."""
    totals: dict[str, float] = {}
    positions: dict[int, float] = {}
    for line in page.splitlines():
        match = _LINE.match(line)
        if not match or match[1].endswith("_created"):
            continue
        position = _POSITION.search(match[2] or "")
        value = float(match[3])
        if match[1] == "num_accepted_tokens_per_pos" and position:
            positions[int(position[1])] = positions.get(int(position[1]), 0.0) + value
        else:
            totals[match[1]] = totals.get(match[1], 0.0) + value
    return DraftCounters(
        int(totals.get("num_drafts", 0)),
        int(totals.get("num_draft_tokens", 0)),
        int(totals.get("num_accepted_tokens", 0)),
        tuple(int(positions[index]) for index in sorted(positions)),
    )


def read(endpoint: Endpoint) -> DraftCounters:
    """The counters of a server; all zero where it has no such page."""
    try:
        reply = httpx.get(endpoint.metrics_url, headers=endpoint.headers, timeout=10)
    except httpx.TransportError:
        return DraftCounters()
    return parse(reply.text) if reply.status_code == 200 else DraftCounters()
