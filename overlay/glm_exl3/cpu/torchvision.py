"""Let a CUDA build of torchvision import beside a CPU build of torch.

transformers' image processors, which glm5next imports even for text, need torchvision. The wheel on
the package index is a CUDA build whose native library cannot load beside CPU torch; torchvision
then fails at `register_fake("torchvision::nms")` because nobody defined that operator. Defining the
two schemas before torchvision loads is enough: resizing and the like are plain torch.

What must stay true: nothing happens unless torch is a CPU build and torchvision is not loaded, and
operators that a matching torchvision defines itself are left alone (its library is loaded by then).
"""

from __future__ import annotations

from glm_exl3.cpu.imports import before_import

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_OPERATORS = ("nms", "qnms")
_libraries: list[object] = []


def prepare() -> None:
    """Define the missing operators as soon as torchvision is about to be imported."""
    before_import("torchvision", define_operators)


def define_operators() -> None:
    """Define `torchvision::nms` and `qnms` where torch is a CPU build and they are missing."""
    import torch

    if torch.version.cuda is not None or _native_library_loads():
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in _OPERATORS:
        if not hasattr(torch.ops.torchvision, name):
            library.define(name + _SCHEMA)
    _libraries.append(library)


def _native_library_loads() -> bool:
    """Whether torchvision's own library loads here; loading it defines its operators."""
    import importlib.util
    from pathlib import Path

    import torch

    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return True
    for library in Path(spec.origin).parent.glob("_C*.so"):
        try:
            torch.ops.load_library(str(library))
        except OSError:
            continue
        return True
    return False
