"""The programs that measure drafting on a GPU, as far as they can be tried without one."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from e2e import draft_pack, draft_rows, draft_time, drafting, methods, sampled
from e2e.draft_time import speculator_of


def test_the_random_drafter_is_one_that_can_be_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from glm_exl3.drafter.recipe import jobs
    from glm_exl3.dummy import geometry as dummy
    from glm_exl3.format.metadata import CheckpointIndex
    from glm_exl3.ref.tiny.geometry import geometry

    monkeypatch.setattr(dummy, "real_geometry", lambda _layers: geometry())
    draft_pack.write_random(tmp_path, 2, 8)
    index = CheckpointIndex.read(tmp_path)
    assert {entry.dtype for entry in index.tensors.values()} == {"BF16"}
    assert len(jobs(index.tensors)) == 1 + 2 * 6


def test_a_packed_drafter_of_the_real_dims_stays_below_a_gib(tmp_path: Path) -> None:
    from glm_exl3.drafter.recipe import jobs
    from glm_exl3.dummy.folder import write_drafter
    from glm_exl3.dummy.geometry import real_geometry
    from glm_exl3.format.metadata import CheckpointIndex, total_bytes

    write_drafter(tmp_path, real_geometry(8), packed=False)
    index = CheckpointIndex.read(tmp_path)
    todo = jobs(index.tensors)
    weights = sum(job.weights for job in todo)
    scales = sum(2 * (job.in_features * len(job.rows) + sum(job.rows)) for job in todo)
    dense = total_bytes(index.tensors.values()) - 2 * weights
    assert weights // 256 == 4_055_040
    assert dense + weights * 6 // 8 + scales < draft_pack.LIMIT_GIB * 2**30


def test_without_a_drafter_the_time_is_that_of_one_that_fits_the_cut_target(
    tmp_path: Path,
) -> None:
    from glm_exl3.format.drafting import Pair, dflash_problems
    from glm_exl3.format.metadata import CheckpointIndex

    options = draft_time.parser().parse_args(["--out", "x"])
    target, drafter = draft_time.write_models(options, tmp_path)
    text = json.loads((target / "config.json").read_text())["text_config"]
    assert text["num_hidden_layers"] == options.layers
    config = json.loads((drafter / "config.json").read_text())
    assert dflash_problems(Pair(text, config, draft_time.TOKENS, 1)) == []
    assert max(config["dflash_config"]["target_layer_ids"]) < options.layers
    assert any(name.endswith(".trellis") for name in CheckpointIndex.read(drafter).tensors)


def test_a_drafter_that_is_given_is_taken(tmp_path: Path) -> None:
    options = draft_time.parser().parse_args([str(tmp_path / "mine"), "--out", "x"])
    options.layers = 2
    assert draft_time.write_models(options, tmp_path)[1] == tmp_path / "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_the_planted_biases_are_what_they_say() -> None:
    options = sampled.parse(["--out", "x", "--plant", "verification"])
    name, temperature = sampled.row_of(options)
    planted = draft_rows.arguments(draft_rows.ROWS[name], options)["speculative_config"]
    assert planted["rejection_sample_method"] == "synthetic" and temperature == 1.0
    assert len(planted["synthetic_acceptance_rates"]) == planted["num_speculative_tokens"] == 7
    options = sampled.parse(["--out", "x", "--plant", "temperature"])
    assert sampled.row_of(options) == ("dflash", sampled.PLANTED_TEMPERATURE)
    plain = draft_rows.arguments(draft_rows.ROWS["none"], options)
    assert "speculative_config" not in plain


@pytest.mark.parametrize("name", draft_rows.ROWS)
def test_every_row_is_a_configuration(name: str) -> None:
    options = methods.parse(["--out", "x", "--memory-gib", "2"])
    row, made = draft_rows.ROWS[name], draft_rows.arguments(draft_rows.ROWS[name], options)
    assert Path(made["model"]).is_absolute() and made["kv_cache_memory_bytes"] == 2 * 2**30
    speculation = made.get("speculative_config", {})
    assert speculation.get("num_speculative_tokens", 0) == max(row.lengths, default=0)
    assert Path(speculation.get("model", "/")).is_absolute()
    schedule = speculation.get("num_speculative_tokens_per_batch_size", [])
    assert {one[2] for one in schedule} == (set(row.lengths) if len(row.lengths) > 1 else set())


def test_the_prompts_are_enough_and_all_different_and_some_are_long() -> None:
    found = methods.prompts(56)
    assert len({tuple(prompt) for prompt in found}) == 56
    config = json.loads((draft_rows.MODEL / "full-4bpw" / "config.json").read_text())
    budget = config.get("text_config", config)["index_topk"]
    assert sum(len(prompt) > budget for prompt in found) == 8
    assert sum(len(prompt) > budget for prompt in methods.prompts(8)) == 1


def test_kept_answers_are_taken_for_the_same_job_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def run(name: str, _: object, **job: object) -> dict[str, object]:
        calls.append(name)
        return {"lines": [], "draws": []}

    monkeypatch.setattr(draft_rows, "run", run)
    arguments = ["--out", "x", "--plain", str(tmp_path / "p.json"), "--draws", "5"]
    options = methods.parse(arguments)
    job = {"prompts": [[1]], "max_tokens": 2, **methods.drawing(options)}
    for _ in range(2):
        methods.without(options, **job)
    methods.without(options, prompts=[], max_tokens=1, **methods.drawing(options))
    assert calls == ["none"]
    with pytest.raises(SystemExit, match="another job"):
        methods.without(options, **job | {"max_tokens": 3})


def row(equal: bool, accepted: float, p: float | None = None) -> dict[str, object]:
    found: dict[str, object] = {"equal": equal, "accepted_per_step": accepted}
    return found | ({} if p is None else {"sampled": {"corrected_p": p}})


def test_figures_are_merged_and_kept() -> None:
    old = {"pack_s": 10, "hybrid": {"x": 1}, "sampled_p.mtp": 0.5, "greedy_equal.mtp": True}
    new = drafting.merged(old, {"sampled_p.dflash": 0.2, "pack_s": 9, "greedy_equal.x": False})
    assert new["pack_s"] == 9 and new["hybrid"] == {"x": 1}
    assert new["sampled_p"] == 0.2 and new["greedy_equal"] is False
    assert "sampled_p" not in drafting.merged({}, {"draft_ms": 1.0})


def test_each_stage_of_the_driver_reads_its_own_result(tmp_path: Path) -> None:
    found: dict[str, object] = {}
    for stage in drafting.stages(tmp_path, tmp_path / "packed"):
        others = {
            "pack": {"pack_s": 1.0, "pack_gib": 0.9, "met": True}, "time": {"draft_ms": 0.5},
            "planted": {"equal": False}, "soak": {"changing-hybrid": {"ok": True, "steps": 9}},
            "lookup": [{"rows": 1, "texts_in": "host", "us": 20.0}],
        }  # fmt: skip
        result = others.get(stage.name, {"methods": {stage.name: row(True, 1.5, 0.3)}})
        found = drafting.merged(found, stage.pick(json.loads(json.dumps(result))))
    assert found["planted_caught"] is True and found["sampled_p"] == 0.3
    assert {"pack_s", "pack_gib", "draft_ms", "greedy_equal", "soak_steps"} <= set(found)


def test_every_command_of_the_driver_is_one_that_its_program_takes(tmp_path: Path) -> None:
    """The programs themselves parse what the driver would run, and say so by their help."""
    parsers = {"e2e.methods": methods.parse, "e2e.sampled": sampled.parse}
    drawn = set[tuple[int, int]]()
    for stage in drafting.stages(tmp_path, tmp_path / "packed"):
        if stage.command[0] in parsers:
            made = parsers[stage.command[0]]([*stage.command[1:], "--out", "x"])
            assert made.memory_gib > 0 and made.plain.parent == tmp_path
            drawn.add((made.draws, made.contexts))
    ((draws, contexts),) = drawn  # else the answers without drafting belong to another job
    assert draws * contexts * len(methods.VERIFIED) >= 20_000


def fake(work: Path, seconds: float, code: int = 0) -> tuple[str, ...]:
    (work / "fake_stage.py").write_text(
        "import sys, time, pathlib\n"
        f"time.sleep({seconds})\n"
        "pathlib.Path(sys.argv[-1]).write_text('{\"x\": 1}')\n"
        f"print('said so')\nsys.exit({code})\n"
    )
    return ("fake_stage",)


def test_a_stage_that_fails_or_finds_no_time_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    good = drafting.Stage("plain", fake(tmp_path, 0.0), lambda f: {"x": f["x"]}, 1)
    late = drafting.Stage("late", good.command, lambda f: {"late": 1}, 10_000, alone=True)
    monkeypatch.setattr(drafting, "stages", lambda *_: (good, late))
    monkeypatch.setattr(drafting, "unready", str)
    expected = tmp_path / "expected" / "drafting.json"
    arguments = [str(tmp_path), "--expected", str(expected), "--budget-s", "30"]
    assert drafting.main(arguments) == 1
    assert {"x"} == set(json.loads(expected.read_text())) - {"date"}
    said = capsys.readouterr().out
    assert "plain: ok" in said and "said so" in said and "late: LEFT OUT" in said
    assert "1 of 2 stages ok" in said and "not: late" in said


def test_the_speculator_is_found_behind_either_worker() -> None:
    runner = SimpleNamespace(speculator="here")
    for worker in (SimpleNamespace(model_runner=runner),
                   SimpleNamespace(worker=SimpleNamespace(model_runner=runner))):  # fmt: skip
        executor = SimpleNamespace(driver_worker=worker)
        core = SimpleNamespace(engine_core=SimpleNamespace(model_executor=executor))
        llm = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core))
        assert speculator_of(llm) == "here"
