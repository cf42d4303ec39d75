"""Every finding of the node checks, each provoked by one change to a kit that passes."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from glm_launch.nodes import preflight
from glm_launch.nodes.facts import PLUGIN_LABEL
from glm_launch.nodes.preflight import Needs, Port

GIB = 2**30
CACHE = "~/.cache/huggingface"
NEEDS = Needs(
    gpus=1, ports=(Port("MASTER_PORT", "192.168.177.12", 29521),),
    writes=((CACHE, 164 * GIB),), image="glm-exl3:cuda", owner="ops@spark-a", receives=True,
)  # fmt: skip


def report(kit, **changes):
    return preflight.check([(node, replace(NEEDS, **changes)) for node in kit.nodes])


def image(layers: list[str], plugin: str = "p1") -> dict:
    return {"name": "glm-exl3:cuda", "os": "linux", "arch": "arm64", "layers": layers,
            "labels": {PLUGIN_LABEL: plugin}, "config": "c"}  # fmt: skip


def container(owner: str | None, **more) -> dict:
    labels = {} if owner is None else {
        preflight.PROJECT_LABEL: "glm-exl3", preflight.OWNER_LABEL: owner,
        preflight.GENERATION_LABEL: "g1",
    }  # fmt: skip
    return {"name": "box", "image": "other", "state": "running", "labels": labels,
            "created": "2026-01-02T03:04:05.6Z", "gpus": True} | more  # fmt: skip


@pytest.mark.parametrize("name", ["gb10-pair", "cmp170hx-2x", "h200-2x"])
def test_a_kit_that_is_in_order_passes(kit, name) -> None:
    assert report(kit(name)) == preflight.Report()


def docker(**changes):
    return lambda node: node["docker"].update(changes)


def gpu(**changes):
    return lambda node: node["gpus"][0].update(changes)


def folder(**changes):
    return lambda node: node["paths"][0].update(changes)


def top(**changes):
    return lambda node: node.update(changes)


CASES = [
    (top(python="3.7.5"), "old-python", "python3 is 3.7.5"),
    (top(rsync=False), "no-rsync", "rsync is not installed"),
    (docker(present=False, error="x"), "docker-unusable", "docker is not installed"),
    (docker(error="Got permission denied"), "docker-unusable", "ops may not use docker"),
    (docker(error="Cannot connect"), "docker-unusable", "does not answer (Cannot connect)"),
    (docker(version="20.10.24"), "docker-unusable", "docker is 20.10.24"),
    (docker(runtimes=["runc"], toolkit=False), "docker-unusable", "no NVIDIA runtime"),
    (top(gpus=[]), "too-few-gpus", "0 GPU(s) visible, 1 needed"),
    (gpu(driver="570.12"), "old-driver", "driver 570.12"),
    (gpu(capability="8.9"), "unknown-gpu", "compute capability 8.9"),
    (gpu(processes=[{"pid": 7, "name": "ollama"}]), "gpu-in-use", "ollama (pid 7)"),
    (top(listening=[{"address": "*", "port": 29521}]), "port-in-use", "MASTER_PORT=29521"),
    (folder(free_bytes=10 * GIB), "disk-full", "10.0 GiB free, 180.4 GiB are still to come"),
    (folder(free_inodes=3), "no-inodes", "3 inodes left"),
    (folder(foreign=["/home/ops/.cache/huggingface/hub"]), "not-writable", "another user"),
    (folder(writable=False, read_only=True), "not-writable", "a read-only file system"),
    (docker(containers=[container("eve@x")]), "other-owner", "box of eve@x runs (launch g1"),
    (top(arch="x86_64"), "arch-differs", "x86_64"),
]


@pytest.mark.parametrize(("change", "code", "said"), CASES, ids=[f"{c[1]}-{c[2]}" for c in CASES])
def test_each_thing_that_is_wrong_is_found_and_explained(kit, change, code, said) -> None:
    found = report(kit("gb10-pair").with_(change)).findings
    assert [finding.code for finding in found] == [code]
    assert said in found[0].seen and found[0].why and found[0].fix
    if code != "arch-differs":
        assert found[0].seen.startswith("spark-b")


def test_all_findings_come_at_once(kit) -> None:
    def ruin(node) -> None:
        for change in (top(python="3.7"), folder(free_bytes=0), gpu(driver="1.0")):
            change(node)

    found = report(kit("gb10-pair").with_(ruin, 0).with_(ruin, 1)).findings
    assert [finding.code for finding in found] == ["old-python", "old-driver", "disk-full"] * 2


def test_a_port_on_another_address_is_not_taken(kit) -> None:
    other = top(listening=[{"address": "127.0.0.1", "port": 29521}])
    assert report(kit("gb10-pair").with_(other)) == preflight.Report()


def test_the_suggested_port_is_free(kit) -> None:
    listening = [{"address": "*", "port": port} for port in (29521, 29522, 29523)]
    (finding,) = report(kit("gb10-pair").with_(top(listening=listening))).findings
    assert re.search(r"MASTER_PORT=29524$", finding.fix)


@pytest.mark.parametrize(
    ("other", "said"),
    [(image(["a", "c"]), "spark-b: layers"), (image(["a", "b"], "p2"), "spark-b: plugin"),
     (image(["a", "b"]) | {"arch": "amd64"}, "spark-b: architecture")],
)  # fmt: skip
def test_another_image_is_named_by_what_differs(kit, other, said) -> None:
    first = kit("gb10-pair").with_(docker(images=[image(["a", "b"])]), 0)
    (finding,) = report(first.with_(docker(images=[other]))).findings
    assert finding.code == "image-differs" and said in finding.seen
    assert report(first) == preflight.Report()
    assert report(first.with_(docker(images=[image(["a", "b"]) | {"digests": ["x"]}]))) == (
        preflight.Report()
    )


def test_what_is_ours_or_stopped_or_elsewhere_does_not_refuse(kit) -> None:
    for one in (container(NEEDS.owner), container("eve@x", state="exited")):
        assert report(kit("gb10-pair").with_(docker(containers=[one]))).findings == ()
    seen = report(kit("gb10-pair").with_(docker(containers=[container(None)])))
    assert seen.findings == () and seen.warnings[0].code == "foreign-container"


def test_f13_a_container_of_ours_that_this_launch_does_not_know_is_told(kit) -> None:
    nodes = kit("gb10-pair").with_(docker(containers=[container(NEEDS.owner)])).nodes
    (warning,) = preflight.unknown_containers(nodes, NEEDS.owner, "g2")
    assert "container box is yours and runs, and its launch g1" in warning.seen
    assert "docker rm -f box" in warning.fix
    assert preflight.unknown_containers(nodes, NEEDS.owner, "g1") == []
    assert preflight.unknown_containers(nodes, "eve@x", "g2") == []


def test_other_drivers_are_a_warning(kit) -> None:
    seen = report(kit("gb10-pair").with_(gpu(driver="590.1")))
    assert seen.findings == () and "spark-b 590.1" in seen.warnings[0].seen


def test_nothing_left_to_write_needs_no_space(kit) -> None:
    full = kit("gb10-pair").with_(folder(free_bytes=0, writable=False))
    assert report(full, writes=((CACHE, 0),)) == preflight.Report()
