"""Weight edits in a launch: what is missing is told with its command, what is there is pinned."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ablit_hub import COMMIT, HEADS, HIDDEN, REPO, Hub, config, make_donor, serving, write_file
from glm_exl3.format.donor import Donor
from glm_launch import ablit, edits
from glm_launch.errors import RefusedError
from glm_launch.facts import Facts
from glm_launch.plan import Box, LaunchPlan, build
from glm_launch.settings import Settings
from glm_launch.ui import Ui

FACTS = Facts(cores=(0, 1), gpus=0, engine=("vllm",))


def settings(state: Path, **values: object) -> Settings:
    plain = {"MODEL": "/m", "SPEC_METHOD": "none", "RANKS": 2, "GLM_STATE_DIR": str(state)}
    return Settings(**{**plain, **values})


@pytest.fixture(scope="module")
def donor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    make_donor(folder)
    return folder


@pytest.fixture
def hub(donor: Path) -> Iterator[Hub]:
    with serving(donor) as server:
        yield server


@pytest.fixture
def environment(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Settings of the donor in the environment of this process, and nothing else."""
    values = {
        "ABLIT_DONOR": REPO,
        "ABLIT_DONOR_REVISION": COMMIT,
        "ABLIT_LAYERS": "2-3,6",
        "GLM_STATE_DIR": str(tmp_path / "state"),
        "GLM_ENV_FILE": str(tmp_path / "none"),
        "HF_ENDPOINT": hub.endpoint,
    }
    for key, value in values.items():
        monkeypatch.setenv(key, value)
    return values


def transplant(environment: dict[str, str], **more: object) -> Settings:
    keys = ("ABLIT_DONOR", "ABLIT_DONOR_REVISION", "ABLIT_LAYERS")
    return settings(
        Path(environment["GLM_STATE_DIR"]), ABLIT=True, **{k: environment[k] for k in keys}, **more
    )


def run(action: str, **options: str) -> dict:
    """What the verb says with --json."""
    out = io.StringIO()
    assert ablit.run(Ui(out, out), action, as_json=True, **options) == 0
    return json.loads(out.getvalue())


def test_fetched_verified_and_launched(environment, hub: Hub) -> None:
    with pytest.raises(RefusedError) as caught:
        edits.settle(transplant(environment))
    assert caught.value.findings[0].fix == "./start.sh ablit fetch"
    assert run("status")["donor"] == "not fetched"
    fetched = run("fetch")
    assert (fetched["complete"], fetched["layers"]) == (True, "2-3,6")
    assert fetched["missing"] == 3 * 2 * HIDDEN * HEADS
    assert fetched["received"] == hub.sent <= 1.05 * fetched["missing"]
    assert run("verify")["verified"]
    settled = edits.settle(transplant(environment))
    donor = Donor.load(edits.donor_folder(transplant(environment)))
    assert donor is not None
    assert settled.env["GLM_EXL3_ABLIT"] == "transplant"
    assert settled.env["GLM_EXL3_ABLIT_PIN"] == donor.digest == fetched["digest"]
    plan = edits.edited(build(transplant(environment), FACTS), settled)
    for rank in plan.ranks:
        env = dict(rank.env)
        assert env["GLM_EXL3_ABLIT_SOURCE"] == str(edits.donor_folder(transplant(environment)))
        assert env["GLM_EXL3_ABLIT_LAYERS"] == "2-3,6"
    assert f"{REPO}@{COMMIT[:12]}, layers 2-3,6" in plan.edits
    assert any("changed in memory" in warning for warning in plan.warnings)
    assert LaunchPlan.from_json(plan.as_json()).edits == plan.edits


def test_layers_that_were_not_fetched_are_told(environment) -> None:
    run("fetch")
    wider = {**environment, "ABLIT_LAYERS": "1-4,6"}
    with pytest.raises(RefusedError, match=r"layer\(s\) 1,4 of ABLIT_LAYERS were not fetched"):
        edits.settle(transplant(wider))
    narrower = {**environment, "ABLIT_LAYERS": "2,5-6"}
    with pytest.raises(RefusedError, match=r"layer\(s\) 5 of"):
        edits.settle(transplant(narrower, ABLIT_INCLUDE_MTP=False))


def test_a_donor_of_another_model_is_refused_at_once(
    environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config(hidden=4096)))
    monkeypatch.setenv("MODEL", str(model))
    with pytest.raises(RefusedError, match="hidden_size is 256, here 4096"):
        run("fetch")


