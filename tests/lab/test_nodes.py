"""What preflight sees on real nodes: ssh, docker, fabric, ports, disk, images, weights."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from lab import IMAGE, Node, wait_for

from glm_launch.errors import Finding, LaunchFailedError, RefusedError
from glm_launch.nodes import fabric, images, look, memory, preflight, weights
from glm_launch.nodes.fabric import Endpoint
from glm_launch.nodes.manifest import Manifest, of_folder
from glm_launch.nodes.preflight import Needs, Port
from glm_launch.nodes.ssh import SshShell, classify
from glm_launch.nodes.weights import Model, Policy

GIB = 2**30


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A folder for control sockets, whose paths have at most 107 bytes."""
    with TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def endpoints(lab) -> list[Endpoint]:
    seen, missing = look.look_all([lab.nodes[0].shell, lab.nodes[1].ssh])
    assert missing == []
    return [Endpoint(node.fabric, facts) for node, facts in zip(lab.nodes, seen, strict=True)]


def codes(findings: list[Finding]) -> list[str]:
    return [finding.code for finding in findings]


@contextmanager
def changed(node: Node, do: str, undo: str) -> Iterator[None]:
    assert node.shell.run(["sh", "-c", do]).ok
    try:
        yield
    finally:
        assert node.shell.run(["sh", "-c", undo]).ok


def test_the_fabric_is_chosen_from_what_the_nodes_say(lab) -> None:
    choices, found = fabric.choose(endpoints(lab))
    assert found == []
    assert [(one.nic, one.mtu) for one in choices] == [("enp1s0f1np1", 9000)] * 2


def test_f5_another_mtu_is_found_and_a_full_packet_does_not_pass(lab) -> None:
    first, second = lab.nodes
    nic = "ip link set enp1s0f1np1 mtu"
    ping = ["ping", "-c1", "-W1", "-M", "do", "-s", str(fabric.ping_size(9000)), first.fabric]
    assert second.ssh.run(ping).ok
    with changed(second, f"{nic} 1500", f"{nic} 9000"):
        _, found = fabric.choose(endpoints(lab))
        assert codes(found) == ["mtu-differs"] and "node2 enp1s0f1np1 1500" in found[0].seen
        assert not second.ssh.run(ping).ok


def test_f5_an_address_that_moved_is_found(lab) -> None:
    node = lab.nodes[1]
    address = f"{node.fabric}/24 dev enp1s0f1np1"
    with changed(node, f"ip addr del {address}", f"ip addr add {address}"):
        _, found = fabric.choose(endpoints(lab))
    assert codes(found) == ["address-not-here"] and "enP7s7 10.77.0.2/24" in found[0].seen


def test_f5_a_pulled_cable_is_found(lab) -> None:
    node = lab.nodes[1]
    node.unplug()
    try:
        _, found = fabric.choose(endpoints(lab))
    finally:
        node.unplug(plugged=True)
    assert codes(found) == ["link-down"] and "node2" in found[0].seen


def test_f7_memory_is_predicted_from_what_is_available_there(lab) -> None:
    node = endpoints(lab)[1].facts
    need = memory.demand(10_000 * GIB, 0, 0, ranks=2)
    (finding,) = memory.findings(memory.predict(node, need, memory.Reserve(), head=False))
    assert "node2: memory would need" in finding.seen and "weights 5000.0 GiB" in finding.seen


def test_f7_a_container_over_its_memory_is_said_to_be_out_of_memory(lab) -> None:
    shell = lab.nodes[1].shell
    shell.run(["docker", "run", "--name", "big", "--network", "host", "--memory", "32m",
               "--entrypoint", "python3", IMAGE, "-c", "x = bytearray(10**9)"])  # fmt: skip
    flags = shell.run(
        ["docker", "inspect", "-f", "{{.State.OOMKilled}} {{.State.ExitCode}}", "big"]
    )
    assert flags.out.split() == ["true", "137"]


