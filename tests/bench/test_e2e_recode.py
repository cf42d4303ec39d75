"""The arithmetic of the recode bench: what a step reads, ratios, the figures it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from e2e import recode, recode_steps


@pytest.fixture(scope="module")
def layers() -> list[recode.Projection]:
    return recode.projections()


def test_a_step_reads_what_the_published_counts_say(layers: list[recode.Projection]) -> None:
    """16.4 GB of dense bf16 per token for both ranks; 8-bit rows are half of the recoded part."""
    off = recode.dense_bytes(layers, "off")
    assert 2 * (off + recode.other_bytes(layers)) == pytest.approx(16.9e9, rel=0.03)
    assert recode.dense_bytes(layers, "fp8") / off == pytest.approx(0.5, abs=0.002)
    assert recode.dense_bytes(layers, "exl3") / off == pytest.approx(0.382, abs=0.002)
    kda = next(layer for layer in layers if layer.name == "in_proj_qkvbfg_a")
    assert (kda.k, kda.n, kda.beside, kda.count) == (4096, 12288, 288, 34)


def test_the_prediction_is_bytes_over_bandwidth(layers: list[recode.Projection]) -> None:
    slow, fast = (recode.predicted(layers, gbps) for gbps in (235.0, 470.0))
    for scheme in recode.SCHEMES:
        assert slow[scheme]["ms"] == pytest.approx(2 * fast[scheme]["ms"], rel=0.01)
        assert slow[scheme]["ratio"] == fast[scheme]["ratio"]
    assert 1 == slow["off"]["ratio"] > slow["fp8"]["ratio"] > slow["exl3"]["ratio"]


def test_own_times_weigh_layers_by_their_number() -> None:
    rows = [
        {"tokens": 1, "count": 2, "us": {"off": 10.0, "fp8": 5.0}},
        {"tokens": 1, "count": 1, "us": {"off": 20.0, "fp8": 14.0}},
    ]
    assert recode.own_times(rows) == {"1": {"off": 40.0, "fp8": 24.0, "fp8_ratio": 0.6}}


def result(step: float, seconds: float) -> dict[str, object]:
    decode = {"kind": "decode", "step_ms": step}
    return {"rows": [decode, decode, {"kind": "prefill", "seconds": seconds}, {"error": "x"}]}


def test_ratios_of_steps_and_of_prefill_rates(tmp_path: Path) -> None:
    ratios = recode.step_ratios({"off": result(10.0, 2.0), "fp8": result(8.0, 1.0)})
    assert ratios == {"fp8_step_ratio": 0.8, "fp8_step16_ratio": 0.8, "fp8_prefill8k_ratio": 2.0}
    (tmp_path / "a.json").write_text(json.dumps({"ratios": ratios}))
    own = {"own": {"1": {"fp8_ratio": 0.55}}, "load": {"fp8_recode_s": 1.5}}
    (tmp_path / "b.json").write_text(json.dumps(own))
    out = tmp_path / "machine" / "recode.json"
    recode.expected(out, [tmp_path / "a.json", tmp_path / "b.json"])
    figures = json.loads(out.read_text())
    assert figures["fp8_step_ratio"] == 0.8
    assert figures["fp8_own_ratio"] == 0.55
    assert figures["fp8_recode_s"] == 1.5


def test_engines_run_in_order_and_none_starts_behind_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    def run(_: Path, scheme: str, limit_s: float) -> dict[str, object]:
        assert limit_s > 0
        started.append(scheme)
        clock[0] += 40.0
        return result({"off": 10.0, "fp8": 8.0, "exl3": 9.0}[scheme], 2.0)

    clock = [0.0]
    monkeypatch.setattr("e2e.recode_steps.time.monotonic", lambda: clock[0])
    monkeypatch.setattr(recode_steps, "run_step", run)
    out = tmp_path / "step.json"
    figures = recode_steps.measure(tmp_path, out, recode_steps.ORDER, 130.0)
    assert started == ["off", "fp8", "exl3"]
    assert figures["exl3_step_ratio"] == 0.9
    assert json.loads(out.read_text())["ratios"] == figures


def test_a_failure_of_the_first_engine_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = {"rows": [], "error": "exit status 1"}
    monkeypatch.setattr(recode_steps, "run_step", lambda *_: dict(failed))
    out = tmp_path / "step.json"
    assert recode_steps.measure(tmp_path, out, recode_steps.ORDER, 100.0) == {}
    assert list(json.loads(out.read_text())["results"]) == ["off"]


def test_every_target_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    targets = (*recode_steps.OWN_TARGETS, recode_steps.Target("rate", 0.97, least=True))
    assert recode_steps.judge({"fp8_own_ratio": 0.55, "rate": 0.96}, targets) == 1
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[2].partition(",")[0].split(": ")[-1] for line in said] == [
        "ok", "NOT MEASURED", "MISSED",
    ]  # fmt: skip
    assert recode_steps.judge({"rate": 0.98}, targets[-1:]) == 0


def test_schemes_begin_with_what_all_are_compared_with() -> None:
    assert recode_steps.schemes("int8,exl3") == ["off", "exl3", "int8"]
    assert set(recode_steps.ORDER) == set(recode_steps.SCHEMES)


def test_divergences_join_the_figures_that_are_there(tmp_path: Path) -> None:
    out, rows = tmp_path / "recode.json", tmp_path / "nano.json"
    out.write_text(json.dumps({"fp8_step_ratio": 0.8}))
    rows.write_text(json.dumps([{"scheme": "fp8", "kl": 0.004}, {"scheme": "exl3:6", "kl": 0.001}]))
    recode.expected(out, [rows])
    found = json.loads(out.read_text())
    assert (found["fp8_step_ratio"], found["fp8_kl"], found["exl3_k6_kl"]) == (0.8, 0.004, 0.001)
