"""`status` tells acceptance; a launch whose drafts are hardly ever accepted is given up."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm_launch import acceptance
from glm_launch.acceptance import Acceptance, judge, require
from glm_launch.errors import LaunchFailedError
from glm_launch.plan import LaunchPlan


@dataclass
class Engine:
    """An engine that drafts `drafted` tokens of which `accepted` survive, whenever it is asked."""

    drafted: int = 700
    accepted: int = 140
    page: bool = True
    status: int = 200
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)

    def counters(self) -> str:
        rounds = 3 + len(self.asked)
        names = {"drafts": 100, "draft_tokens": self.drafted, "accepted_tokens": self.accepted}
        lines = [f'vllm:spec_decode_num_{name}_total{{engine="0"}} {float(value * rounds)}'
                 for name, value in names.items()]  # fmt: skip
        lines += [f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{i}"}}'
                  f" {float(count * rounds)}" for i, count in enumerate((60, 20))]  # fmt: skip
        return "\n".join(lines) if self.page else "vllm:num_requests_running 0.0"


@pytest.fixture
def engine() -> Iterator[tuple[Engine, str]]:
    played = Engine()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            played.keys.add(self.headers["Authorization"])
            self.reply(200, played.counters())

        def do_POST(self) -> None:
            played.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.reply(played.status, "{}")

        def reply(self, status: int, text: str) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield played, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def at(plan: LaunchPlan, url: str, drafting: str = "dflash") -> LaunchPlan:
    return replace(plan, base_url=url, drafting=drafting)


def test_good_drafting_is_told(engine: tuple[Engine, str], plan: LaunchPlan) -> None:
    said: list[str] = []
    require(at(plan, engine[1]), {"VLLM_API_KEY": "k"}, 0.02, said.append)
    assert said == ["drafting dflash: 1.40 of 7.0 drafts accepted a step (20% of 700 tokens)"]
    (body,) = engine[0].asked
    assert body["prompt"] == list(acceptance.PANEL) and body["ignore_eos"]
    assert engine[0].keys == {"Bearer k"}


@pytest.mark.parametrize(("drafted", "accepted"), [(700, 0), (700, 13), (0, 0), (10, 10)])
def test_degenerate_drafting_ends_the_launch(
    drafted: int, accepted: int, engine: tuple[Engine, str], plan: LaunchPlan
) -> None:
    engine[0].drafted, engine[0].accepted = drafted, accepted
    with pytest.raises(LaunchFailedError) as caught:
        require(at(plan, engine[1]), {}, 0.02, lambda _: None)
    (finding,) = caught.value.findings
    assert finding.code == "degenerate-drafting"
    assert str(drafted) in finding.seen and "MIN_ACCEPTANCE=0 " in finding.fix


def test_the_check_can_be_switched_off_and_needs_drafting(
    engine: tuple[Engine, str], plan: LaunchPlan
) -> None:
    engine[0].accepted = 0
    require(at(plan, engine[1]), {}, 0.0, lambda _: None)
    require(at(plan, engine[1], "none"), {}, 0.5, lambda _: None)
    assert not engine[0].asked


def test_what_cannot_be_measured_is_told_and_stops_nothing(
    engine: tuple[Engine, str], plan: LaunchPlan
) -> None:
    said: list[str] = []
    engine[0].status = 400
    require(at(plan, engine[1]), {}, 0.02, said.append)
    engine[0].page = False
    require(at(plan, engine[1]), {}, 0.02, said.append)
    require(at(plan, "http://127.0.0.1:9"), {}, 0.02, said.append)
    assert [line.partition(":")[0] for line in said] == ["acceptance not checked"] * 3
    assert "HTTP 400" in said[0]


def test_status_reads_what_is_counted_since_the_start(
    engine: tuple[Engine, str], plan: LaunchPlan
) -> None:
    found = acceptance.of_running(at(plan, engine[1]), {})
    assert found is not None
    assert str(found).endswith("(20% of 2,100 tokens), by position 0.60 0.20")
    assert found.as_json() == {
        "steps": 300, "drafted": 2100, "accepted": 420, "share": 0.2,
        "accepted_per_step": 1.4, "share_by_position": [0.6, 0.2],
    }  # fmt: skip
    assert acceptance.of_running(at(plan, engine[1], "none"), {}) is None
    engine[0].page = False
    assert acceptance.of_running(at(plan, engine[1]), {}) is None


@given(
    drafted=st.integers(0, 5000),
    share=st.floats(0, 1),
    floor=st.floats(0.001, 1),
)
def test_a_launch_is_given_up_exactly_below_the_floor(
    drafted: int, share: float, floor: float
) -> None:
    found = Acceptance(max(1, drafted // 7), drafted, int(drafted * share))
    good = drafted >= acceptance.MIN_DRAFTED and found.accepted / max(1, drafted) >= floor
    assert bool(judge(found, floor)) != good
    assert "nan" not in str(found)


@pytest.mark.parametrize(("trouble", "code"), [("useless", 4), ("", 0)])
def test_start_ends_with_4_when_no_draft_is_ever_accepted(
    launcher: Any, trouble: str, code: int
) -> None:
    command = launcher.env["ENGINE_COMMAND"].replace("--trouble :", f"--trouble head:{trouble}")
    done = launcher("start", SPEC_METHOD="mtp", ENGINE_COMMAND=command)
    assert done.returncode == code, done.stdout + done.stderr
    if code:
        assert "0 of 700 drafted tokens were accepted" in done.stderr
        assert not launcher.left_over()
        more = {"SPEC_METHOD": "mtp", "ENGINE_COMMAND": command, "MIN_ACCEPTANCE": "0"}
        assert launcher("start", **more).returncode == 0
    told = json.loads(launcher("status", "--json", SPEC_METHOD="mtp").stdout)
    assert told["acceptance"] is not None
