"""What is carried to a GPU machine and back: caches of compiled kernels, wheels, the library."""

from __future__ import annotations

import argparse
import lzma
import random
import zipfile
from pathlib import Path

import pytest

from h200 import caches, carry, prepare
from h200 import run as runner


def caches_at(root: Path) -> dict[str, str]:
    return {key: str(root / name) for name, key in caches.VARIABLES.items()}


def test_compiled_kernels_come_back_and_are_restored(tmp_path: Path) -> None:
    here, there, work, out = (tmp_path / name for name in ("here", "there", "work", "out"))
    for folder in (work, out, here / "flashinfer/ops/topk", here / "torch/exllamav3_ext"):
        folder.mkdir(parents=True)
    (here / "flashinfer/ops/topk/topk.so").write_bytes(b"code")
    (here / "flashinfer/ops/topk/topk.lock").touch()
    (here / "torch/exllamav3_ext/exllamav3_ext.so").write_bytes(b"peer")
    env = caches_at(here)
    caches.pack(out, work, env)
    assert {path.name for path in out.iterdir()} == {"jit-0.tar.xz", "peer.tar.xz"}
    other = tmp_path / "work2"
    other.mkdir()
    assert caches.restore(out, other, caches_at(there)) == 1
    restored = there / "flashinfer/ops/topk/topk.so"
    assert restored.read_bytes() == b"code"
    built = (here / "flashinfer/ops/topk/topk.so").stat().st_mtime_ns
    assert restored.stat().st_mtime_ns == built // 10**9 * 10**9
    assert not (there / "torch").exists()
    for path in out.iterdir():
        path.unlink()
    caches.pack(out, work, env)  # nothing was added since
    caches.pack(out, other, caches_at(there))
    assert not [*out.iterdir()]
    (here / "triton").mkdir()
    (here / "triton/kernel.cubin").touch()
    caches.pack(out, work, env)
    assert [path.name for path in out.iterdir()] == ["jit-0.tar.xz"]


def compiled(root: Path, folders: int) -> dict[str, str]:
    """Caches with one Triton kernel a folder, of 20 kB that xz cannot shrink, and a module."""
    noise = random.Random(0)
    for number in range(folders):
        folder = root / "triton" / f"kernel{number}"
        folder.mkdir(parents=True)
        (folder / "code.cubin").write_bytes(noise.randbytes(20_000))
    (root / "flashinfer").mkdir()
    (root / "flashinfer/module.so").write_bytes(noise.randbytes(20_000))
    return caches_at(root)


def test_what_was_compiled_comes_back_in_archives_below_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 50_000
    monkeypatch.setattr(caches.pieces, "__defaults__", (limit, 1))
    env, there = compiled(tmp_path / "here", 5), caches_at(tmp_path / "there")
    out, work, other = (tmp_path / name for name in ("out", "work", "work2"))
    for folder in (out, work, other):
        folder.mkdir()
    caches.pack(out, work, env)
    made = sorted(out.iterdir())
    assert [path.name for path in made] == [f"jit-{n}.tar.xz" for n in range(len(made))]
    assert 1 < len(made) <= caches.MOST_ARCHIVES
    assert all(path.stat().st_size <= limit for path in made)
    assert caches.restore(out, other, there) == 6
    for name, path in caches.entries(env):
        assert (tmp_path / "there" / name).read_bytes() == path.read_bytes()
    for path in made:
        path.unlink()
    caches.pack(out, work, env)  # nothing was added since, on either machine
    caches.pack(out, other, there)
    assert not [*out.iterdir()]


