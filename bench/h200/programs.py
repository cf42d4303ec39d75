"""The other programs of the visit: kernels, text, drafting, recode, edits, KV and the peer."""

from __future__ import annotations

from typing import Any

from h200.engines import FUSED, NCCL, READY, WARM
from h200.job import Job, python

EXPECTED = "{out}/{name}.json"
GGUF = {"PYTHONPATH": "{work}/site"}
PEER = {"PYTHONPATH": "{work}/peer:{work}/site"}


def prepare(
    name: str, expect: int, limit: int, at: int, *needs: str, quick: bool = True,
    vital: bool = False, after: tuple[str, ...] = (),
) -> Job:  # fmt: skip
    """A step of `h200.prepare` beside everything else."""
    command = python("h200.prepare", name.replace(".", "-"), "{files}", "{work}")
    return Job(name, command, expect, limit, at, 0, needs=needs, quick=quick, vital=vital,
               after=after)  # fmt: skip


SETUP = (
    prepare("library", 15, 300, 0, vital=True),
    prepare("site", 5, 60, 0),
    prepare("caches", 5, 60, 0),
    prepare("flashinfer", 10, 500, 1, quick=False, after=("caches",)),
    prepare("folders", 40, 240, 1),
    prepare("tiny", 20, 120, 2),
    prepare("peer.kernels", 120, 500, 4, "library", quick=False),
    prepare("peer.package", 30, 560, 3, "site", quick=False),
    Job("warm", python("e2e.gpu_text", "{work}/warm", "--out", EXPECTED, "--only",
        "nano-dflash,nano-mtp", "--at-once", "2", "--seconds", "320"), 200, 340, 5,
        exclusive=False, gib=40, needs=("library",), after=("caches", "flashinfer")),
)  # fmt: skip


def timing(
    name: str, module: str, *arguments: str, expect: int, at: int, needs: tuple[str, ...] = (),
    limit: int = 0, beside_gib: int = 0, **more: Any,
) -> Job:  # fmt: skip
    """A measurement that has a GPU alone, or one without times beside others."""
    place = {"exclusive": False, "gib": beside_gib} if beside_gib else {}
    command, limit = python(module, *arguments), limit or 2 * expect + 40
    more = {"after": ("caches",), "needs": ("library", *needs), **place, **more}
    return Job(name, command, expect, limit, at, **more)


def sanitizer(tool: str, at: int) -> Job:
    """Every kernel once under a tool; anything it finds fails the job."""
    command = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "{python}", "-m")
    return Job(tool, (*command, "kernels.small"), 120, 500, at, exclusive=False, gib=8,
               needs=("library",), quick=False)  # fmt: skip


KERNELS = (
    Job("gpu-tests", ("{python}", "-m", "pytest", "{root}/tests/gpu", "-q", "-n", "8", "-p",
        "no:cacheprovider", "--junitxml={out}/gpu-tests.xml"), 70, 420, 10, exclusive=False,
        gib=60, needs=("library",)),
    Job("gpu-tests.two", ("{python}", "-m", "pytest", "{root}/tests/gpu/test_execution.py", "-q",
        "-p", "no:cacheprovider", "-k", "choose_the_device"), 15, 60, 10, gpus=2, exclusive=False,
        gib=10, needs=("library",)),
    timing("layers", "e2e.layers", EXPECTED, expect=80, at=11),
    timing("layers.few", "e2e.layers", EXPECTED, "--tokens", "1,2,4,8", "--orders",
           "experts,cold,vllm", expect=15, at=12),
    timing("tune", "kernels.tune", "--family", "full", "--out", EXPECTED, expect=40, at=11),
    timing("layers.same-suh", "e2e.layers", EXPECTED, "--same-suh", "--tokens", "1", expect=30,
           at=12),
    timing("kernels", "kernels", "--out", EXPECTED, "--peer", "{work}/exl3_peer.so", expect=150,
           at=36, needs=("peer.kernels",)),
    timing("kernels.products", "kernels.products", expect=25, at=70),
    sanitizer("racecheck", 30),
    sanitizer("memcheck", 31),
    Job("one-lane", python("kernels.one_lane", "{work}/one-lane"), 150, 560, 68, 0,
        quick=False, needs=("library",)),
    timing("compare.one-lane", "kernels.one_lane", "{work}/one-lane", "--compare", EXPECTED,
           expect=70, at=37, needs=("one-lane",)),
    timing("router", "e2e.router", EXPECTED, expect=25, at=50),
    timing("seam", "e2e.seam", EXPECTED, expect=30, at=51),
    timing("kda", "e2e.kda", EXPECTED, expect=25, at=52),
    timing("lookup", "e2e.lookup_time", EXPECTED, expect=25, at=53),
    timing("kv", "kv.measure", EXPECTED, "--seconds", "85", expect=95, at=54),
    timing("kv.heads", "kv.measure", EXPECTED, "--heads", "32,16", "--seconds", "60", expect=70,
           at=55),
    timing("kv.variants", "kv.variants", EXPECTED, "--seconds", "100", expect=110, at=37),
    timing("kv.whole", "kv.measure", EXPECTED, expect=300, at=90, limit=560),
)  # fmt: skip


