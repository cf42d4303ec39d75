"""Files of weight edits over nodes: brought to every node, verified each time, or refused."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from ablit_hub import COMMIT, REPO, config, make_donor, serving
from glm_ablit.fetch import fetch
from glm_ablit.recipe import geometry_of
from glm_ablit.remote import Remote

LAYERS = (2, 3)
FOLDER = f"ablit/{REPO.replace('/', '--')}@{COMMIT[:12]}"


@pytest.fixture
def edited(nodes, tmp_path: Path) -> dict[str, str]:
    """Settings of a fetched donor and a steering vector; every node keeps its own copies."""
    state = nodes["head"] / "home" / "state"
    make_donor(tmp_path / "donor")
    with serving(tmp_path / "donor") as hub:
        fetch(Remote(REPO, COMMIT, hub.endpoint), state / FOLDER, LAYERS, geometry_of(config()))
    vector = nodes["head"] / "home" / "vector.gguf"
    vector.write_bytes(b"GGUF" + bytes(64))
    return {
        "GLM_STATE_DIR": str(state),
        "ABLIT": "1",
        "ABLIT_DONOR": REPO,
        "ABLIT_DONOR_REVISION": COMMIT,
        "ABLIT_LAYERS": "2-3",
        "STEER_VECTOR": str(vector),
    }


def files(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("[!.]*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def mounted(nodes, node: str, inside: str) -> str:
    """The folder of a node that its container sees there."""
    (run,) = [call for call in nodes.calls("docker", "run", "--detach") if call[0] == node]
    (mount,) = [word for word in run if f"target={inside}" in word or f"dst={inside}" in word]
    parts = dict(part.partition("=")[::2] for part in mount.split(","))
    return parts.get("source") or parts["src"]


EDIT_NAMES = {"donor.json", "layer-2.safetensors", "layer-3.safetensors", "vector.model"}


def edit_files(sent: Iterable[str]) -> list[str]:
    return sorted({line.split(" ", 1)[1] for line in sent} & EDIT_NAMES)


def test_every_node_has_the_files_that_its_rank_reads(nodes, edited: dict[str, str]) -> None:
    done = nodes("start", **edited)
    assert done.returncode == 0, done.stderr
    assert edit_files(nodes.sent()) == sorted(EDIT_NAMES)
    for inside in ("/edits/donor", "/edits/files"):
        here, there = (mounted(nodes, node, inside) for node in ("head", "w1"))
        assert Path(there).is_relative_to(nodes["w1"])
        assert files(Path(here)) == files(Path(there)) != {}
    status = json.loads(nodes("status", "--json", **edited).stdout)
    assert "layers 2-3" in json.dumps(status)
    assert nodes("stop", **edited).returncode == 0

    damaged = nodes["w1"] / "home" / "state" / FOLDER / "layer-3.safetensors"
    good = damaged.read_bytes()
    damaged.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    nodes.forget_calls()
    refused = nodes("start", SKIP_SYNC="1", **edited)
    assert refused.returncode == 3 and not nodes.calls("docker", "run", "--detach")
    assert "error [weights-incomplete]" in refused.stderr and "w1" in refused.stderr
    before = len(nodes.sent())
    assert nodes("start", **edited).returncode == 0
    assert edit_files(nodes.sent()[before:]) == ["layer-3.safetensors"]
    assert damaged.read_bytes() == good


def test_a_donor_that_lost_a_tensor_is_refused_before_anything(
    nodes, edited: dict[str, str]
) -> None:
    (Path(edited["GLM_STATE_DIR"]) / FOLDER / "donor.json").unlink()
    done = nodes("start", **edited)
    assert done.returncode == 3 and "./start.sh ablit fetch" in done.stderr
    assert not nodes.calls("docker", "pull") and not nodes.sent()
