"""A scheduler that picks the number of drafts of each step (`--scheduler-cls`).

What: vLLM's own schedule of draft lengths by batch size says which lengths exist, and their graphs
are captured; this class picks one of them for every step from what was accepted lately
(`spec.choice`). All requests of a step verify the same number, which is what KDA's and the
indexer's decode kernels and the captured graphs need.

What must stay true: the worker truncates the drafts of a step to the length that the step's
schedule names, so a request that sat out a step may hold more drafts than the others; they are cut
to the shortest, never padded. `AsyncScheduler` is the base: with a plain one vLLM would stop to
overlap scheduling with the step.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from glm_exl3 import envs
from glm_exl3.format.errors import GlmExl3Error
from glm_exl3.log import logger
from glm_exl3.spec.choice import Chooser, checked_lengths

MODES = ("ema", "off")
OPTIONS = ("mode", "lengths", "rate", "step_ms")

_log = logger(__name__)


def lengths_of(speculation: Any) -> tuple[int, ...]:
    """The draft lengths of the schedule, ascending, the largest being that of the configuration.

    Raises GlmExl3Error without a schedule or with lengths that do not end there.
    """
    schedule = getattr(speculation, "num_speculative_tokens_per_batch_size", None) or ()
    lengths = tuple(sorted({int(entry[2]) for entry in schedule}))
    largest = getattr(speculation, "num_speculative_tokens", None)
    if not lengths or lengths[-1] != largest:
        raise GlmExl3Error(
            code="adaptive-k",
            seen=f"draft lengths {list(lengths)} with num_speculative_tokens={largest}",
            why="graphs, look-ahead and KDA states are made for the lengths of "
            "num_speculative_tokens_per_batch_size, sized by the largest",
            fix="list every length there and set num_speculative_tokens to the largest",
        )
    return lengths


class AdaptiveScheduler(AsyncScheduler):
    """`AsyncScheduler` with one draft length per step, chosen by `chooser` in mode `ema`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.captured = lengths_of(self.vllm_config.speculative_config)
        self.chooser = Chooser(self.captured, envs.STEP_MS.read())
        self.mode = "ema"
        self.steps = dict.fromkeys(self.captured, 0)
        _log.info("adaptive k: one of %s drafts per step", ", ".join(map(str, self.captured)))

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        length = self.length()
        self.dynamic_sd_lookup = [length] * (self.max_num_running_reqs + 1)
        level([request for request in self.running if request.spec_token_ids])
        output = super().schedule(*args, **kwargs)
        if output.num_scheduled_tokens:
            self.steps[length] += 1
        return output

    def length(self) -> int:
        """Drafts to propose in the step that is scheduled next."""
        if self.mode == "off":
            return self.captured[-1]
        return self.chooser.choose(len(self.running))

    def make_spec_decoding_stats(self, *args: Any, **kwargs: Any) -> Any:
        invalid = kwargs.get("num_invalid_spec_tokens") or {}
        skipped = invalid.get(kwargs.get("request_id"), 0)
        self.chooser.observe(kwargs["num_draft_tokens"] - skipped, kwargs["num_accepted_tokens"])
        return super().make_spec_decoding_stats(*args, **kwargs)

    def drafting(self) -> dict[str, Any]:
        """Mode, lengths, steps by length, chance of survival by position, curve and rate."""
        return {
            "mode": self.mode,
            "captured": list(self.captured),
            "lengths": list(self.chooser.lengths),
            "steps": {str(k): count for k, count in self.steps.items()},
            "chances": [round(chance, 4) for chance in self.chooser.chances],
            "rate": self.chooser.rate,
            "step_ms": [list(point) for point in self.chooser.curve],
        }

    def retune(self, options: dict[str, Any]) -> dict[str, Any]:
        """Change what `options` names (`OPTIONS`) from the next step on; the new state.

        Raises ValueError, with nothing changed, for an unknown name or a value out of range.
        """
        unknown = sorted(set(options) - set(OPTIONS))
        if unknown:
            raise ValueError(f"{', '.join(unknown)}: known are {', '.join(OPTIONS)}")
        mode = options.get("mode", self.mode)
        if mode not in MODES:
            raise ValueError(f"mode {mode!r}: one of {', '.join(MODES)}")
        old = self.chooser
        rate = float(options.get("rate", old.rate))
        if not 0 < rate <= 1:
            raise ValueError(f"rate {rate}: greater than 0, at most 1")
        curve = old.curve
        if "step_ms" in options:
            curve = envs.STEP_MS.parse(str(options["step_ms"]))
        lengths = checked_lengths(options.get("lengths", old.lengths), self.captured)
        self.chooser = Chooser(lengths, curve, rate, old.chances, old.last)
        self.mode = mode
        return self.drafting()


def level(requests: list[Any]) -> None:
    """Cut the drafts of all requests to the shortest, so that the step stays uniform."""
    shortest = min((len(request.spec_token_ids) for request in requests), default=0)
    for request in requests:
        if len(request.spec_token_ids) > shortest:
            request.spec_token_ids = request.spec_token_ids[:shortest]
