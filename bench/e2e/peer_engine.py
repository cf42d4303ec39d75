"""ExLlamaV3's own engine on the random model: decode, verify and prefill, for the ratio to ours.

    python -m e2e.peer_engine RESULT.json --work WORK [--layers 45]

Its package (1.6.5 knows the architecture) builds the model from the folder of headers that
`glm_exl3.dummy` writes; every tensor it asks for is made on the GPU by the generator that fills
ours, so sizes, rates and distributions are the same. Timed is the model's forward pass as its
generator calls it (graphs per layer up to eight requests, prompts in chunks, logits of the last
token), with the choice of the likeliest token on the GPU and without its scheduler and sampler; the
fastest of three rounds counts. One pass of eight tokens of one request, without the record that
taking drafts back needs, stands for verification. All of that favours the peer.

What would fail late is checked first: its imports, and that its extension is compiled already
(`python -m h200.prepare peer-package`), since its import would otherwise do that for minutes. A
measurement that fails leaves its error in the row; without the first one the rest does not run. A
line with its second follows everything that takes time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from glm_exl3.dummy.values import DeviceStreams, fill_dense
from glm_exl3.format.layout import TILE, Codebook

CONTEXT, STEPS, WARM, ROUNDS, PAGE = 1024, 48, 8, 3, 256
VERIFIED = 8
CHUNK = 2048  # the generator's default
REQUESTS = (1, 4, 16)
PREFILL = 32768
NEEDED = ("exllamav3", "marisa_trie", "llguidance", "pydantic", "rich", "tokenizers", "PIL", "yaml")
BEGIN = time.monotonic()
AS_BF16 = ".o_norm.weight"  # half in the file; the peer's gated norm takes bf16 or fp32
ARCHITECTURES = "9.0"  # those of `h200.prepare`: with others its import compiles anew


def say(what: str) -> None:
    """What happened, with the second since the start."""
    print(f"{time.monotonic() - BEGIN:6.1f} s  {what}", flush=True)


def made(
    streams: DeviceStreams, key: str, shape: Sequence[int], dtype: torch.dtype, inputs: int
) -> torch.Tensor:
    """The tensor `key` as the checkpoint would hold it; `inputs` are the rows of its matrix."""
    leaf = key.rpartition(".")[2]
    if leaf == "trellis":
        out = torch.empty(tuple(shape), dtype=torch.int16, device=streams.device)
        streams.fill_trellis(out, key)
        return out
    if leaf == "suh":
        return streams.input_scales(key, *shape)
    if leaf == "svh":
        return streams.output_scales(key, Codebook.MUL1, inputs, *shape)
    out = torch.empty(tuple(shape), dtype=dtype, device=streams.device)
    fill_dense(streams, key, out)
    return out


class Source:
    """Stands in for `get_tensor` of the peer's collection of files."""

    def __init__(self, collection: Any, streams: DeviceStreams) -> None:
        self.collection, self.streams = collection, streams
        self.original = collection.get_tensor

    def inputs_of(self, key: str) -> int:
        trellis = f"{key.rpartition('.')[0]}.trellis"
        if trellis not in self.collection.tensor_file_map:
            return 1
        return int(self.collection.list_tensors(trellis)[trellis]["shape"][0]) * TILE

    def __call__(  # noqa: PLR0913, PLR0917 - the peer's signature
        self,
        key: str,
        device: Any = None,
        optional: bool = False,
        allow_bf16: bool = False,
        float2half: bool = False,
        no_defer: bool = False,
        transpose: bool = False,
        pad_to: tuple[int, ...] | None = None,
        fidx: int | None = None,
        arena: bool = True,
    ) -> torch.Tensor | None:
        known = key in self.collection.tensor_file_map and fidx is None
        entry = self.collection.list_tensors(key)[key] if known else None
        marker = entry is not None and entry["torch_dtype"] == torch.int32
        if entry is None or marker:  # the file holds the markers
            found: torch.Tensor | None = self.original(key, device, optional, no_defer=marker)
            return found
        tensor = made(self.streams, key, entry["shape"], entry["torch_dtype"], self.inputs_of(key))
        if key.endswith(AS_BF16):
            tensor = tensor.bfloat16()
        elif tensor.dtype == torch.bfloat16 and not allow_bf16:
            tensor = tensor.half()
        if tensor.dtype == torch.float32 and float2half:
            tensor = tensor.half()
        if transpose:
            tensor = tensor.T.contiguous()
        if pad_to is not None and tuple(pad_to) != tuple(tensor.shape):
            wider = torch.zeros(pad_to, dtype=tensor.dtype, device=tensor.device)
            wider[tuple(slice(size) for size in tensor.shape)] = tensor
            tensor = wider
        return tensor if device is None else tensor.to(device)


