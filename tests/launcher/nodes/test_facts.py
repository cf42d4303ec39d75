"""The probe on this machine and on invented trees, and its JSON as values."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm_launch.nodes import facts, probes

PROBE = Path(probes.__file__).with_name("facts.py")
GIDS = {
    0: ("fe80:0000:0000:0000:4e7e:79ff:fe00:1004", "IB/RoCE v1"),
    3: ("0000:0000:0000:0000:0000:ffff:c0a8:b10b", "RoCE v2"),
    4: ("0000:0000:0000:0000:0000:0000:0000:0000", ""),
}


def probe(path: str = os.environ["PATH"], **request: object) -> facts.NodeFacts:
    done = subprocess.run(
        [sys.executable, "-", json.dumps(request)],
        input=PROBE.read_text(), capture_output=True, text=True, check=True,
        env={"PATH": path, "HOME": os.environ.get("HOME", "/")},
    )  # fmt: skip
    return facts.read(json.loads(done.stdout))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def program(folder: Path, name: str, body: str) -> None:
    folder.mkdir(exist_ok=True)
    script = folder / name
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)


def test_this_machine(tmp_path) -> None:
    seen = probe(paths=[str(tmp_path / "not" / "yet")])
    assert seen.memory.total > seen.memory.available > 0
    assert seen.nic_of("127.0.0.1") is not None
    (folder,) = seen.paths
    assert not folder.exists and folder.writable and folder.free_bytes > 0


def test_a_tree_with_rdma(tmp_path) -> None:
    port = tmp_path / "sys/class/infiniband/rocep1s0f1/ports/1"
    write(port / "state", "4: ACTIVE")
    for index, (gid, kind) in GIDS.items():
        write(port / "gids" / str(index), gid)
        if kind:
            write(port / "gid_attrs/types" / str(index), kind)
            write(port / "gid_attrs/ndevs" / str(index), "enp1s0f1np1")
    nic = tmp_path / "sys/class/net/enp1s0f1np1"
    for name, text in (("mtu", "9000"), ("operstate", "up"), ("carrier", "1"), ("speed", "-1")):
        write(nic / name, text)
    write(tmp_path / "proc/meminfo", "MemTotal: 100 kB\nMemAvailable: 40 kB")
    seen = probe(root=str(tmp_path))
    (hca,) = seen.hcas
    assert (hca.name, hca.port, hca.state) == ("rocep1s0f1", 1, "ACTIVE")
    assert [(gid.index, gid.address) for gid in hca.gids][1:] == [(3, "192.168.177.11")]
    assert seen.memory == facts.Memory(100 * 1024, 40 * 1024, 0)
    assert seen.nics == (facts.Nic("enp1s0f1np1", True, True, 9000, None, ()),)


def test_gpus_with_and_without_memory_of_their_own(tmp_path) -> None:
    program(
        tmp_path / "bin", "nvidia-smi",
        'case "$1" in *gpu=*) echo "0, NVIDIA GB10, GPU-1, [N/A], 580.95.05, 12.1"; '
        'echo "1, NVIDIA H200, GPU-2, 143771, 580.95.05, 9.0";; '
        '*) echo "GPU-2, 77, python3, 512";; esac',
    )  # fmt: skip
    first, second = probe(path=f"{tmp_path / 'bin'}:/usr/bin:/bin").gpus
    assert first.unified and first.capability == "12.1"
    assert second.memory_bytes == 143771 * 2**20
    assert second.processes == (facts.GpuProcess(77, "python3", 512 * 2**20),)


@pytest.mark.parametrize(
    ("body", "present", "error"),
    [
        (None, False, "docker: command not found"),
        ("echo 'permission denied while trying to connect' >&2; exit 1", True, "permission denied"),
        ("""echo '{"ServerErrors": ["Cannot connect to the Docker daemon"]}'; exit 1""",
         True, "Cannot connect"),
        ("echo not json", True, "no answer"),
    ],
)  # fmt: skip
def test_docker_that_does_not_work_is_a_fact(tmp_path, body, present, error) -> None:
    (tmp_path / "bin").mkdir()
    if body:
        program(tmp_path / "bin", "docker", body)
    seen = probe(path=str(tmp_path / "bin")).docker
    assert seen.present is present and error in seen.error


def test_an_image_is_known_by_what_it_holds(tmp_path) -> None:
    entry = {"Os": "linux", "Architecture": "arm64", "RootFS": {"Layers": ["sha256:a"]},
             "Config": {"Labels": {facts.PLUGIN_LABEL: "p1"}, "Env": ["A=1"]}}  # fmt: skip
    program(
        tmp_path / "bin", "docker",
        f"""case "$1" in info) echo '{{"ServerVersion": "28.2.2"}}';; ps) ;; """
        f"""image) echo '{json.dumps([entry])}';; esac""",
    )  # fmt: skip
    seen = probe(path=f"{tmp_path / 'bin'}:/usr/bin:/bin", images=["x"]).image("x")
    assert seen is not None
    assert seen.identity[:4] == ("linux", "arm64", "p1", ("sha256:a",))


def test_the_probe_needs_no_newer_python_and_no_package() -> None:
    for script in PROBE.parent.glob("*.py"):
        tree = ast.parse(script.read_text(), feature_version=(3, 8))
        names = {
            name.split(".")[0]
            for node in ast.walk(tree)
            for name in (
                [alias.name for alias in node.names] if isinstance(node, ast.Import)
                else [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            )
        }  # fmt: skip
        assert names <= sys.stdlib_module_names


@pytest.mark.parametrize("name", ["gb10-pair", "cmp170hx-2x", "h200-2x", "rtx6000-pair"])
def test_every_kit_can_be_read(kit, name) -> None:
    assert "not recorded" in kit(name).record["origin"]
    assert all(node.host and node.memory.available for node in kit(name).nodes)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["memory", "gpus", "docker", "name"]), inner, max_size=3
            )
        ),
        max_leaves=8,
    )
)
def test_broken_records_are_value_errors(value) -> None:
    record = {"schema": 1} | value if isinstance(value, dict) else value
    with suppress(ValueError):
        assert isinstance(facts.read(record), facts.NodeFacts)
