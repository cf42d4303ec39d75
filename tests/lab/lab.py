"""Nodes with a docker daemon and an ssh server each, on one machine, in namespaces.

A `Lab` has a switch with two networks, as real kits do: management (10.77.0.x) and fabric
(10.77.1.x, MTU 9000). A `Node` is a pid, mount, network, uts and ipc namespace over one shared root
file system. `power_off` kills it whole, `unplug` takes its fabric port down. Everything lives in
namespaces that this module makes, and `close` removes all of it; the host's own network is never
touched. Needs root and tests/lab/setup.sh.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from glm_launch.nodes.ssh import Done, SshShell, execute

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CACHE = Path(os.environ.get("GLM_LAB_CACHE", ROOT / ".cache" / "lab"))
ROOTFS = CACHE / "node"
BASE = CACHE / "base.tar"
FABRIC_MTU = 9000
READY_S = 60.0
IMAGE = "glm-exl3:lab"
HOME = "/root"
# A machine of its own inherits nothing. vLLM sets LD_PRELOAD where an engine is configured; a node
# has no such library, and containerd takes what ld.so then says for a socket's address.
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": HOME,
    "LANG": "C.UTF-8",
}  # fmt: skip
_CLONE_NEWNET = 0x40000000


def run(*argv: str, check: bool = True) -> str:
    done = subprocess.run(argv, capture_output=True, text=True)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")
    return done.stdout


def refusal() -> str:
    """Why this machine lets nobody run a lab; empty when it does."""
    if os.geteuid():
        return "it needs root"
    spaces = ("unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork")
    done = subprocess.run([*spaces, "true"], capture_output=True, text=True)
    return f"namespaces are refused: {done.stderr.strip()}" if done.returncode else ""


def wait_for(what: str, condition: Callable[[], bool], timeout_s: float = READY_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.05)


@dataclass
class Node:
    """One machine; `number` counts from 1."""

    lab: Lab
    number: int
    process: subprocess.Popen[bytes] | None = None
    init: int = 0

    @property
    def name(self) -> str:
        return f"node{self.number}"

    @property
    def address(self) -> str:
        return f"10.77.0.{self.number}"

    @property
    def fabric(self) -> str:
        return f"10.77.1.{self.number}"

    @property
    def space(self) -> str:
        return f"{self.lab.name}-{self.name}"

    @property
    def work(self) -> Path:
        return self.lab.folder / self.name

    @property
    def shell(self) -> LabShell:
        return LabShell(self.name, self)

    @property
    def ssh(self) -> SshShell:
        return SshShell(self.name, self.name, ("-F", str(self.lab.folder / "ssh_config")),
                        self.lab.folder / "s")  # fmt: skip

    def wire(self) -> None:
        """The node's two network devices, named as on a GB10."""
        run("ip", "netns", "add", self.space)
        for bridge, nic, address, mtu in (
            ("mgmt", "enP7s7", self.address, 1500),
            ("fabric", "enp1s0f1np1", self.fabric, FABRIC_MTU),
        ):
            port = f"{bridge}{self.number}"
            switch = self.lab.switch
            run("ip", "-n", switch, "link", "add", port, "mtu", str(mtu), "type", "veth",
                "peer", "name", nic, "netns", self.space)  # fmt: skip
            run("ip", "-n", switch, "link", "set", port, "master", bridge, "up")
            run("ip", "-n", self.space, "link", "set", nic, "mtu", str(mtu), "up")
            run("ip", "-n", self.space, "addr", "add", f"{address}/24", "dev", nic)
        run("ip", "-n", self.space, "link", "set", "lo", "up")

    def power_on(self) -> None:
        lab = self.work / "lab"
        lab.mkdir(parents=True, exist_ok=True)
        (lab / "daemon.json").write_text(json.dumps(self._daemon()))
        for name in ("authorized_keys", "hosts", "host_key"):
            shutil.copy2(self.lab.folder / name, lab / name)
        for name in ("init.sh", "runc_shim.py"):
            shutil.copy2(HERE / name, lab / name)
        (lab / "runc_shim.py").chmod(0o755)
        with (lab / "node.log").open("ab") as log:
            self.process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "nsenter", f"--net=/run/netns/{self.space}",
                 "unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child",
                 "sh", str(HERE / "node.sh"), str(ROOTFS), str(self.work), self.name],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
                env=ENVIRONMENT,
            )  # fmt: skip

    def _daemon(self) -> dict[str, object]:
        return {
            "bridge": "none", "iptables": False, "ip6tables": False, "storage-driver": "overlay2",
            "default-runtime": "lab", "runtimes": {"lab": {"path": "/lab/runc_shim.py"}},
            "cgroup-parent": f"/{self.space}", "exec-opts": ["native.cgroupdriver=cgroupfs"],
        }  # fmt: skip

    def wait_up(self) -> None:
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        wait_for(f"{self.name}: no init", lambda: bool(children.read_text().split()))
        self.init = int(children.read_text().split()[0])
        wait_for(
            f"{self.name}: docker does not answer, see {self.work / 'lab' / 'dockerd.log'}",
            lambda: self.shell.run(["docker", "info"]).ok,
        )

    def bring_in(self, *paths: Path) -> None:
        """Show folders and files of this machine at the same place inside the node."""
        for path in paths:
            inside = self.work / "root" / str(path).lstrip("/")
            enter = ("nsenter", "--target", str(self.init), "--mount", "--")
            run(*enter, "mkdir", "-p", str(inside if path.is_dir() else inside.parent))
            if path.is_file():
                run(*enter, "touch", str(inside))
            run(*enter, "mount", "--bind", str(path), str(inside))

    def keep_images(self, folder: Path) -> None:
        """Before power on: docker's data lies in `folder` and outlives the lab; see `shut_down`."""
        folder.mkdir(parents=True, exist_ok=True)
        self.work.mkdir(parents=True)
        (self.work / "docker").symlink_to(folder)

    def shut_down(self) -> None:
        """Let docker finish what it writes, then the power may go."""
        script = "kill $(pidof dockerd) && while pidof dockerd; do sleep 0.1; done"
        self.shell.run(["sh", "-c", script], timeout_s=60)
        self.power_off()

    def power_off(self) -> None:
        """A power cut: every process of the node is gone at once."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.kill(self.init or self.process.pid, signal.SIGKILL)
            self.process.kill()
            self.process.wait()
            self.process = None

    def unplug(self, *, plugged: bool = False) -> None:
        state = "up" if plugged else "down"
        run("ip", "-n", self.lab.switch, "link", "set", f"fabric{self.number}", state)

    def containers(self) -> list[str]:
        done = self.shell.run(["docker", "ps", "-aq", "--filter", "label=io.glm-exl3.project"])
        return done.out.split()

    def load(self, image: Path | None = None, name: str = IMAGE, **changes: str) -> None:
        """Import a tar, or the last one again, with the entry point of the real images."""
        if image:
            shutil.copy2(image, self.work / "lab" / "image.tar")
        settings = {
            "ENTRYPOINT": '["python3", "/opt/glm-exl3/entrypoint.py"]',
            "LABEL": "io.glm-exl3.plugin=lab", "ENV": "PYTHONUNBUFFERED=1",
        } | changes  # fmt: skip
        options = [part for key, value in settings.items() for part in ("-c", f"{key} {value}")]
        done = self.shell.run(["docker", "import", *options, "/lab/image.tar", name], timeout_s=120)
        assert done.ok, done.err


@dataclass(frozen=True)
class LabShell:
    """Commands inside a node without ssh, as on the machine that the launcher runs on."""

    name: str
    node: Node

    def argv(self, command: Sequence[str]) -> list[str]:
        clean = [f"{name}={value}" for name, value in ENVIRONMENT.items()]
        spaces = ["--mount", "--uts", "--ipc", "--net", "--pid", "--root", "--wdns=/root"]
        enter = ["nsenter", "--target", str(self.node.init), *spaces]
        return ["env", "-i", *clean, *enter, "--", *command]

    def run(self, command: Sequence[str], *, stdin: str = "", timeout_s: float = 30.0) -> Done:
        return execute(self.argv(command), stdin, timeout_s)


@dataclass
class Lab:
    """A switch and its nodes; use `opened`."""

    folder: Path
    name: str
    nodes: list[Node] = field(default_factory=list)

    @property
    def switch(self) -> str:
        return f"{self.name}-switch"

    def open(self, count: int, images: Path | None) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        run("ip", "netns", "add", self.switch)
        for bridge in ("mgmt", "fabric"):
            run("ip", "-n", self.switch, "link", "add", bridge, "type", "bridge")
            run("ip", "-n", self.switch, "link", "set", bridge, "mtu", str(FABRIC_MTU), "up")
        self.nodes = [Node(self, number + 1) for number in range(count)]
        self._keys()
        if images:
            self.nodes[0].keep_images(images)
        for node in self.nodes:
            node.wire()
            node.power_on()
        for node in self.nodes:
            node.wait_up()

    def _keys(self) -> None:
        for name in ("key", "host_key"):
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name))
        shutil.copy2(self.folder / "key.pub", self.folder / "authorized_keys")
        host_key = " ".join((self.folder / "host_key.pub").read_text().split()[:2])
        known, config = [], []
        for node in self.nodes:
            known.append(f"{node.name},{node.address} {host_key}")
            config.append(f"Host {node.name}\n  HostName {node.address}\n  User root\n")
        lines = ["127.0.0.1 localhost", *(f"{n.address} {n.name}" for n in self.nodes)]
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")
        (self.folder / "known_hosts").write_text("\n".join(known) + "\n")
        (self.folder / "ssh_config").write_text(
            "".join(config) + f"Host *\n  IdentityFile {self.folder}/key\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {self.folder}/known_hosts\n  StrictHostKeyChecking yes\n"
        )

    def close(self) -> None:
        for node in self.nodes:
            node.power_off()
        for node in self.nodes:
            run("ip", "netns", "del", node.space, check=False)
        run("ip", "netns", "del", self.switch, check=False)
        for folder in Path("/sys/fs/cgroup").glob(f"*/{self.name}-*"):
            for inner in sorted(folder.rglob("*/"), reverse=True):
                with suppress(OSError):
                    inner.rmdir()
            with suppress(OSError):
                folder.rmdir()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def opened(folder: Path, count: int, images: Path | None = None) -> Iterator[Lab]:
    """A lab in `folder`, whose name it takes; with `images` the head keeps its images there."""
    lab = Lab(folder, folder.name)
    try:
        lab.open(count, images)
        yield lab
    finally:
        if images and lab.nodes and lab.nodes[0].init:
            lab.nodes[0].shut_down()
        lab.close()


@contextmanager
def at(node: Node) -> Iterator[None]:
    """Inside, this thread and what it starts are on the node's network, as the launcher is."""
    libc = ctypes.CDLL(None, use_errno=True)
    net = Path("/proc/self/ns/net")
    with net.open() as home, Path(f"/run/netns/{node.space}").open() as there:
        if libc.setns(there.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        try:
            yield
        finally:
            libc.setns(home.fileno(), _CLONE_NEWNET)
