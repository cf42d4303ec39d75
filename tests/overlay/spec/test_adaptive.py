"""The adaptive scheduler without an engine: lengths, levelling, retuning, and the route to it."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from glm_exl3.format.errors import GlmExl3Error
from glm_exl3.patches import drafting_control, speculation
from glm_exl3.spec import adaptive, route
from glm_exl3.spec.adaptive import AdaptiveScheduler
from glm_exl3.spec.choice import Chooser

CURVE = ((1, 9.9), (8, 24.4))


def scheduler() -> AdaptiveScheduler:
    made = AdaptiveScheduler.__new__(AdaptiveScheduler)
    made.captured, made.mode = (2, 4, 7), "ema"
    made.chooser, made.steps = Chooser((2, 4, 7), CURVE), {2: 0, 4: 0, 7: 0}
    made.running = []
    return made


def schedule(*lengths: int) -> list[list[int]]:
    return [[i, i, k] for i, k in enumerate(lengths, start=1)]


def test_lengths_come_from_the_schedule_that_graphs_are_captured_for() -> None:
    config = SimpleNamespace(
        num_speculative_tokens_per_batch_size=schedule(7, 4, 2, 4), num_speculative_tokens=7
    )
    assert adaptive.lengths_of(config) == (2, 4, 7)


@pytest.mark.parametrize(("lengths", "largest"), [((), 7), ((2, 4), 7), ((2, 8), 7)])
def test_a_schedule_that_does_not_end_at_the_largest_length_is_refused(
    lengths: tuple[int, ...], largest: int
) -> None:
    config = SimpleNamespace(
        num_speculative_tokens_per_batch_size=schedule(*lengths) or None,
        num_speculative_tokens=largest,
    )
    with pytest.raises(GlmExl3Error, match="num_speculative_tokens"):
        adaptive.lengths_of(config)


def test_drafts_of_a_request_that_sat_out_a_step_are_cut_and_none_is_padded() -> None:
    requests = [SimpleNamespace(spec_token_ids=[-1] * k) for k in (7, 2, 2)]
    placeholders = requests[0].spec_token_ids
    adaptive.level(requests)
    assert [len(request.spec_token_ids) for request in requests] == [2, 2, 2]
    assert len(placeholders) == 7, "the list may be shared between requests"
    adaptive.level([])


def test_off_drafts_the_largest_length_whatever_survives() -> None:
    made = scheduler()
    made.chooser.chances = [0.0] * 7
    assert made.length() == 2
    made.retune({"mode": "off"})
    assert made.length() == 7


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "on"}, {"lengths": [3]}, {"lengths": []}, {"rate": 0}, {"rate": 2},
        {"step_ms": "1:0,2:3"}, {"k": 3}, {"lengths": [2], "rate": 5},
        {"mode": "off", "lengths": 4},
    ],
)  # fmt: skip
def test_what_cannot_be_set_changes_nothing(options: dict[str, Any]) -> None:
    made = scheduler()
    before = made.drafting()
    with pytest.raises((TypeError, ValueError)):
        made.retune(options)
    assert made.drafting() == before


def test_retuning_keeps_what_was_learnt() -> None:
    made = scheduler()
    made.chooser.observe(7, 0)
    chances = list(made.chooser.chances)
    state = made.retune({"lengths": [4, 2], "rate": 0.5, "step_ms": "1:1,2:2"})
    assert made.chooser.chances == chances
    assert (state["lengths"], state["rate"], state["step_ms"]) == (
        [2, 4],
        0.5,
        [[1, 1.0], [2, 2.0]],
    )


def test_every_length_is_listed_behind_the_largest_batch_where_graphs_are_captured() -> None:
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup as theirs

    original = getattr(theirs, "__wrapped__", theirs)
    plain = original(schedule(7, 4, 2), 1, 7)
    assert plain == [0, 7]
    listed = speculation.with_every_length(original)(schedule(7, 4, 2), 1, 7)
    assert listed[:2] == plain
    assert set(listed[1:]) == {2, 4, 7}


class Core:
    """What the route reaches over vLLM's utility call."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.engine_core = self

    async def call_utility_async(self, name: str, options: dict[str, Any]) -> Any:
        assert name == "glm_exl3_drafting"
        return drafting_control.drafting(self, options)


def ask(core: Core, method: str, body: bytes = b"", key: str | None = "secret") -> tuple[int, Any]:
    made = route.DraftingRoute()
    args: Any = SimpleNamespace(api_key=[key] if key else None)
    asyncio.run(made.init_state(core, None, args))
    return asyncio.run(made.reply(method, body))


def test_the_route_shows_and_changes_the_drafting() -> None:
    core = Core(scheduler())
    assert ask(core, "GET")[1]["lengths"] == [2, 4, 7]
    status, state = ask(core, "PUT", json.dumps({"lengths": [2, 4]}).encode())
    assert (status, state["lengths"]) == (200, [2, 4])
    assert ask(core, "GET")[1] == state


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"{}", b'{"rate": 9}', b'{"x": 1}', b" " * 5000]
)
def test_the_route_refuses_what_it_cannot_read(body: bytes) -> None:
    core = Core(scheduler())
    before = core.scheduler.drafting()
    assert ask(core, "PUT", body)[0] == 400
    assert core.scheduler.drafting() == before


def test_a_server_without_a_key_has_no_such_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    status, body = ask(Core(scheduler()), "GET", key=None)
    assert (status, "VLLM_API_KEY" in body["error"]) == (403, True)


def test_a_launch_without_adaptive_k_says_so() -> None:
    status, body = ask(Core(object()), "GET")
    assert (status, "ADAPTIVE_K" in body["error"]) == (409, True)


def test_vllm_asks_for_the_key_before_the_route_is_reached() -> None:
    from fastapi import FastAPI
    from fastapi.testclient import TestClient
    from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

    app, made = FastAPI(), route.plugin()
    args: Any = SimpleNamespace(api_key=["secret"])
    asyncio.run(made.init_state(Core(scheduler()), None, args))
    made.attach_router(app)
    app.add_middleware(AuthenticationMiddleware, tokens=["secret"])
    client = TestClient(app)
    for headers, status in (({}, 401), ({"Authorization": "Bearer no"}, 401)):
        assert client.get(route.PATH, headers=headers).status_code == status
        assert client.put(route.PATH, headers=headers, json={"mode": "off"}).status_code == status
    right = {"Authorization": "Bearer secret"}
    assert client.get(route.PATH, headers=right).json()["mode"] == "ema"
    assert client.put(route.PATH, headers=right, json={"mode": "off"}).json()["mode"] == "off"