def serve(model: str, window: str, utilization: str) -> tuple[str, ...]:
    """The command of a server of random weights."""
    return (
        "{python}", "-m", "vllm.entrypoints.cli.main", "serve", model, "--load-format",
        "exl3_dummy", "--language-model-only", "--max-model-len", window,
        "--max-num-batched-tokens", "8192", "--max-num-seqs", "16", "--gpu-memory-utilization",
        utilization,
    )  # fmt: skip


ALONE = (*serve("{work}/full", "auto", "0.97"), "--port", "{port}0")
SERVE = (
    *serve("{work}/pair", "40960", "0.95"), "--tensor-parallel-size",
    "2", "--disable-custom-all-reduce", "--nnodes", "2", "--master-addr", "127.0.0.1",
    "--master-port", "{port}1",
)  # fmt: skip
"""Two nodes of one GPU each on one host: custom all-reduce would look for a peer it cannot see."""
WORKER = ("env", "CUDA_VISIBLE_DEVICES={gpu1}", *SERVE, "--node-rank", "1", "--headless")
HEAD = ("env", "CUDA_VISIBLE_DEVICES={gpu0}", *SERVE, "--node-rank", "0", "--port", "{port}0")
LOCAL = {
    "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo",
}  # fmt: skip
TEXT_TWO = Job(
    "text.two", python("e2e.gpu_text", "{work}/text-two", "--out", EXPECTED, "--only", "two",
                       "--seconds", "330", "--memory-gib", "2",
                       "--tiny", "{work}/tiny"), 120, 370, 29, gpus=2, env=NCCL,
    needs=("library", "tiny"), after=WARM, exclusive=False, gib=36,
)  # fmt: skip


def served(
    name: str, requests: str, prefill: str, limit_s: int, command: tuple[str, ...], *,
    expect: int, limit: int, at: int, **more: Any,
) -> Job:  # fmt: skip
    """A server under load over HTTP; `command` are the options and, behind --, what serves."""
    url = "http://127.0.0.1:{port}0/v1"
    load = ("--url", url, "--requests", requests, "--prefill", prefill, "--limit", str(limit_s))
    more = {"env": LOCAL, "needs": READY, "after": WARM, **more}
    return Job(name, python("e2e.serve", EXPECTED, *load, *command), expect, limit, at, **more)


SERVED = (
    TEXT_TWO,
    served("full.served", "1,2,4,8,16", "8192,32768,65536,131072", 200, ("--", *ALONE), expect=140,
           limit=300, at=19),
    served("full.ready", "1,16", "32768", 420, ("--", *ALONE), expect=300, limit=480, at=19,
           quick=False),
    served("pair.served", "1,4,16", "32768", 240, ("--beside", " ".join(WORKER), "--", *HEAD),
           expect=190, limit=360, at=35, env={**NCCL, **LOCAL}, gpus=2),
)  # fmt: skip

