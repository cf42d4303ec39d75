"""Building and finding the compiled library, without a compiler or a GPU."""

from __future__ import annotations

from pathlib import Path

from glm_exl3.ops import ext


def test_every_source_is_compiled_once():
    commands = ext.compile_commands(Path("nvcc"), Path("objects"))
    sources = [command[command.index("-c") + 1] for command in commands]
    expected = sorted(str(p) for p in ext.SOURCES.iterdir() if p.suffix in {".cu", ".cpp"})
    assert sorted(sources) == expected
    objects = [command[command.index("-o") + 1] for command in commands]
    assert len(set(objects)) == len(objects)


def test_all_but_warpgroup_tiles_are_compiled_for_every_architecture():
    commands = ext.compile_commands(Path("nvcc"), Path("objects"))
    flags = {Path(c[c.index("-c") + 1]).name: " ".join(c) for c in commands}
    for number in ("80", "90a", "120", "121"):
        assert f"code=sm_{number}" in flags["decode_k4_mcg.cu"]
        assert f"code=sm_{number}" in flags["prefill_mma_k4_mcg.cu"]
    assert "code=sm_90a" in flags["prefill_k4_mcg.cu"]
    assert "code=sm_80" not in flags["prefill_k4_mcg.cu"]


def test_a_build_without_hopper_still_links_the_tiles():
    commands = ext.compile_commands(Path("nvcc"), Path("objects"), ("8.0",))
    tiled = next(c for c in commands if any(part.endswith("prefill_k4_mcg.cu") for part in c))
    assert "code=sm_80" in " ".join(tiled)


def test_the_cache_follows_the_sources(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(ext, "SHIPPED", tmp_path / "absent.so")
    before = ext.cached_library()
    assert before.is_relative_to(tmp_path)
    assert ext.find_library() is None
    before.parent.mkdir(parents=True)
    before.touch()
    assert ext.find_library() == before
    copied = tmp_path / "csrc"
    copied.mkdir()
    (copied / "one.cu").write_text("int changed;")
    monkeypatch.setattr(ext, "SOURCES", copied)
    assert ext.cached_library() != before
    assert ext.find_library() is None


def test_refusals_say_what_is_missing(monkeypatch, tmp_path):
    assert "below 8.0" in str(ext.refusal((7, 5)))
    monkeypatch.setattr(ext, "find_library", lambda: None)
    monkeypatch.setattr(ext, "nvcc", lambda: None)
    assert "nvcc" in str(ext.refusal((9, 0)))
    monkeypatch.setattr(ext, "find_library", lambda: tmp_path / ext.LIBRARY_NAME)
    assert ext.refusal((9, 0)) is None
