"""Stands in for ssh, docker, rsync, ip and ping: nodes are folders, containers processes.

The name it is called by says which program it is. FAKE_NODES is the folder of all nodes; FAKE_NODE
names the one a command runs on (ssh sets it), `head` when unset. Every call is noted in `calls`
with its node. A node with a file `down` does not answer to ssh; the file `trouble` makes one docker
command fail: its first line is the command, the rest what it says.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

NODES = Path(os.environ["FAKE_NODES"])
NODE = os.environ.get("FAKE_NODE", "head")
HERE = NODES / NODE
ENGINE = os.environ["FAKE_ENGINE"]
VALUED = {
    "--name", "--restart", "--pull", "--network", "--ipc", "--shm-size", "--stop-timeout",
    "--security-opt", "--ulimit", "--label", "--env", "--mount", "--gpus", "--cap-add", "--device",
    "--entrypoint",
}  # fmt: skip


def note(argv: list[str]) -> None:
    with (NODES / "calls").open("a") as calls:
        calls.write(json.dumps([NODE, *argv]) + "\n")


def fail(text: str, code: int = 1) -> None:
    sys.stderr.write(text + "\n")
    sys.exit(code)


def ssh(argv: list[str]) -> None:
    rest = iter(argv)
    target = ""
    for part in rest:
        if part == "-O":
            return
        if part in ("-o", "-F"):
            next(rest)
        elif part == "--":
            break
        else:
            target = part
    node = target.rpartition("@")[2]
    if (NODES / node / "down").exists():
        fail(f"ssh: connect to host {node} port 22: Connection timed out", 255)
    command = next(rest)
    env = os.environ | {"FAKE_NODE": node, "HOME": str(NODES / node / "home")}
    os.execvpe("sh", ["sh", "-c", command], env)


def images() -> dict[str, dict]:
    return {path.stem: json.loads(path.read_text()) for path in (HERE / "images").glob("*.json")}


def put_image(name: str, image: dict) -> None:
    (HERE / "images").mkdir(parents=True, exist_ok=True)
    path = HERE / "images" / f"{name.replace('/', '_')}.json"
    path.write_text(json.dumps(image | {"name": name}))


def image(name: str) -> dict | None:
    return next((one for one in images().values() if one["name"] == name), None)


def inspected(one: dict) -> dict:
    return {
        "Os": "linux", "Architecture": "amd64", "RootFS": {"Layers": one["layers"]}, "Size": 1000,
        "Config": {"Labels": {"io.glm-exl3.plugin": one["plugin"]}}, "RepoDigests": [],
    }  # fmt: skip


def container(name: str) -> dict | None:
    path = HERE / "containers" / f"{name}.json"
    if not path.exists():
        return None
    one = json.loads(path.read_text())
    running = alive(one["pid"]) and "code" not in one
    state = {
        "Status": "running" if running else "exited", "Pid": one["pid"] if running else 0,
        "ExitCode": 0 if running else one.get("code", 70), "OOMKilled": False,
        "StartedAt": one["started"], "FinishedAt": "0001-01-01T00:00:00Z",
    }  # fmt: skip
    return {
        "Name": f"/{name}", "State": state, "Created": one["started"], "HostConfig": {},
        "Config": {"Labels": one["labels"], "Image": one["image"], "Env": one["env"]},
    }  # fmt: skip


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def docker(argv: list[str]) -> None:
    if argv[0] == "--config":
        (HERE / "config-was").write_text(argv[1])
        argv = argv[2:]
    trouble = HERE / "trouble"
    if trouble.exists() and trouble.read_text().splitlines()[0] == argv[0]:
        fail("\n".join(trouble.read_text().splitlines()[1:]))
    verb = {"image": docker_image}.get(argv[0]) or globals()[f"docker_{argv[0]}"]
    verb(argv[1:])


def docker_info(_: list[str]) -> None:
    facts = {"ServerVersion": "28.1", "DockerRootDir": str(HERE), "Architecture": "x86_64"}
    print(json.dumps(facts))


def docker_version(_: list[str]) -> None:
    print("28.1.0")


def docker_image(argv: list[str]) -> None:
    if argv[0] == "rm":
        for name in argv[1:]:
            (HERE / "images" / f"{name.replace('/', '_')}.json").unlink()
        return
    found = image(argv[-1])
    print(json.dumps([inspected(found)] if found else []))
    if not found:
        fail(f"Error response from daemon: No such image: {argv[-1]}")


def docker_login(argv: list[str]) -> None:
    (HERE / "login").write_text(json.dumps([argv, sys.stdin.read()]))


def docker_pull(argv: list[str]) -> None:
    hub = json.loads((NODES / "registry.json").read_text())
    if argv[-1] not in hub:
        fail(f"Error response from daemon: manifest for {argv[-1]} not found: manifest unknown")
    put_image(argv[-1], hub[argv[-1]])


def docker_tag(argv: list[str]) -> None:
    found = image(argv[0])
    if found is None:
        fail("no such image")
    put_image(argv[1], found)


def docker_buildx(argv: list[str]) -> None:
    (tags,) = [part for part in argv if ".tags=" in part]
    put_image(tags.partition("=")[2], {"layers": ["sha256:built"], "plugin": "p2"})


def docker_save(argv: list[str]) -> None:
    print(json.dumps(image(argv[-1])))


def docker_load(_: list[str]) -> None:
    loaded = json.loads(sys.stdin.read())
    put_image(loaded["name"], loaded)


def docker_ps(_: list[str]) -> None:
    print("\n".join(path.stem for path in (HERE / "containers").glob("*.json")))


def docker_inspect(argv: list[str]) -> None:
    found = [one for name in argv if (one := container(name))]
    print(json.dumps(found))
    if not found:
        fail(f"Error: No such object: {argv[-1]}")


def docker_logs(argv: list[str]) -> None:
    log = HERE / "containers" / f"{argv[-1]}.log"
    sys.stdout.write(log.read_text() if log.exists() else "")


def docker_stop(argv: list[str]) -> None:
    end(argv[-1])


def docker_kill(argv: list[str]) -> None:
    end(argv[-1])


def end(name: str) -> None:
    one = json.loads((HERE / "containers" / f"{name}.json").read_text())
    while alive(one["pid"]):
        os.killpg(one["pid"], signal.SIGKILL)
        time.sleep(0.02)


def docker_rm(argv: list[str]) -> None:
    end(argv[-1])
    (HERE / "containers" / f"{argv[-1]}.json").unlink()


def docker_run(argv: list[str]) -> None:
    options: dict[str, list[str]] = {}
    rest = iter(argv)
    words: list[str] = []
    for part in rest:
        if words or not part.startswith("--"):
            words.append(part)
        elif part in VALUED:
            options.setdefault(part, []).append(next(rest))
    name_of_image, command = words[0], words[1:]
    found = image(name_of_image)
    if found is None:
        fail(f"Unable to find image '{name_of_image}' locally")
    if "--entrypoint" in options:
        print(json.dumps([{"name": "x", "ok": not found.get("broken"), "detail": "planted"}]))
        sys.exit(3 if found.get("broken") else 0)
    name = options["--name"][0]
    if container(name):
        fail(f'The container name "/{name}" is already in use by container "abc".')
    folder = HERE / "containers"
    folder.mkdir(exist_ok=True)
    trouble = found.get("trouble", ":")
    with (folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, ENGINE, "--trouble", trouble, *command[1:]],
            stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    labels = dict(one.split("=", 1) for one in options["--label"])
    started = time.strftime("%Y-%m-%dT%H:%M:%S.0Z", time.gmtime())
    entry = {"pid": process.pid, "labels": labels, "image": name_of_image, "started": started,
             "env": options.get("--env", [])}  # fmt: skip
    (folder / f"{name}.json").write_text(json.dumps(entry))
    print("id")


def rsync(argv: list[str]) -> None:
    source, target = argv[-2], argv[-1]
    node, _, place = target.rpartition(":")
    names = [name for name in sys.stdin.read().split("\0") if name]
    sent = NODES / "sent"
    for name in names:
        with sent.open("a") as log:
            log.write(f"{node} {name}\n")
        there = Path(place, name)
        there.parent.mkdir(parents=True, exist_ok=True)
        there.unlink(missing_ok=True)
        shutil.copy2(Path(source, name), there, follow_symlinks=False)


def ip(_: list[str]) -> None:
    address = (HERE / "address").read_text()
    entry = {"local": address, "prefixlen": 24, "scope": "global"}
    local = {"local": "127.0.0.1", "prefixlen": 8, "scope": "host"}
    print(json.dumps([{"ifname": "lo", "addr_info": [local, entry]}]))


def ping(_: list[str]) -> None:
    sys.exit(1 if (HERE / "small-packets").exists() else 0)


if __name__ == "__main__":
    program = Path(sys.argv[0]).name
    note([program, *sys.argv[1:]])
    globals()[program](sys.argv[1:])
