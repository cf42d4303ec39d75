"""Write the checkpoint folders of the trained miniature: `python -m nano.folders RUN OUT`.

OUT gets `shared/` (tokenizer, chat template, the tensors that no recipe packs) and one folder per
recipe plus `drafter/`. The folders link to `shared/` instead of repeating it, which keeps the whole
set under 40 MB; a folder is a complete checkpoint for any reader that follows symbolic links, and
`cp -rL` makes a self-contained copy. The vision tower is random: the miniature is trained on text.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from glm_exl3.ref.tiny import configs
from glm_exl3.ref.tiny.folder import INDEX, write_folder, write_json
from glm_exl3.ref.tiny.matrices import MatrixMaker
from glm_exl3.ref.tiny.recipe import RandomStreams, Recipe
from glm_exl3.ref.tiny.target import add_vision
from nano.checkpoint import load_shards
from nano.export import stored
from nano.geometry import nano_geometry
from nano.packing import RECIPES, Packed, packed_checkpoint

Tensors = dict[str, Tensor]
SHARED = "shared"
LINKED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)


def size_bytes(tensors: Tensors) -> int:
    """Stored size of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def packed_part(file: Path) -> Packed:
    """What a recipe's run packed, with the source modules it replaces."""
    tensors = load_file(file)
    replaced: set[str] = set()
    for name in tensors:
        module, _, leaf = name.rpartition(".")
        if leaf == "trellis":
            stem, _, kind = module.rpartition(".")
            names = [f"{stem}.{x}_proj" for x in "qkv"] if kind == "qkv_proj" else [module]
            replaced.update(names)
    return Packed(tensors, replaced)


def with_vision(tensors: Tensors) -> Tensors:
    """The tensors and a random vision tower of the geometry's dims."""
    geometry = nano_geometry()
    maker = MatrixMaker(RandomStreams(0), RECIPES["tr3"])
    add_vision(maker, geometry.vision, geometry.text.hidden_size)
    return tensors | maker.tensors


def write_target(folder: Path, tensors: Tensors, recipe: Recipe, common: set[str]) -> None:
    """One recipe's folder: its own shard, links to the shared files, index and configs."""
    folder.mkdir(parents=True)
    own = {name: tensor for name, tensor in tensors.items() if name not in common}
    save_file(dict(sorted(own.items())), folder / "model.safetensors", {"format": "pt"})
    for name in (*LINKED, "common.safetensors"):
        (folder / name).symlink_to(Path("..") / SHARED / name)
    files = dict.fromkeys(own, "model.safetensors")
    files |= dict.fromkeys(common, "common.safetensors")
    total = {"total_size": size_bytes(tensors)}
    write_json(folder / INDEX, {"metadata": total, "weight_map": files})
    quantization = configs.quantization(recipe, tensors)
    storage = {"tensor_storage": configs.tensor_storage(tensors)}
    write_json(folder / "quantization_config.json", quantization | storage)
    vision = nano_geometry().vision
    write_json(folder / "processor_config.json", configs.processor_config(vision))
    write_json(folder / "config.json", configs.target_config(nano_geometry(), quantization))


def write_drafter(folder: Path, tensors: Tensors) -> None:
    """The drafter's folder, with links to the shared tokenizer."""
    write_folder(folder, tensors, configs.draft_config(nano_geometry(), None), shard_bytes=1 << 30)
    for name in LINKED:
        (folder / name).unlink()
        (folder / name).symlink_to(Path("..") / SHARED / name)


def write_all(run: Path, out: Path) -> None:
    """All folders from the files of a finished run."""
    dense = {name: stored(name, tensor) for name, tensor in load_shards(run, "target-").items()}
    dense = with_vision(dense)
    complete = {
        name: packed_checkpoint(dense, packed_part(run / f"{name}.safetensors"), recipe)
        for name, recipe in RECIPES.items()
    }
    common = set(dense).intersection(*complete.values())
    shared = out / SHARED
    shutil.rmtree(out / "drafter", ignore_errors=True)
    drafter = load_shards(run, "drafter")
    shared.mkdir(parents=True, exist_ok=True)
    scratch = out / "scratch"
    write_folder(scratch, {}, configs.target_config(nano_geometry(), None))
    for name in LINKED:
        shutil.copyfile(scratch / name, shared / name)
    shutil.rmtree(scratch)
    unpacked = {name: dense[name] for name in sorted(common)}
    save_file(unpacked, shared / "common.safetensors", {"format": "pt"})
    for name, recipe in RECIPES.items():
        shutil.rmtree(out / name, ignore_errors=True)
        write_target(out / name, complete[name], recipe, common)
    write_drafter(out / "drafter", drafter)


def main() -> None:
    write_all(Path(sys.argv[1]), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
