"""A streaming chat request with a clock on every chunk.

Only what a user sees is measured: HTTP in, HTTP out. A chunk may carry several tokens when the
server drafts, so tokens are counted by the server's running usage where it sends one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

Message = Mapping[str, str]
OnText = Callable[[str, str], object]
"""Called with what a chunk adds to the reasoning and to the answer."""
_REASONING_FIELDS = ("reasoning", "reasoning_content")


class ServerError(Exception):
    """The endpoint answered with an error, or not at all."""


@dataclass(frozen=True)
class Endpoint:
    """Where to ask: `base_url` ends in `/v1`; `key` is sent as a bearer token and never printed."""

    base_url: str
    model: str
    key: str | None = field(default=None, repr=False)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    @property
    def metrics_url(self) -> str:
        return f"{self.base_url.removesuffix('/v1')}/metrics"


@dataclass(frozen=True)
class Chunk:
    """Text that arrived `at_s` seconds after the request, and tokens so far (None: not told)."""

    at_s: float
    text: str
    tokens: int | None


@dataclass(frozen=True)
class Completion:
    """One streamed answer; `reasoning` and `text` are what the two fields held."""

    chunks: tuple[Chunk, ...]
    reasoning: str
    text: str
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str

    @property
    def ttft_s(self) -> float:
        """Seconds to the first text."""
        return self.chunks[0].at_s

    @property
    def decode_s(self) -> float:
        """Seconds from the first text to the last."""
        return self.chunks[-1].at_s - self.chunks[0].at_s

    @property
    def decoded_tokens(self) -> int:
        """Tokens that arrived after the first chunk."""
        return self.completion_tokens - (self.chunks[0].tokens or 1)

    @property
    def tokens_per_s(self) -> float:
        """Decode speed without the time to the first token."""
        return self.decoded_tokens / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def gaps_s(self) -> list[float]:
        """Time between one chunk and the next."""
        times = [chunk.at_s for chunk in self.chunks]
        return [after - before for before, after in zip(times, times[1:], strict=False)]


def stream_chat(
    endpoint: Endpoint,
    messages: Sequence[Message],
    *,
    max_tokens: int,
    temperature: float = 0.0,
    ignore_eos: bool = False,
    on_text: OnText | None = None,
    timeout_s: float = 600.0,
) -> Completion:
    """Send one chat request and take its stream in; raises `ServerError`."""
    body: dict[str, Any] = {
        "model": endpoint.model,
        "messages": list(messages),
        "max_tokens": max_tokens,
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    if ignore_eos:
        body["ignore_eos"] = True
    begin = time.perf_counter()
    with streaming(endpoint, "chat/completions", body, timeout_s) as stream:
        return collect(stream, begin, on_text)


@contextmanager
def streaming(
    endpoint: Endpoint, path: str, body: Mapping[str, Any], timeout_s: float
) -> Iterator[Iterator[dict[str, Any]]]:
    """The events that answer a POST of `body` to `path`, while the reply is open.

    Raises `ServerError` for another status than 200 and for a connection that fails or breaks.
    """
    try:
        with httpx.stream(
            "POST",
            f"{endpoint.base_url}/{path}",
            json=body,
            headers=endpoint.headers,
            timeout=timeout_s,
        ) as reply:
            if reply.status_code != 200:
                reply.read()
                raise ServerError(f"HTTP {reply.status_code}: {reply.text[:500]}")
            yield events(reply.iter_lines())
    except httpx.TransportError as error:
        raise ServerError(f"{endpoint.base_url}: {error or type(error).__name__}") from None


def events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream, up to `[DONE]`."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        payload = line[5:].strip()
        if payload == "[DONE]":
            return
        event = json.loads(payload)
        if "error" in event:
            raise ServerError(f"error inside the stream: {event['error']}")
        yield event


def collect(
    stream: Iterable[dict[str, Any]], begin: float, on_text: OnText | None = None
) -> Completion:
    """Add the events up; raises `ServerError` when no text came."""
    chunks: list[Chunk] = []
    reasoning = text = ""
    finish, usage = "", {"prompt_tokens": 0, "completion_tokens": 0}
    for event in stream:
        usage = event.get("usage") or usage
        for choice in event.get("choices", []):
            delta = choice.get("delta", {})
            thought = "".join(delta.get(name) or "" for name in _REASONING_FIELDS[:1])
            thought = thought or (delta.get(_REASONING_FIELDS[1]) or "")
            said = delta.get("content") or ""
            finish = choice.get("finish_reason") or finish
            if piece := thought + said:
                counted = (event.get("usage") or {}).get("completion_tokens")
                chunks.append(Chunk(time.perf_counter() - begin, piece, counted))
                reasoning, text = reasoning + thought, text + said
                if on_text is not None:
                    on_text(thought, said)
    if not chunks:
        raise ServerError(f"the answer is empty (finish reason {finish or 'none'})")
    tokens = usage["completion_tokens"] or len(chunks)
    return Completion(tuple(chunks), reasoning, text, usage["prompt_tokens"], tokens, finish)


def first_model(base_url: str, key: str | None) -> dict[str, Any]:
    """What an endpoint says of the first model it lists; raises `ServerError`."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        reply = httpx.get(f"{base_url}/models", headers=headers, timeout=30)
        reply.raise_for_status()
        found: dict[str, Any] = reply.json()["data"][0]
    except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
        raise ServerError(f"{base_url}/models: {error}") from None
    return found


def served_model(base_url: str, key: str | None) -> str:
    """The name of the first model an endpoint lists; raises `ServerError`."""
    try:
        return str(first_model(base_url, key)["id"])
    except KeyError:
        raise ServerError(f"{base_url}/models: its model has no id") from None
