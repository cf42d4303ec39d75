"""How many drafts the target accepts: for `status`, and for the question whether drafting works.

A drafter that fits nothing costs time and changes no answer, so nothing else would notice it. After
the first answer a small panel of texts is continued; when hardly any of the drafted tokens was
accepted, the launch is given up with that reason. The counters are vLLM's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from glm_launch.errors import Finding, LaunchFailedError
from glm_launch.plan import LaunchPlan

if TYPE_CHECKING:
    from glm_bench.metrics import DraftCounters

COUNTER = "vllm:spec_decode_num_drafts"
TOKENS = 48
MIN_DRAFTED = 100
TIMEOUT_S = 300.0
METRICS_TIMEOUT_S = 10.0
PANEL = (
    "def read_lines(path):\n    with open(path) as stream:\n        return",
    "The following example shows how to open a file and read it line by line:\n\n",
    "To install the package, run the following command in a terminal:\n\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    '{"name": "example", "version": "1.0.0", "dependencies": {',
    "The function returns a list of all the names that",
)


@dataclass(frozen=True)
class Acceptance:
    """Drafted and accepted tokens over a number of verify steps."""

    steps: int
    drafted: int
    accepted: int
    per_position: tuple[int, ...] = ()

    @classmethod
    def of(cls, counters: DraftCounters) -> Acceptance:
        return cls(
            counters.drafts, counters.draft_tokens, counters.accepted_tokens, counters.per_position
        )

    @property
    def share(self) -> float:
        """Accepted over drafted tokens; 0 when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def per_step(self) -> float:
        return self.accepted / self.steps if self.steps else 0.0

    def as_json(self) -> dict[str, Any]:
        positions = [round(count / self.steps, 4) for count in self.per_position if self.steps]
        return {
            "steps": self.steps, "drafted": self.drafted, "accepted": self.accepted,
            "share": round(self.share, 4), "accepted_per_step": round(self.per_step, 3),
            "share_by_position": positions,
        }  # fmt: skip

    def __str__(self) -> str:
        if not self.steps:
            return "no token drafted yet"
        shares = " ".join(f"{count / self.steps:.2f}" for count in self.per_position)
        text = (
            f"{self.per_step:.2f} of {self.drafted / self.steps:.1f} drafts accepted a step "
            f"({self.share:.0%} of {self.drafted:,} tokens)"
        )
        return f"{text}, by position {shares}" if shares else text


def read(base_url: str, key: str | None = None) -> DraftCounters | None:
    """The engine's draft counters since its start; None where it does not have them."""
    import httpx

    from glm_bench.metrics import parse

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        reply = httpx.get(f"{base_url}/metrics", headers=headers, timeout=METRICS_TIMEOUT_S)
    except httpx.HTTPError:
        return None
    if reply.status_code != 200 or COUNTER not in reply.text:
        return None
    return parse(reply.text)


def of_running(plan: LaunchPlan, secrets: Mapping[str, str]) -> Acceptance | None:
    """Acceptance since the start of what runs; None without drafting or counters."""
    if plan.drafting == "none":
        return None
    counters = read(plan.base_url, secrets.get("VLLM_API_KEY"))
    return None if counters is None else Acceptance.of(counters)


def warm_up(plan: LaunchPlan, key: str | None) -> str:
    """Continue the panel's texts greedily; empty, or why that was not possible."""
    import httpx

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body = {
        "model": plan.served_name, "prompt": list(PANEL), "max_tokens": TOKENS,
        "temperature": 0, "ignore_eos": True,
    }  # fmt: skip
    try:
        reply = httpx.post(
            f"{plan.base_url}/v1/completions", json=body, headers=headers, timeout=TIMEOUT_S
        )
    except httpx.HTTPError as error:
        return f"{type(error).__name__}: {error}"
    return "" if reply.status_code == 200 else f"HTTP {reply.status_code}: {reply.text[:200]}"


def judge(found: Acceptance, floor: float) -> list[Finding]:
    """A finding when too few of the panel's drafts were accepted, or none was made."""
    if found.drafted >= MIN_DRAFTED and found.share >= floor:
        return []
    seen = f"{found.accepted} of {found.drafted:,} drafted tokens were accepted over the warm-up"
    if found.drafted < MIN_DRAFTED:
        seen = f"only {found.drafted} tokens were drafted over the whole warm-up"
    return [
        Finding(
            "degenerate-drafting",
            f"{seen} (MIN_ACCEPTANCE={floor:g})",
            "drafting this bad makes the model slower than none; a wrong or damaged drafter does "
            "that, or attention that is causal inside its block",
            "check DFLASH_MODEL and its revision; SPEC_METHOD=none serves without drafting, "
            "MIN_ACCEPTANCE=0 without this check",
        )
    ]


def require(
    plan: LaunchPlan, secrets: Mapping[str, str], floor: float, say: Callable[[str], None]
) -> None:
    """Raise `LaunchFailedError` when drafting does not work; says what it found otherwise."""
    if plan.drafting == "none" or not floor:
        return
    key = secrets.get("VLLM_API_KEY")
    before = read(plan.base_url, key)
    said = warm_up(plan, key) if before is not None else "the engine tells no draft counters"
    after = read(plan.base_url, key) if not said else None
    if before is None or after is None:
        say(f"acceptance not checked: {said or 'the engine tells no draft counters'}")
        return
    gained = after.since(before)
    found = Acceptance(gained.drafts, gained.draft_tokens, gained.accepted_tokens)
    if findings := judge(found, floor):
        raise LaunchFailedError(*findings)
    say(f"drafting {plan.drafting}: {found}")
