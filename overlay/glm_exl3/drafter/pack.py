"""Pack one drafter from folder to folder; may be killed anywhere and started again."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from glm_exl3.drafter import finish
from glm_exl3.drafter.hessian import Shape, layer_hessians
from glm_exl3.drafter.recipe import Job, jobs
from glm_exl3.drafter.work import Bench, Order, at_bench, digests
from glm_exl3.format.drafting import ARCHITECTURES, ORIGINAL_CONFIG
from glm_exl3.format.errors import FormatError, GlmExl3Error
from glm_exl3.format.headers import TensorEntry, read_object
from glm_exl3.format.layout import Codebook
from glm_exl3.format.metadata import CheckpointIndex, total_bytes
from glm_exl3.ref.decode import dequantize
from glm_exl3.ref.encode_host import encode_tiles_on_host
from glm_exl3.ref.quantize import Encoder, Exl3Tensors, pad_to_blocks, quantize_group

BITS = range(2, 9)
ERROR_LIMIT = {2: 0.60, 3: 0.33, 4: 0.18, 5: 0.10, 6: 0.06, 7: 0.06, 8: 0.06}
"""Relative error of a packed matrix beyond which the encoder must be at fault, by K."""
Progress = Callable[[Job, float], None]


@dataclass(frozen=True)
class Options:
    """What the result depends on besides the source."""

    bits: int = 6
    codebook: Codebook = Codebook.MUL1
    seed: int = 0
    synthetic: bool = True


@dataclass(frozen=True)
class Source:
    """A drafter to pack: its folder, headers and shape."""

    folder: Path
    tensors: dict[str, TensorEntry]
    shape: Shape
    device: torch.device

    @classmethod
    def open(cls, folder: Path, device: torch.device) -> Source:
        """Raises GlmExl3Error for a folder that is no complete DFlash2 drafter."""
        config = read_object(folder / "config.json")
        names = config.get("architectures") or ["nothing"]
        if names[0] not in ARCHITECTURES:
            raise GlmExl3Error(
                code="drafter-architecture",
                seen=f"{folder} holds {names[0]}, not {ARCHITECTURES[0]}",
                why="only DFlash2 drafters are packed this way",
                fix="give the folder of a DFlash2 drafter",
            )
        try:
            shape = Shape.of(config)
        except (KeyError, TypeError) as error:
            raise GlmExl3Error(
                code="drafter-config-key",
                seen=f"{folder / 'config.json'} lacks {error}",
                why="the shapes of the drafter's inputs follow from it",
                fix=ORIGINAL_CONFIG,
            ) from error
        return cls(folder, dict(CheckpointIndex.read(folder).tensors), shape, device)

    def read(self, name: str) -> torch.Tensor:
        """A tensor as fp32 on the device. Raises FormatError when there is none of that name."""
        entry = self.tensors.get(name)
        if entry is None:
            raise FormatError(
                code="tensor-missing",
                seen="the drafter lacks this tensor",
                why="its layers cannot be followed without it",
                fix="download the drafter again",
                file=str(self.folder),
                tensor=name,
            )
        return stored(entry, name).to(self.device, torch.float32)


def stored(entry: TensorEntry, name: str) -> torch.Tensor:
    """The tensor as its file has it, on the CPU."""
    with safe_open(entry.file, "pt") as file:
        return file.get_tensor(name)


def encoder_of(device: torch.device) -> Encoder:
    """The fastest encoder of the device: the CUDA kernel, or the loops for CPUs."""
    if device.type != "cuda":
        return encode_tiles_on_host
    from glm_exl3.ops.cuda_encode import encode_tiles

    return encode_tiles


def seed_of(module: str, seed: int) -> int:
    """The same for a module in every run, different between modules."""
    return zlib.crc32(module.encode()) ^ seed


def pack_job(
    source: Source, job: Job, options: Options, hessian: torch.Tensor | None, encoder: Encoder
) -> tuple[dict[str, torch.Tensor], float]:
    """Checkpoint tensors of one group, and the largest relative error of its matrices.

    Raises GlmExl3Error when the error is beyond what the rate can explain.
    """
    weights = [source.read(f"{module}.weight").T.contiguous() for module in job.modules]
    packed = quantize_group(
        [pad_to_blocks(weight) for weight in weights],
        options.bits,
        options.codebook,
        hessian=hessian,
        seed=seed_of(job.modules[0], options.seed),
        encoder=encoder,
    )
    tensors: dict[str, torch.Tensor] = {}
    worst = 0.0
    for module, weight, result in zip(job.modules, weights, packed, strict=True):
        tensors |= {name: one.cpu().clone() for name, one in result.state_dict(module).items()}
        worst = max(worst, relative_error(weight, result))
    if not worst <= ERROR_LIMIT[options.bits]:
        raise GlmExl3Error(
            code="encoder",
            seen=f"{job.modules[0]} came out with a relative error of {worst:.3f}",
            why=f"{options.bits} bits stay below {ERROR_LIMIT[options.bits]}: the encoder erred",
            fix="run python -m glm_exl3.doctor on this machine; report what it says",
        )
    return tensors, worst


def relative_error(weight: torch.Tensor, packed: Exl3Tensors) -> float:
    """||W - decoded|| / ||W|| of a matrix [k, n]."""
    decoded = dequantize(packed.trellis, packed.suh, packed.svh, packed.codebook)
    norm = weight.norm().clamp_min(1e-30)
    return float((decoded[:, : weight.shape[1]].to(weight) - weight).norm() / norm)


def pack(
    folder: Path,
    out: Path,
    options: Options,
    *,
    device: torch.device,
    encoder: Encoder | None = None,
    progress: Progress = lambda _job, _error: None,
) -> None:
    """Pack the drafter in `folder` into the new folder `out`.

    Finished matrices lie in `OUT.partial` until the end; `progress` is called after each, also for
    those of an earlier run (with an error of NaN). Raises GlmExl3Error.
    """
    folder, out = folder.resolve(), out.absolute()
    refuse_target(folder, out)
    source = Source.open(folder, device)
    todo = jobs(source.tensors)
    refuse_full_disk(out, source)
    order = Order(
        digests(folder), options.bits, options.codebook.value, options.seed, options.synthetic
    )
    partial = out.with_name(out.name + ".partial")
    with at_bench(partial, order) as bench:
        _pack_missing(source, todo, options, bench, encoder or encoder_of(device), progress)
        done: dict[str, torch.Tensor] = {}
        for job in todo:
            done |= bench.take(job.modules[0])
        replaced = {f"{module}.weight" for job in todo for module in job.modules}
        kept = {n: stored(e, n) for n, e in source.tensors.items() if n not in replaced}
        made = partial / "folder"
        finish.make_folder(made, folder, kept | done, options.bits, options.codebook.value)
        finish.publish(made, out)
        shutil.rmtree(partial)


def _pack_missing(
    source: Source,
    todo: list[Job],
    options: Options,
    bench: Bench,
    encoder: Encoder,
    progress: Progress,
) -> None:
    hessians: dict[str, torch.Tensor] = {}
    known: int | None = None
    for job in todo:
        module = job.modules[0]
        if bench.has(module):
            progress(job, float("nan"))
            continue
        if options.synthetic and job.layer is not None and job.layer != known:
            known = job.layer
            seed = seed_of(f"layers.{known}", options.seed)
            hessians = layer_hessians(source.read, known, source.shape, seed, source.device)
        tensors, error = pack_job(source, job, options, hessians.get(module), encoder)
        bench.keep(module, tensors)
        progress(job, error)


def refuse_target(folder: Path, out: Path) -> None:
    if out.exists():
        raise GlmExl3Error(
            code="exists",
            seen=f"{out} exists",
            why="a drafter in use must not change under an engine",
            fix="remove it, or give another name",
        )
    if out.is_relative_to(folder) or not out.parent.is_dir():
        raise GlmExl3Error(
            code="bad-place",
            seen=f"{out} lies inside the source, or in a folder that does not exist",
            why="the result is a folder of its own beside others",
            fix="give the name of a new folder in one that exists",
        )


def refuse_full_disk(out: Path, source: Source) -> None:
    """Parts and the folder made of them lie side by side at the end."""
    need, free = total_bytes(source.tensors.values()), shutil.disk_usage(out.parent).free
    if free < need:
        sizes = f"{free / 2**30:.1f} GiB free, packing may take {need / 2**30:.1f}"
        raise GlmExl3Error(
            code="disk-full",
            seen=f"{out.parent} has {sizes}",
            why="a run that stops for want of space has to be started again",
            fix="free some space, or give a folder elsewhere",
        )