def test_what_is_cheapest_to_compile_again_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(caches.pieces, "__defaults__", (25_000, 1))
    env = compiled(tmp_path / "here", 7)
    out, work = tmp_path / "out", tmp_path / "work"
    out.mkdir(), work.mkdir()
    (tmp_path / "here/triton/kernel0/large.cubin").write_bytes(random.Random(1).randbytes(30_000))
    caches.pack(out, work, env)
    assert len([*out.iterdir()]) == caches.MOST_ARCHIVES
    assert caches.restore(out, work, caches_at(tmp_path / "there")) == caches.MOST_ARCHIVES
    assert (tmp_path / "there/flashinfer/module.so").is_file()
    said = capsys.readouterr().out
    assert "triton/kernel0/code.cubin and what is beside it, 0 MiB packed: left out" in said
    assert "3 more archives of compiled kernels: left out" in said


def test_carried_archives_make_warming_needless(tmp_path: Path) -> None:
    options = argparse.Namespace(files=tmp_path, work=tmp_path)
    assert "warm" not in runner.tried(options)
    for name in ("jit-1.tar.xz", "jit-0.tar.xz", "jit.tar.xz", "peer.tar.xz"):
        (tmp_path / name).touch()
    assert "warm" in runner.tried(options)
    found = [path.name for path in caches.archives(tmp_path)]
    assert found == ["jit.tar.xz", "jit-0.tar.xz", "jit-1.tar.xz"]


def test_wheels_are_unpacked_beside_the_peers(tmp_path: Path) -> None:
    files, work = tmp_path / "files", tmp_path / "work"
    files.mkdir()
    for name in (prepare.WHEEL, "pycountry-26.2.16-py3-none-any.whl"):
        with zipfile.ZipFile(files / name, "w") as made:
            made.writestr(f"{name.partition('-')[0]}/data.json", "{}")
    for _ in range(2):
        prepare.site(files, work)
    assert [path.name for path in (work / "site").iterdir()] == ["pycountry"]
    assert carry.missing(files) == ["marisa_trie==1.4.1", "gguf==0.19.0"]
    assert f"{carry.WHEELS[0].replace('==', '-')}-py3-none-any.whl" == prepare.WHEEL


@pytest.mark.parametrize(("codes", "kept"), [([0], True), ([1, 0], False)])
def test_the_peers_extension_is_carried_or_compiled(
    codes: list[int], kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`codes` are the exit statuses of importing it, first the carried one."""
    files, work = tmp_path / "files", tmp_path / "work"
    for folder in (files, work):
        folder.mkdir()
    with zipfile.ZipFile(files / prepare.WHEEL, "w") as made:
        made.writestr("exllamav3/ext.py", "")
    extension = tmp_path / f"{caches.PEER_MODULE}.so"
    extension.touch()
    caches.write(files / "peer.tar.xz", *caches.pieces([(extension.name, extension)]))
    monkeypatch.setenv("PYTHONPATH", "")
    left = list(codes)
    monkeypatch.setattr(prepare, "imports", lambda _: left.pop(0))
    prepare.peer_package(files, work)
    assert not left
    assert (work / "peer" / extension.name).exists() is kept
    assert (work / "peer.packed").exists() is kept  # else it is brought back


def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: bytes) -> Path:
    """FILES with a carried library; `source` stands for it, and Python for torch's loader."""
    from glm_exl3.ops import ext

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(ext, "SHIPPED", tmp_path / "absent.so")
    monkeypatch.setattr(prepare, "LOAD", "import sys; exec(open(sys.argv[1]).read())")
    files = tmp_path / "files"
    files.mkdir()
    (files / f"{ext.LIBRARY_NAME}.xz").write_bytes(lzma.compress(source))
    (files / "digest").write_text(ext.source_digest())
    return files


def test_the_carried_library_is_unpacked_and_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from glm_exl3.ops import ext

    prepare.library(library(tmp_path, monkeypatch, b"pass"), tmp_path)
    assert ext.cached_library().read_bytes() == b"pass"


def test_a_library_that_does_not_load_ends_the_job_and_is_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from glm_exl3.ops import ext

    with pytest.raises(SystemExit, match="does not load"):
        prepare.library(library(tmp_path, monkeypatch, b"raise OSError('no symbol')"), tmp_path)
    assert ext.find_library() is None