DRAFTING = ("e2e.drafting", "{work}/drafting", "--expected", EXPECTED)
OTHERS = (
    timing("recode.projections", "e2e.recode", "projections", EXPECTED, "--budget-s", "85",
           expect=95, at=55, limit=170),
    timing("recode.step", "e2e.recode", "step", "{work}/recode", EXPECTED, "--schemes",
           "off,fp8,exl3", expect=230, at=60,
           limit=560, after=WARM),
    timing("recode.nano", "nano.recode", "{root}/bench/nano/model/tr3", EXPECTED, "--schemes",
           "fp8,fp8-scaled,int8,exl3:6", expect=60, at=65, beside_gib=10),
    timing("edits", "e2e.edits_load", "{work}/edits", "--out", EXPECTED, expect=90, at=56,
           env=GGUF, needs=("site",)),
    timing("text.one", "e2e.gpu_text", "{work}/text-one", "--out", EXPECTED, "--seconds", "380",
           "--tiny", "{work}/tiny", expect=120, at=13, limit=420, needs=("tiny",), after=WARM,
           beside_gib=85),
    timing("text.fused", "e2e.gpu_text", "{work}/text-fused", "--out", EXPECTED, "--only",
           "nano-none,nano-mtp,nano-dflash,tiny-none,tiny-mtp,tr3-none", "--seconds", "300",
           "--memory-gib", "2", "--at-once", "3", "--tiny", "{work}/tiny", expect=110, at=42,
           limit=330, needs=("tiny",), after=WARM, env=FUSED, beside_gib=25),
    timing("drafting.methods", *DRAFTING, "--only", "methods,soak,planted", "--budget-s", "480",
           "--at-once", "9", expect=240, at=41, limit=520, after=WARM, beside_gib=90),
    timing("drafting.pack", *DRAFTING, "--only", "pack", expect=190, at=39),
    timing("drafting.time", *DRAFTING, "--only", "time", expect=70, at=40, after=WARM),
    timing("kv.text", "kv.visit", "{work}/kv", "--only", "text", "--seconds", "240",
           "--expected", EXPECTED, "--tiny", "{work}/tiny", expect=140, at=38, limit=260,
           needs=("tiny",), after=WARM, beside_gib=50),
    timing("kv.turns", "kv.visit", "{work}/kv-turns", "--only", "turns", "--seconds", "160",
           "--expected", EXPECTED, expect=60, at=38, limit=170, after=WARM, beside_gib=30),
    timing("options", "e2e.draft_options", "--out", EXPECTED, "--budget-s", "500", expect=200,
           at=59, limit=560, after=WARM),
    timing("options.soak", "e2e.draft_options", "--out", EXPECTED, "--soak", "2000",
           "--budget-s", "500", expect=180, at=67, limit=560, after=WARM),
    timing("hybrid", "e2e.hybrid", EXPECTED, "--graphs", "--real", expect=90, at=61, after=WARM),
)  # fmt: skip


def peer_engine(layers: int, expect: int, at: int, **more: Any) -> Job:
    return Job(
        f"peer.engine{layers}",
        python("e2e.peer_engine", EXPECTED, "--layers", str(layers), "--work", "{work}"),
        expect, 2 * expect + 60, at, env=PEER, needs=("peer.package",), quick=False, **more,
    )  # fmt: skip


BUILT = ("library", "peer.engine4")
PEERS = (
    peer_engine(4, 110, 9, after=("caches",), exclusive=False, gib=24),
    *(peer_engine(layers, expect, at, after=BUILT)
      for layers, expect, at in ((8, 60, 33), (45, 120, 34), (16, 80, 69))),
)  # fmt: skip
"""Four layers first, beside other jobs: the peer's first pass compiles Triton kernels for 96 s."""
JOBS = (*SETUP, *KERNELS, *SERVED, *OTHERS, *PEERS)