def test_f14_a_taken_port_is_found_on_the_node_that_has_it(lab) -> None:
    node = lab.nodes[1]
    program = "import socket, time; s = socket.create_server(('10.77.1.2', 29521)); time.sleep(60)"
    holder = subprocess.Popen(node.shell.argv(["python3", "-c", program]))
    try:
        wait_for("no listener", lambda: "29521" in node.shell.run(["ss", "-Hltn"]).out, 10)
        seen = [one.facts for one in endpoints(lab)]
        needs = Needs(ports=(Port("MASTER_PORT", node.fabric, 29521),))
        report = preflight.check([(facts, needs) for facts in seen])
    finally:
        holder.kill()
        holder.wait()
        node.shell.run(["pkill", "-f", "create_server"])
    assert codes(list(report.findings)) == ["port-in-use"]
    assert report.findings[0].seen.startswith("node2: MASTER_PORT=29521")


def ssh_cause(shell: SshShell) -> str:
    done = shell.run(["true"], timeout_s=15)
    assert done.code == 255, done
    return classify(done, shell.target).code


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (("IdentityFile=/no/such/key", "IdentitiesOnly=yes"), "ssh-denied"),
        (("HostKeyAlias=new",), "ssh-host-key-unknown"),
        (("Port=2222",), "ssh-refused"),
        (("HostName=10.77.0.99",), "ssh-route"),
        (("HostName=no.such.name",), "ssh-name"),
        (("User=nobody",), "ssh-denied"),
    ],
)
def test_f15_what_ssh_cannot_do_is_classified(lab, sockets, change, code) -> None:
    shell = lab.nodes[1].ssh
    override = tuple(part for one in change for part in ("-o", one))
    if change[0].startswith("IdentityFile"):
        override = ("-F", "/dev/null", "-o", f"UserKnownHostsFile={lab.folder}/known_hosts",
                    "-o", "HostName=10.77.0.2", "-o", "HostKeyAlias=node2", *override)  # fmt: skip
        shell = replace(shell, options=override, sockets=sockets)
    else:
        shell = replace(shell, options=(*override, *shell.options), sockets=sockets)
    assert ssh_cause(shell) == code


def test_f15_a_changed_host_key_is_classified(lab, tmp_path, sockets) -> None:
    key = (lab.folder / "key.pub").read_text().split()[1]
    known = tmp_path / "known"
    known.write_text(f"node2,10.77.0.2 ssh-ed25519 {key}\n")
    shell = lab.nodes[1].ssh
    options = ("-o", f"UserKnownHostsFile={known}", *shell.options)
    assert ssh_cause(replace(shell, options=options, sockets=sockets)) == "ssh-host-key-changed"


def test_f15_a_key_file_that_everybody_can_read_is_classified(lab, tmp_path, sockets) -> None:
    key = tmp_path / "key"
    key.write_bytes((lab.folder / "key").read_bytes())
    key.chmod(0o644)
    config = tmp_path / "config"
    text = (lab.folder / "ssh_config").read_text()
    config.write_text(text.replace(f"{lab.folder}/key\n", f"{key}\n"))
    shell = replace(lab.nodes[1].ssh, options=("-F", str(config)), sockets=sockets)
    assert ssh_cause(shell) == "ssh-key-file"


def test_f16_a_daemon_that_is_down_is_found(lab) -> None:
    node = lab.nodes[1]
    moved = "mv /run/docker.sock"
    with changed(node, f"{moved} /run/gone", "mv /run/gone /run/docker.sock"):
        seen = endpoints(lab)[1].facts
    (finding,) = preflight.check_docker(seen, Needs())
    assert "the docker daemon does not answer" in finding.seen and "node2" in finding.seen


def test_f17_the_cluster_of_another_operator_is_found(lab) -> None:
    labels = {preflight.PROJECT_LABEL: "glm-exl3", preflight.OWNER_LABEL: "eve@elsewhere",
              preflight.GENERATION_LABEL: "g7"}  # fmt: skip
    options = [part for key, value in labels.items() for part in ("--label", f"{key}={value}")]
    lab.nodes[1].shell.run(["docker", "run", "-d", "--name", "hers", "--network", "host", *options,
                            "--entrypoint", "sleep", IMAGE, "60"])  # fmt: skip
    seen = endpoints(lab)[1].facts
    (finding,) = preflight.check_containers(seen, Needs(owner="me@here"))
    assert "container hers of eve@elsewhere runs (launch g7" in finding.seen


