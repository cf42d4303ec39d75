"""Run the Gluon kernels of `glm_exl3.attention.hopper` as Python over torch, layouts ignored.

Triton has no interpreter for Gluon. What is played is the arithmetic and the order: which indices,
rows and buffers are used, that masked elements are not touched, and that copied rows are there only
after the wait. Barriers, layouts and instructions are not.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from glm_exl3.attention import hopper


class Value(Tensor):
    """A tensor with Triton's bit casts."""

    def to(self, dtype: Any, bitcast: bool = False) -> Tensor:
        return self.view(dtype) if bitcast else super().to(dtype)


def value(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(Value)


class Pointer:
    """Elements behind a tensor's first one, whatever its strides."""

    def __init__(self, data: Tensor, offset: Any = 0) -> None:
        self.data, self.offset = data, offset

    @classmethod
    def to_tensor(cls, tensor: Tensor) -> Pointer:
        count = tensor.untyped_storage().nbytes() // tensor.element_size()
        whole = tensor.as_strided((count - tensor.storage_offset(),), (1,))
        return cls(whole)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.data, self.offset + offset)

    def to(self, dtype: torch.dtype) -> Pointer:
        assert isinstance(self.offset, int) and not self.offset
        usable = self.data.numel() // dtype.itemsize * dtype.itemsize
        return Pointer(self.data[:usable].view(dtype))

    def load(self, mask: Tensor | None, other: float) -> Tensor:
        places = torch.as_tensor(self.offset).long()
        if mask is None:
            return value(self.data[places].clone())
        mask = mask.expand(places.shape)
        found = torch.full(places.shape, other, dtype=self.data.dtype)
        found[mask] = self.data[places[mask]]
        return value(found)

    def store(self, values: Tensor, mask: Tensor) -> None:
        places = torch.as_tensor(self.offset).long()
        mask = mask.expand(places.shape)
        self.data[places[mask]] = values[mask].to(self.data.dtype).as_subclass(Tensor)


class Shared:
    """Shared memory, poisoned until it is written."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    def index(self, place: int) -> Shared:
        return Shared(self.data[place])

    def slice(self, start: int, length: int, dim: int) -> Shared:
        return Shared(self.data.narrow(dim, start, length))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.permute(order))

    def load(self, _: Any) -> Tensor:
        return value(self.data.clone())

    def store(self, values: Tensor) -> None:
        assert values.dtype is self.data.dtype and values.shape == self.data.shape
        self.data.copy_(values)


class Machine:
    """What the kernel's modules offer, for one program."""

    def __init__(self) -> None:
        self.program, self.pending = 0, list[Callable[[], None]]()

    def language(self) -> types.SimpleNamespace:
        names = {
            "program_id": lambda _: value(torch.tensor(self.program)),
            "arange": lambda start, stop, layout: value(torch.arange(start, stop)),
            "zeros": lambda shape, dtype, _: value(torch.zeros(shape, dtype=dtype)),
            "full": lambda shape, fill, dtype, _: value(torch.full(shape, fill, dtype=dtype)),
            "load": lambda pointer, mask=None, other=0: pointer.load(mask, other),
            "store": lambda pointer, values, mask: pointer.store(values, mask),
            "max": lambda values, axis: values.amax(axis),
            "sum": lambda values, axis: values.sum(axis),
            "maximum": lambda a, b: a.clamp_min(b) if isinstance(b, int) else torch.maximum(a, b),
            "minimum": lambda a, b: value(torch.as_tensor(a).clamp_max(b)),
            "where": torch.where,
            "exp2": torch.exp2,
            "log2": torch.log2,
            "convert_layout": lambda values, _: values,
            "allocate_shared_memory": self.allocate,
            "pointer_type": lambda dtype: dtype,
            "SliceLayout": lambda *_: None,
            "static_range": range,
            **{name: getattr(torch, name) for name in ("bfloat16", "float32", "int64", "int32")},
            "uint8": torch.uint8,
            "float8e4nv": torch.float8_e4m3fn,
        }
        return types.SimpleNamespace(**names)

    @staticmethod
    def allocate(dtype: torch.dtype, shape: list[int], _: Any) -> Shared:
        fill = 0x7F if dtype is torch.uint8 else float("nan")
        return Shared(torch.full(shape, fill, dtype=dtype))

    def begin_copy(self, target: Shared, pointer: Pointer, mask: Tensor) -> None:
        self.pending.append(lambda: target.store(pointer.load(mask, 0)))

    def wait_group(self, outstanding: int) -> None:
        assert outstanding == 0
        for copy in self.pending:
            copy()
        self.pending.clear()

    @staticmethod
    def product(
        a: Shared, b: Shared, acc: Tensor, use_acc: bool = True, is_async: bool = False
    ) -> Tensor:
        assert a.data.dtype is b.data.dtype is torch.bfloat16 and is_async
        found = a.data.float() @ b.data.float()
        return value(found + acc if use_acc else found)

    def copies(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(wait_group=self.wait_group, commit_group=lambda: None)

    def products(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(
            warpgroup_mma=self.product,
            warpgroup_mma_wait=lambda outstanding, deps: deps[0],
            fence_async_shared=lambda: None,
        )


class Played:
    """Stands in for the compiled kernel: `kernel[grid](*arguments, **constants)`."""

    def __init__(self, kernel: Any = hopper.attend_kernel) -> None:
        self.machine = Machine()
        names: dict[str, Any] = {**vars(hopper)}
        names |= {"gl": self.machine.language(), "hopper": self.machine.products()}
        names |= {"async_copy": self.machine.copies(), "_begin_copy": self.machine.begin_copy}
        for name, found in vars(hopper).items():
            if hasattr(found, "is_gluon"):
                names[name] = types.FunctionType(found.fn.__code__, names, name)
        self.kernel = names[kernel.fn.__name__]

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*arguments: Any, num_warps: int, **constants: Any) -> None:
            assert num_warps == hopper.WARPS
            made = [Pointer.to_tensor(a) if isinstance(a, Tensor) else a for a in arguments]
            for self.machine.program in range(grid[0]):
                self.kernel(*made, **constants)
                assert not self.machine.pending

        return launch
