"""Head and worker as `start.sh start` brings them up, for tests that speak HTTP."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from equivalence import Line

ROOT = Path(__file__).parents[2]
MODEL = "GLM-5.3-Flash-EXL3"
KEY = "a-key-for-this-test"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def serving(model: Path, state: Path, settings: Mapping[str, str]) -> Iterator[str]:
    """Base address of a head and a worker that serve `model`; both are stopped at the end."""
    port = free_port()
    packages = (str(ROOT / name) for name in ("launcher", "bench", "overlay"))
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(packages),
        "GLM_STATE_DIR": str(state),
        "MODEL": str(model),
        "SPEC_METHOD": "none",
        "MAX_MODEL_LEN": "2048",
        "LANGUAGE_MODEL_ONLY": "1",
        "PORT": str(port),
        "MASTER_PORT": str(free_port()),
        "READY_TIMEOUT_S": "400",
        "SUPERVISE": "0",
        "VLLM_API_KEY": KEY,
        **settings,
    }

    def launch(verb: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "glm_launch", verb]
        return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)

    started = launch("start")
    try:
        assert started.returncode == 0, started.stdout + started.stderr
        yield f"http://127.0.0.1:{port}"
    finally:
        stopped = launch("stop")
    assert stopped.returncode == 0, stopped.stderr


@dataclass(frozen=True)
class HttpGenerate:
    """The completions endpoint as the `Generate` callable of `equivalence`."""

    base: str

    def __call__(self, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[Line]:
        return [self._one(list(p), n) for p, n in zip(prompts, lengths, strict=True)]

    def _one(self, prompt: list[int], length: int) -> Line:
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": length,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 2,
            "return_token_ids": True,
        }
        headers = {"Authorization": f"Bearer {KEY}"}
        reply = httpx.post(f"{self.base}/v1/completions", json=body, headers=headers, timeout=300)
        assert reply.status_code == 200, reply.text
        choice = reply.json()["choices"][0]
        tops = [sorted(top.values(), reverse=True) for top in choice["logprobs"]["top_logprobs"]]
        return Line(
            tokens=tuple(choice["token_ids"]),
            logprobs=tuple(choice["logprobs"]["token_logprobs"]),
            margins=tuple(top[0] - top[1] for top in tops),
        )