def test_f12_an_image_is_sent_once_and_skew_is_seen(lab) -> None:
    head, worker = lab.nodes[0].shell, lab.nodes[1].ssh
    name = "glm-exl3:sent"
    assert head.run(["docker", "tag", IMAGE, name]).ok
    assert images.ensure(name, head, [worker]) == ["node2"]
    assert images.ensure(name, head, [worker]) == []
    other = ["docker", "import", "-c", "LABEL io.glm-exl3.plugin=other", "/lab/image.tar", name]
    assert worker.run(other).ok
    seen, _ = look.look_all([head, worker], images=[name])
    (finding,) = preflight.check_images([(facts, Needs(image=name)) for facts in seen])
    assert "node2: plugin" in finding.seen
    assert images.ensure(name, head, [worker]) == ["node2"]


def test_an_image_that_nobody_has_is_refused(lab) -> None:
    with pytest.raises(LaunchFailedError, match="has no image none:1"):
        images.ensure("none:1", lab.nodes[0].shell, [lab.nodes[1].ssh])


@pytest.fixture
def model(tmp_path) -> Model:
    root = tmp_path / "models--lab--tiny"
    folder = root / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (root / "blobs").mkdir()
    for number in range(3):
        blob = root / "blobs" / f"b{number}"
        blob.write_bytes(bytes([number]) * 700_000)
        (folder / f"model-{number}.safetensors").symlink_to(f"../../blobs/b{number}")
    known = of_folder(folder)
    return Model(folder, root, Manifest("lab/tiny", "abc", "hub", known.files))


TARGET = "/srv/hub/models--lab--tiny"


def test_f9_f10_weights_arrive_over_the_fabric_and_damage_is_repaired(lab, model) -> None:
    node = lab.nodes[1]
    address = {"address": node.fabric}
    assert weights.sync(model, node.ssh, TARGET, Policy(), **address) == 3
    assert weights.sync(model, node.ssh, TARGET, Policy(), **address) == 0
    blob = f"{TARGET}/blobs/b1"
    assert node.shell.run(["sh", "-c", f"printf x | dd of={blob} bs=1 seek=5 conv=notrunc"]).ok
    with pytest.raises(RefusedError, match=r"model-1\.safetensors"):
        weights.sync(model, node.ssh, TARGET, Policy(skip_sync=True), **address)
    assert weights.sync(model, node.ssh, TARGET, Policy(), **address) == 1
    assert node.shell.run(["sh", "-c", f"truncate -s -1 {blob}"]).ok
    assert weights.sync(model, node.ssh, TARGET, Policy(), **address) == 1
    node.shell.run(["rm", "-rf", "/srv/hub"])


def test_f11_a_full_disk_is_named_and_leaves_nothing_that_looks_complete(lab, model) -> None:
    node = lab.nodes[1]
    with changed(
        node, "mkdir -p /mnt/s && mount -t tmpfs -o size=1m tmpfs /mnt/s", "umount /mnt/s"
    ):
        target = "/mnt/s/model"
        with pytest.raises(RefusedError, match="no space left"):
            weights.sync(model, node.ssh, target, Policy(), address=node.fabric)
        with pytest.raises(RefusedError, match="is not complete on node2"):
            weights.sync(model, node.ssh, target, Policy(skip_sync=True))
        facts = look.look(node.ssh, paths=[target])
        (finding,) = preflight.check_disk(facts, Needs(writes=((target, 2 * GIB),)))
        assert finding.code == "disk-full" and "node2" in finding.seen


def test_a_node_that_is_off_is_a_finding_and_the_others_are_still_seen(lab) -> None:
    gone = replace(lab.nodes[1].ssh, name="node9", options=("-o", "HostName=10.77.0.9",
                   *lab.nodes[1].ssh.options), sockets=Path("/tmp/glm-exl3-none"))  # fmt: skip
    seen, missing = look.look_all([lab.nodes[0].shell, gone])
    assert [facts.host for facts in seen] == ["node1"]
    assert codes(missing) == ["ssh-route"]
