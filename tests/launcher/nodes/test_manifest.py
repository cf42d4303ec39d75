"""Manifests of folders: any change is found, and a damaged manifest is none."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm_launch.nodes import manifest as manifests
from glm_launch.nodes.manifest import Manifest
from glm_launch.nodes.ssh import LocalShell


@pytest.fixture
def content(tmp_path) -> Path:
    folder = tmp_path / "content"
    folder.mkdir()
    for number in range(3):
        data = random.Random(number).randbytes(5000)
        (folder / f"model-{number}.safetensors").write_bytes(data)
    return folder


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset % len(data)] ^= 1 << (offset % 8)
    path.write_bytes(data)


FILES = st.dictionaries(
    st.from_regex(r"[a-z]{1,6}\.json", fullmatch=True),
    st.binary(max_size=40),
    min_size=1,
    max_size=4,
)


@given(FILES, st.integers(0, 10_000), st.sampled_from(["flip", "cut", "grow", "remove"]))
def test_any_change_to_any_file_is_found(tmp_path_factory, files, where, how) -> None:
    folder = tmp_path_factory.mktemp("any")
    for name, data in files.items():
        (folder / name).write_bytes(data)
    known = manifests.of_folder(folder)
    cache = str(folder / "cache")
    assert manifests.verify(known, str(folder), cache).problems == ()
    victim = folder / sorted(files)[where % len(files)]
    data = victim.read_bytes()
    if how == "remove":
        victim.unlink()
    elif how == "grow" or not data:
        victim.write_bytes(data + b"x")
    elif how == "cut":
        victim.write_bytes(data[: where % len(data)])
    else:
        flip(victim, where)
    assert [p.name for p in manifests.verify(known, str(folder), cache).problems] == [victim.name]


def test_a_manifest_survives_its_file_and_damage_to_it_is_no_manifest(tmp_path, content) -> None:
    known = manifests.of_folder(content)
    path = tmp_path / "m.json"
    known.save(path)
    assert Manifest.load(path) == known
    path.write_text(path.read_text()[:-20])
    assert Manifest.load(path) is None


def test_verification_on_a_node_is_the_same_program(tmp_path, content) -> None:
    class Node:
        name = "node"

        def run(self, command, *, stdin="", timeout_s=30.0):
            return LocalShell().run([sys.executable, *command[1:]], stdin=stdin)

    known = manifests.of_folder(content)
    cache = str(tmp_path / "cache.json")
    assert manifests.verify(known, str(content), cache, shell=Node()).hashed_bytes == known.bytes
    gone = manifests.verify(known, str(tmp_path), cache, shell=Node()).problems
    assert {problem.kind for problem in gone} == {"missing"}
