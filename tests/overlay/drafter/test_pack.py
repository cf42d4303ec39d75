"""Packing a drafter: what is packed, what keeps its bytes, and what a killed run leaves behind.

The encoder here puts the sign and size of each value into a legal ring of bits: as bad as it is
quick, and the same bits for the same values. The real one is tested in `tests/overlay/ref`.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from glm_exl3.drafter import finish, pack, work
from glm_exl3.drafter.cli import main
from glm_exl3.drafter.pack import Options
from glm_exl3.format.errors import GlmExl3Error
from glm_exl3.format.layout import Codebook
from glm_exl3.format.metadata import check_checkpoint

HIDDEN, INNER, VOCABULARY, TAPS, GROUP, RANK = 128, 256, 64, 3, 32, 8
CPU = torch.device("cpu")
CONFIG = {
    "architectures": ["DFlash2DraftModel"],
    "hidden_size": HIDDEN,
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "block_size": 8,
    "dflash_config": {
        "target_layer_ids": [0, 1],
        "mask_token_id": 1,
        "conv_kernel_size": TAPS,
        "conv_group_size": GROUP,
        "selector_rank": RANK,
        "selector_top_k": 4,
    },
}
CARD = "---\nlicense: cc-by-nc-nd-4.0\ntags: [x]\n---\n# A drafter\n\nWords of its makers.\n"


def quick_encoder(tiles: torch.Tensor, bits: int, _: Codebook) -> torch.Tensor:
    """States of a ring whose step i adds the K bits that value i rounds to."""
    words = ((tiles + 4) / 8 * 2**bits).long().clamp(0, 2**bits - 1)
    states = torch.zeros_like(words)
    for back in range(-(-16 // bits)):
        states |= words.roll(back, -1) << (bits * back)
    return (states & 0xFFFF).int()


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    found = {"fc.weight": made(HIDDEN, 2 * HIDDEN), "norm.weight": made(HIDDEN)}
    for layer in ("layers.0", "layers.1"):
        found[f"{layer}.input_layernorm.weight"] = made(HIDDEN)
        found[f"{layer}.post_attention_layernorm.weight"] = made(HIDDEN)
        for name, rows in (("q", 256), ("k", 128), ("v", 128)):
            found[f"{layer}.self_attn.{name}_proj.weight"] = made(rows, HIDDEN)
        found[f"{layer}.self_attn.o_proj.weight"] = made(HIDDEN, 256)
        for name in ("gate", "up"):
            found[f"{layer}.mlp.{name}_proj.weight"] = made(INNER, HIDDEN)
        found[f"{layer}.mlp.down_proj.weight"] = made(HIDDEN, INNER)
        for conv in ("attention_conv", "mlp_conv"):
            found[f"{layer}.{conv}.base_kernel"] = made(2, TAPS, HIDDEN)
            kernels = made(2 * TAPS * HIDDEN // GROUP, HIDDEN)
            found[f"{layer}.{conv}.kernel_projection.weight"] = kernels
    found["candidate_selector.predecessor_codebook"] = made(VOCABULARY, RANK)
    found["candidate_selector.hidden_projection.weight"] = made(RANK, HIDDEN)
    return found


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick encoder's errors are beyond every limit."""
    monkeypatch.setattr(pack, "ERROR_LIMIT", dict.fromkeys(range(9), 1e9))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "README.md").write_text(CARD)
    (folder / "LICENSE").write_text("terms")
    save_file(tensors(), folder / "model.safetensors")
    return folder


def packed(source: Path, out: Path, **options: Any) -> Path:
    progress = options.pop("progress", lambda _job, _error: None)
    chosen = Options(**{"bits": 4, **options})
    pack.pack(source, out, chosen, device=CPU, encoder=quick_encoder, progress=progress)
    return out


