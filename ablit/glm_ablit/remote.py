"""Byte ranges of files at one commit of a hub repository, over HTTP.

Every answer proves which bytes it holds: status 206, the range and total size that were asked for,
the commit and, once known, the entity tag of the file. A server that would send the whole file is
left at once. Transport errors and busy servers are tried again, and the pieces that arrived before
stay with the caller; everything else is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import httpx
from huggingface_hub import hf_hub_url
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from glm_exl3.format.donor import EditError

MAX_JSON_BYTES = 64 << 20
TIMEOUT = httpx.Timeout(30.0, connect=15.0)
BUSY = frozenset({408, 429, 500, 502, 503, 504})
_RANGE = re.compile(r"^bytes (\d+)-(\d+)/(\d+)$")


class PassingError(Exception):
    """A failure that may be gone at the next attempt."""


@dataclass(frozen=True)
class Answer:
    """A range that is being sent: the file's `etag` and `total` size, and its `response`."""

    etag: str
    total: int
    response: httpx.Response

    def pieces(self, length: int) -> Iterator[bytes]:
        """The bytes as they come; raises PassingError when fewer or more than `length` do."""
        arrived = 0
        try:
            for piece in self.response.iter_raw():
                arrived += len(piece)
                if arrived > length:
                    break
                yield piece
        except httpx.TransportError as error:
            raise PassingError(f"the connection broke: {error!r}") from error
        if arrived != length:
            raise PassingError(f"{arrived} bytes came instead of {length}")


@dataclass
class Remote:
    """One repository at one commit. `moved` counts body bytes that were received."""

    repo: str
    revision: str
    endpoint: str = ""
    token: str | None = None
    attempts: int = 6
    wait_s: float = 1.0
    moved: int = 0
    etags: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._client = httpx.Client(follow_redirects=True, timeout=TIMEOUT)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._client.close()

    def retrying(self) -> Retrying:
        """Attempts around something that may raise PassingError."""
        return Retrying(
            retry=retry_if_exception_type(PassingError),
            wait=wait_exponential(multiplier=self.wait_s, max=30),
            stop=stop_after_attempt(self.attempts),
            reraise=True,
        )

    @contextmanager
    def request(self, file: str, start: int | None = None, stop: int = 0) -> Iterator[Answer]:
        """Ask for `[start, stop)` of `file`, or all of it; raises PassingError or EditError."""
        url = hf_hub_url(self.repo, file, revision=self.revision, endpoint=self.endpoint or None)
        headers = build_hf_headers(token=self.token or False, library_name="glm-exl3")
        headers["Accept-Encoding"] = "identity"
        if start is not None:
            headers["Range"] = f"bytes={start}-{stop - 1}"
        try:
            with self._client.stream("GET", url, headers=headers) as response:
                yield self._checked(response, file, start, stop)
        except httpx.TransportError as error:
            raise PassingError(f"{file}: {error!r}") from error

    def _checked(self, response: httpx.Response, file: str, start: int | None, stop: int) -> Answer:
        where, status = f"{self.repo}@{self.revision[:12]}/{file}", response.status_code
        if status in BUSY:
            raise PassingError(f"{where}: HTTP {status}")
        if status in (401, 403):
            raise _refused(where, f"HTTP {status}", "accept the donor's terms and set HF_TOKEN")
        if status == 404:
            raise MissingFileError(
                code="donor-file",
                seen=f"{where}: no such file, revision or repository (HTTP 404)",
                why="the donor's tensors are found through its files",
                fix="check ABLIT_DONOR and ABLIT_DONOR_REVISION",
            )
        if status != (200 if start is None else 206):
            raise _refused(where, f"HTTP {status} to a request for a range", "use another mirror")
        commit, etag = _identity(response)
        if commit and commit != self.revision:
            raise _refused(where, f"the server sends commit {commit}", "pin the commit you want")
        if self.etags.setdefault(file, etag) != etag:
            raise _refused(
                where, f"entity tag {etag}, before {self.etags[file]}", "remove what was fetched"
            )
        total = int(response.headers.get("Content-Length") or 0)
        if start is not None:
            match = _RANGE.match(response.headers.get("Content-Range", ""))
            if not match or (int(match[1]), int(match[2])) != (start, stop - 1):
                said = response.headers.get("Content-Range", "no Content-Range")
                raise _refused(where, f"asked for {start}-{stop - 1}, got {said}", "use a mirror")
            total = int(match[3])
        return Answer(etag, total, response)

    def read(self, file: str, start: int, stop: int) -> tuple[bytes, Answer]:
        """A small range, whole."""
        for attempt in self.retrying():
            with attempt, self.request(file, start, stop) as answer:
                data = b"".join(self._counted(answer.pieces(stop - start)))
        return data, answer

    def read_json(self, file: str) -> dict[str, Any]:
        """A whole JSON object. Raises EditError."""
        for attempt in self.retrying():
            with attempt, self.request(file) as answer:
                text = b""
                for piece in self._counted(answer.response.iter_raw()):
                    text += piece
                    if len(text) > MAX_JSON_BYTES:
                        raise _refused(file, f"more than {MAX_JSON_BYTES} bytes of JSON", "")
        try:
            value = json.loads(text)
        except ValueError as error:
            raise _refused(file, f"no JSON ({error})", "use another mirror") from error
        if not isinstance(value, dict):
            raise _refused(file, "no JSON object", "use another mirror")
        return value

    def _counted(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            self.moved += len(piece)
            yield piece


class MissingFileError(EditError):
    """A file that the repository does not have."""


def _identity(response: httpx.Response) -> tuple[str, str]:
    """(commit, entity tag) as the hub says them, which is before it redirects to its storage."""
    chain = [*response.history, response]
    commit = next((one.headers["X-Repo-Commit"] for one in chain if "X-Repo-Commit" in one.headers),
                  "")  # fmt: skip
    names = ("X-Linked-Etag", "ETag")
    tags = [one.headers[name] for name in names for one in chain if name in one.headers]
    return commit, (tags[0] if tags else "").removeprefix("W/").strip('"')


def _refused(where: str, seen: str, fix: str) -> EditError:
    return EditError(
        code="donor-answer",
        seen=f"{where}: {seen}",
        why="bytes whose origin is not proven must not become weights",
        fix=fix,
    )
