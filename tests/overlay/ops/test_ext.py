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


def test_an_object_follows_everything_it_includes(tmp_path):
    source = tmp_path / "one.cu"
    source.write_text('#include "first.h"\n#include <vector>\n')
    (tmp_path / "first.h").write_text('  # include "second.h"\n#include "one.cu"\n')
    (tmp_path / "second.h").write_text("int a;")
    (tmp_path / "other.h").write_text("int b;")
    names = [path.name for path in ext.included(source)]
    assert names == ["first.h", "one.cu", "second.h"]
    command = ["true", "-O3", "-c", str(source), "-o", str(tmp_path / "one.o")]
    first = ext.object_digest(command)
    elsewhere = [*command[:-1], "/another/folder/one.o"]
    (tmp_path / "other.h").write_text("int c;")
    assert ext.object_digest(elsewhere) == first
    assert ext.object_digest([*command, "-g"]) != first
    (tmp_path / "second.h").write_text("int d;")
    assert ext.object_digest(command) != first


def test_only_what_changed_is_compiled_again(monkeypatch, tmp_path):
    """A shell script stands for the compiler: it writes what it was given to read."""
    compiler, calls, sources = tmp_path / "nvcc", tmp_path / "calls", tmp_path / "csrc"
    compiler.write_text(
        "#!/bin/sh\nout=; while [ $# -gt 0 ]; do case $1 in -o) out=$2;; *.cu) echo $1 >> "
        f"{calls};; --version) exit;; esac; shift; done; echo made > $out\n"
    )
    compiler.chmod(0o755)
    sources.mkdir()
    for name in ("one", "two"):
        (sources / f"{name}.cu").write_text(f"int {name};")
    monkeypatch.setattr(ext, "SOURCES", sources)
    monkeypatch.setattr(ext, "nvcc", lambda: compiler)
    target, kept = tmp_path / "made.so", tmp_path / "kept"
    for _ in range(2):
        ext.build(target, ("9.0a",), kept=kept)
    assert len(calls.read_text().split()) == 2
    (sources / "two.cu").write_text("int changed;")
    ext.build(target, ("9.0a",), kept=kept)
    assert [Path(line).name for line in calls.read_text().split()] == ["one.cu", "two.cu", "two.cu"]
    assert target.read_text() == "made\n"


def test_the_library_asks_for_torchs_cuda_part_even_where_nothing_here_needs_it():
    command = ext.link_command(
        Path("nvcc"), Path("made.so"), [Path("one.o")], [Path("a"), Path("b")]
    )
    libraries = command[command.index("one.o") + 1 :]
    assert libraries.index("--no-as-needed") < libraries.index("-ltorch_cuda")
    assert libraries[:2] == ["-La", "-Lb"]
