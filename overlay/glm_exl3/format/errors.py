"""Errors that say what was seen, why it matters and what to do."""

from __future__ import annotations

from typing import Any, Self


class GlmExl3Error(Exception):
    """Root of the plugin's errors.

    `code` is a stable short name, `seen` the observation with its value, `why` its consequence and
    `fix` the next step. The message is the three sentences in that order.
    """

    def __init__(self, *, code: str, seen: str, why: str, fix: str) -> None:
        self.code, self.seen, self.why, self.fix = code, seen, why, fix
        super().__init__(self.message())

    def message(self) -> str:
        return ". ".join(part.rstrip(".") for part in (self.seen, self.why, self.fix) if part) + "."

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception's own protocol calls the class with the message alone.
        return _rebuild, (type(self), vars(self))


class FormatError(GlmExl3Error):
    """A checkpoint, or one tensor in it, that cannot be what it claims to be."""

    def __init__(
        self,
        *,
        code: str,
        seen: str,
        why: str,
        fix: str,
        file: str | None = None,
        tensor: str | None = None,
    ) -> None:
        self.file, self.tensor = file, tensor
        super().__init__(code=code, seen=seen, why=why, fix=fix)

    def message(self) -> str:
        where = ": ".join(part for part in (self.file, self.tensor) if part)
        return f"{where}: {super().message()}" if where else super().message()

    def at(self, *, tensor: str) -> Self:
        """The same finding, about `tensor`."""
        return type(self)(**{**vars(self), "tensor": tensor})


def _rebuild(kind: type[GlmExl3Error], parts: dict[str, Any]) -> GlmExl3Error:
    return kind(**parts)