@pytest.mark.parametrize("revision", ["", "main", COMMIT[:12]])
def test_a_revision_that_is_no_commit_is_refused(
    environment, monkeypatch: pytest.MonkeyPatch, revision: str
) -> None:
    monkeypatch.setenv("ABLIT_DONOR_REVISION", revision)
    with pytest.raises(RefusedError, match="is no commit"):
        run("fetch")


def test_without_a_donor_nothing_is_guessed(environment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ABLIT_DONOR")
    with pytest.raises(RefusedError, match="ABLIT_DONOR is empty"):
        run("fetch")


def test_a_direction_is_kept_under_a_name_and_pinned(environment, tmp_path: Path) -> None:
    state = Path(environment["GLM_STATE_DIR"])
    asked = settings(state, ABLIT=True, ABLIT_METHOD="proj", ABLIT_ALPHA=1.0)
    with pytest.raises(RefusedError) as caught:
        edits.settle(asked)
    assert "./start.sh ablit direction FILE" in caught.value.findings[0].fix
    file = tmp_path / "r.safetensors"
    write_file(file, {"direction": np.ones(HIDDEN, np.uint16)})
    kept = run("direction", file=str(file))["direction"]
    settled = edits.settle(asked)
    assert settled.env["GLM_EXL3_ABLIT_PIN"] == hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    assert [str(part.here) for part in settled.parts] == [kept]
    assert "alpha 1" in settled.title
    by_path = settings(state, ABLIT=True, ABLIT_METHOD="proj", ABLIT_DIRECTION=str(file))
    assert edits.settle(by_path).env["GLM_EXL3_ABLIT_PIN"] == settled.env["GLM_EXL3_ABLIT_PIN"]


def test_another_file_is_not_kept_as_a_direction(environment, tmp_path: Path) -> None:
    file = tmp_path / "r.safetensors"
    write_file(file, {"weight": np.ones(4, np.uint16)})
    with pytest.raises(RefusedError, match="holds weight"):
        run("direction", file=str(file))
    with pytest.raises(RefusedError, match="no file cannot be kept"):
        run("direction")


def test_containers_get_the_files_mounted(tmp_path: Path) -> None:
    vector = tmp_path / "v.gguf"
    vector.write_bytes(b"vector")
    sha256 = hashlib.sha256(b"vector").hexdigest()
    asked = settings(
        tmp_path, STEER_VECTOR=str(vector), STEER_ALPHA=2.0, STEER_SHA256=sha256, IMAGE="x:1"
    )
    settled = edits.settle(asked)
    ((folder, inside),) = settled.folders
    assert (folder / "vector.model").read_bytes() == b"vector"
    plan = build(asked, FACTS)
    boxed = [rank.__class__(**{**vars(rank), "box": Box("x:1")}) for rank in plan.ranks]
    plan = plan.__class__(**{**vars(plan), "ranks": tuple(boxed)})
    made = edits.edited(plan, settled, [[("/a", inside)], [("/b", inside)]])
    assert [rank.box.mounts for rank in made.ranks if rank.box] == [
        (("/a", "/edits/files"),), (("/b", "/edits/files"),)
    ]  # fmt: skip
    env = dict(made.ranks[1].env)
    assert env["GLM_EXL3_STEER_VECTOR"] == "/edits/files/vector.model"
    assert (env["GLM_EXL3_STEER_PIN"], env["GLM_EXL3_STEER_ALPHA"]) == (sha256, "2")
    assert edits.settle(asked).folders == settled.folders


def test_another_vector_than_the_pinned_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "v.gguf").write_bytes(b"vector")
    with pytest.raises(RefusedError, match="STEER_SHA256 is another"):
        edits.settle(
            settings(tmp_path, STEER_VECTOR=str(tmp_path / "v.gguf"), STEER_SHA256="0" * 64)
        )


def test_everything_that_is_missing_is_told_at_once(tmp_path: Path) -> None:
    asked = settings(tmp_path, ABLIT=True, ABLIT_METHOD="proj", STEER_VECTOR="/none.gguf")
    with pytest.raises(RefusedError) as caught:
        edits.settle(asked)
    assert len(caught.value.findings) == 2


def test_without_settings_a_plan_stays_as_it_is(tmp_path: Path) -> None:
    plain = settings(tmp_path)
    plan = build(plain, FACTS)
    assert edits.edited(plan, edits.settle(plain)) is plan
    assert "edits" not in plan.as_json()