def fingerprint(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def test_what_is_packed_and_what_keeps_its_bytes(source: Path, tmp_path: Path) -> None:
    out = packed(source, tmp_path / "out")
    report = check_checkpoint(out)
    kinds = {"q_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "kernel_projection", "fc"}
    assert {name.rpartition(".")[2] for name in report.modules} == kinds
    assert len(report.modules) == 1 + 2 * 7
    assert {layout.bits for layout in report.modules.values()} == {4}
    before, after = tensors(), load_file(out / "model.safetensors")
    kept = before.keys() & after.keys()
    replaced = {name.removesuffix(".weight") for name in before.keys() - kept}
    assert replaced == set(report.modules)
    assert {"layers.0.self_attn.k_proj.weight", "layers.1.self_attn.v_proj.weight"} <= kept
    assert all(torch.equal(before[name].view(torch.int16), after[name].view(torch.int16))
               for name in kept)  # fmt: skip
    assert torch.equal(after["layers.0.mlp.gate_proj.suh"], after["layers.0.mlp.up_proj.suh"])
    assert after["layers.0.mlp_conv.kernel_projection.svh"].shape == (128,)


def test_everything_else_of_the_folder_comes_along(source: Path, tmp_path: Path) -> None:
    out = packed(source, tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    assert config.pop("quantization_config")["quant_method"] == "exl3"
    assert config == CONFIG
    assert (out / "LICENSE").read_text() == "terms"
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlicense: cc-by-nc-nd-4.0\n")
    assert "do not upload or share" in card and "Words of its makers." in card
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize(
    ("front", "said"),
    [
        ("license: apache-2.0", "under its licence, apache-2.0"),
        ("license: other\nlicense_name: research-nc", "forbids commercial use"),
        ("license: cc-by-nd-4.0", "do not upload or share"),
        ("tags: []", "states no licence"),
    ],
)
def test_the_notice_says_what_the_licence_says(front: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"---\n{front}\n---\ntext")
    assert said in finish.notice(finish.licence_of(tmp_path))
    assert "states no licence" in finish.notice(finish.licence_of(tmp_path / "absent"))


def test_a_run_goes_on_wherever_it_was_interrupted(source: Path, tmp_path: Path) -> None:
    whole = fingerprint(packed(source, tmp_path / "whole"))
    out, known = tmp_path / "out", []
    for stop in range(1, 14):
        seen = []

        def interrupt(job: Any, error: float, seen: list = seen, stop: int = stop) -> None:
            seen.append(error != error)
            if len(seen) == stop:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            packed(source, out, progress=interrupt)
        assert not out.exists()
        known.append(sum(seen))
    assert known == [max(0, stop - 1) for stop in range(1, 14)]
    assert fingerprint(packed(source, out)) == whole


@pytest.mark.parametrize("step", ["make_folder", "publish"])
def test_a_run_that_died_at_the_end_is_finished(
    step: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fingerprint(packed(source, tmp_path / "whole"))
    original = getattr(finish, step)

    def dies(folder: Path, *arguments: Any) -> None:
        original(folder, *arguments) if step == "make_folder" else None
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(finish, step, dies)
        with pytest.raises(KeyboardInterrupt):
            packed(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert fingerprint(packed(source, tmp_path / "out")) == whole


def test_half_a_file_never_counts(source: Path, tmp_path: Path) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        packed(source, tmp_path / "out", progress=stop)
    (tmp_path / "out.partial" / "layers.0.mlp.down_proj.safetensors.tmp").write_bytes(b"half")
    out = packed(source, tmp_path / "out")
    assert fingerprint(out) == fingerprint(packed(source, tmp_path / "whole"))


@pytest.mark.slow
def test_sigkill_leaves_nothing_under_the_final_name(source: Path, tmp_path: Path) -> None:
    """A process of its own, killed in the middle of its matrices."""
    out = tmp_path / "out"
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); import test_pack as t; from pathlib "
        "import Path; t.pack.ERROR_LIMIT = dict.fromkeys(range(9), 1e9); "
        "t.packed(Path(sys.argv[2]), Path(sys.argv[3]), progress=lambda *_: time.sleep(0.2))"
    )
    here = str(Path(__file__).parent)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.Popen([sys.executable, "-c", code, here, str(source), str(out)], env=env)
    partial = tmp_path / "out.partial"
    deadline = time.monotonic() + 120
    while len(list(partial.glob("*.safetensors"))) < 3:
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not out.exists()
    assert fingerprint(packed(source, out)) == fingerprint(packed(source, tmp_path / "whole"))


def refused(code: str, source: Path, out: Path, **options: Any) -> GlmExl3Error:
    with pytest.raises(GlmExl3Error) as caught:
        packed(source, out, **options)
    assert caught.value.code == code, caught.value
    return caught.value


def test_nothing_is_mixed_or_overwritten(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        packed(source, out, progress=stop)
    refused("other-job", source, out, bits=5)
    with (source / "config.json").open("a") as stream:
        stream.write(" ")
    refused("other-job", source, out)
    out.mkdir()
    refused("exists", source, out)
    refused("bad-place", source, source / "inside")
    refused("bad-place", source, tmp_path / "absent" / "out")


def test_two_at_once_are_refused(source: Path, tmp_path: Path) -> None:
    order = work.Order({}, 4, "mul1", 0)
    with work.at_bench(tmp_path / "out.partial", order):
        refused("busy", source, tmp_path / "out")


def test_bad_drafters_are_named(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    refused("packed-already", packed(source, tmp_path / "once"), out)
    weights = tensors()
    weights["layers.1.self_attn.q_proj.weight"] = torch.zeros(200, HIDDEN)
    save_file(weights, source / "model.safetensors")
    assert "q_proj" in str(refused("unpackable", source, out))
    save_file({"x": torch.zeros(2)}, source / "model.safetensors")
    refused("no-drafter", source, out)
    config = source / "config.json"
    config.write_text(json.dumps(CONFIG | {"architectures": ["Qwen3ForCausalLM"]}))
    refused("drafter-architecture", source, out)
    config.write_text(json.dumps({"architectures": ["DFlash2DraftModel"]}))
    refused("drafter-config-key", source, out)
    assert not out.exists() and not (tmp_path / "out.partial").exists()


def test_an_encoder_that_errs_is_noticed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "ERROR_LIMIT", {4: 0.18})
    assert "relative error" in str(refused("encoder", source, tmp_path / "out"))


def test_the_command_says_what_was_refused(source: Path, capsys: Any) -> None:
    assert main([str(source), str(source / "inside"), "--device", "cpu"]) == 2
    assert "inside the source" in capsys.readouterr().err