class Peer:
    """The loaded model with its cache."""

    def __init__(self, folder: Path, tokens: int) -> None:
        say("importing the peer")
        package = import_module("exllamav3")
        say("imported")
        started = time.perf_counter()
        config = package.Config.from_directory(str(folder))
        source = Source(config.stc, DeviceStreams(0, torch.device("cuda:0")))
        config.stc.get_tensor = source
        say("folder read")
        self.model = package.Model.from_config(config)
        self.cache = package.Cache(self.model, max_num_tokens=tokens, max_batch_size=max(REQUESTS))
        say("loading")
        self.model.load(device="cuda:0", progressbar=False)
        torch.cuda.synchronize()
        say(f"loaded, {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
        self.start_s = time.perf_counter() - started
        self.vocabulary = int(config.vocab_size)
        self.passed = False

    def ids(self, requests: int, tokens: int) -> torch.Tensor:
        return torch.randint(64, self.vocabulary, (requests, tokens))

    def forward(
        self, ids: torch.Tensor, past: int, room: int, states: Any, **more: int
    ) -> tuple[Any, Any]:
        """Logits of one pass over `ids` behind `past` tokens, and the states to go on with."""
        parameters = {
            "attn_mode": "flash_attn",
            "cache": self.cache,
            "past_len": past,
            "batch_shape": (ids.shape[0], room),
            **more,
        }
        if states is not None:
            parameters["recurrent_states"] = states
        logits = self.model.forward(ids, parameters)
        if not self.passed:
            torch.cuda.synchronize()
            say("first forward pass")
            self.passed = True
        return logits, parameters.get("recurrent_states")

    def prefill(self, ids: torch.Tensor, room: int) -> Any:
        """The states behind `ids`, in chunks and with logits of the last token, as the generator
        does it; all requests together have the tokens of one chunk."""
        self.cache.reset_states()  # a measurement that failed kept its own
        states, chunk = None, CHUNK // ids.shape[0]
        for start in range(0, ids.shape[1], chunk):
            piece = ids[:, start : start + chunk]
            _, states = self.forward(piece, start, room, states, last_tokens_only=1)
        return states

    def step_ms(self, requests: int, tokens: int) -> float:
        """Milliseconds of a pass of `tokens` tokens for each of `requests`."""
        each = STEPS // tokens
        room = -(-(CONTEXT + tokens * (WARM + ROUNDS * each)) // PAGE) * PAGE
        states = self.prefill(self.ids(requests, CONTEXT), room)
        fixed, past, times = self.ids(requests, tokens), CONTEXT, list[float]()
        for count in (WARM, *[each] * ROUNDS):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(count):
                logits, states = self.forward(fixed, past, room, states)
                fixed = logits.argmax(-1).cpu() if tokens == 1 else fixed
                past += tokens
            torch.cuda.synchronize()
            times.append(1000 * (time.perf_counter() - begin) / count)
        if bool(logits.isnan().any()):
            raise RuntimeError(
                "the logits are NaN: experts are chosen at random and times mean less"
            )
        return min(times[1:])

    def prefill_s(self, tokens: int) -> float:
        """Seconds from a cold prompt to its logits."""
        room = -(-(tokens + PAGE) // PAGE) * PAGE
        for length in (2 * CHUNK, tokens):
            ids = self.ids(1, length)
            torch.cuda.synchronize()
            begin = time.perf_counter()
            self.prefill(ids, room)
            torch.cuda.synchronize()
            spent = time.perf_counter() - begin
        return spent


def complete(folder: Path) -> None:
    """Give the image processor's settings the keys that the peer insists on."""
    path = folder / "processor_config.json"
    settings = json.loads(path.read_text())
    settings["image_processor"] |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    path.write_text(json.dumps(settings))


def unready() -> str:
    """What would fail or compile for minutes at the peer's import, or nothing."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        return f"the peer needs {', '.join(missing)}: carry the wheels along"
    from torch.utils.cpp_extension import get_default_build_root

    if find_spec("exllamav3_ext") is not None:  # carried along compiled
        return ""
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    if not any(root.rglob("exllamav3_ext.so")):
        return f"no exllamav3_ext.so below {root}: python -m h200.prepare peer-package FILES WORK"
    return ""


def measure(folder: Path, layers: int, result: Path) -> bool:
    """Every figure, saved after each; whether all could be taken."""
    peer = Peer(folder, max(PREFILL + PAGE, max(REQUESTS) * 2 * CONTEXT))
    found: dict[str, Any] = {
        "engine": "exllamav3 1.6.5",
        "layers": layers,
        "device": torch.cuda.get_device_name(),
        "start_s": peer.start_s,
        "used_gib": torch.cuda.max_memory_allocated() / 2**30,
        "rows": [],
    }
    say(f"{layers} layers loaded in {peer.start_s:.0f} s")

    def add(figure: str, take: Callable[[], float], **row: Any) -> None:
        try:
            with torch.inference_mode():
                row[figure] = take()
        except Exception as error:  # noqa: BLE001 - the next measurement may still work
            row["error"] = f"{type(error).__name__}: {error}"[:600]
        found["rows"].append(row)
        result.write_text(json.dumps(found, indent=1) + "\n")
        say(json.dumps(row))

    for requests in REQUESTS:
        take = partial(peer.step_ms, requests, 1)
        add("step_ms", take, kind="decode", requests=requests, context=CONTEXT)
        if "error" in found["rows"][0]:
            return False
    add("step_ms", partial(peer.step_ms, 1, VERIFIED), kind="verify", requests=1, tokens=VERIFIED)
    add("seconds", partial(peer.prefill_s, PREFILL), kind="prefill", context=PREFILL)
    last = found["rows"][-1]
    if "seconds" in last:
        last["tokens_per_s"] = PREFILL / last["seconds"]
        result.write_text(json.dumps(found, indent=1) + "\n")
    return not any("error" in row for row in found["rows"])


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m e2e.peer_engine")
    made.add_argument("result", type=Path)
    made.add_argument("--layers", type=int, default=45)
    made.add_argument("--work", type=Path, required=True)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, write the folder, measure; 1 when a figure is missing."""
    options = parser().parse_args(arguments)
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", ARCHITECTURES)
    if lacking := unready():
        say(lacking)
        return 1
    folder = options.work / f"peer-{options.layers}"
    staged = folder.with_suffix(".new")
    if not folder.exists():
        dummy = ["--family", "full", "--layers", str(options.layers), "--out", str(staged)]
        subprocess.run([sys.executable, "-m", "glm_exl3.dummy", *dummy], check=True)
        staged.rename(folder)
    say(f"{folder} is there")
    complete(folder)
    return int(not measure(folder, options.layers, options.result))


if __name__ == "__main__":
    sys.exit(main())
