"""Print the facts of this machine as one JSON object (schema 1). Changes nothing.

    python3 - '{"paths": ["/data"], "images": ["glm-exl3:cuda"]}' < facts.py

What cannot be read is null or an empty list, never an error: the launcher judges, this only looks.
`root` in the request moves /proc and /sys, for tests. Runs on Python 3.8 without packages.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

SCHEMA = 1
TIMEOUT_S = 15
GPU_FIELDS = "index,name,uuid,memory.total,driver_version,compute_cap"
APP_FIELDS = "gpu_uuid,pid,process_name,used_memory"


def read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            argv,
            check=False,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            stdin=-3,
            env={**os.environ, "PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(argv, 127, "", str(error))


def table(*argv: str) -> list[dict[str, Any]]:
    """The JSON lines or the JSON list that a command prints."""
    text = run(*argv).stdout.strip()
    try:
        if text.startswith("["):
            return list(json.loads(text))
        return [json.loads(line) for line in text.splitlines()]
    except ValueError:
        return []


def memory(root: Path) -> dict[str, int]:
    found = {}
    for line in read(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name in ("MemTotal", "MemAvailable", "SwapTotal", "SwapFree"):
            found[name] = int(rest.split()[0]) * 1024
    return {
        "total": found.get("MemTotal", 0),
        "available": found.get("MemAvailable", 0),
        "swap_used": found.get("SwapTotal", 0) - found.get("SwapFree", 0),
    }


def gpus() -> list[dict[str, Any]]:
    """NVIDIA devices; `memory_bytes` is null where the driver reports none (unified memory)."""
    query = run("nvidia-smi", f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader,nounits")
    apps = run("nvidia-smi", f"--query-compute-apps={APP_FIELDS}", "--format=csv,noheader,nounits")
    found = []
    for line in query.stdout.splitlines() if query.returncode == 0 else []:
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 6:
            found.append({
                "index": int(cells[0]), "name": cells[1], "uuid": cells[2],
                "memory_bytes": mebibytes(cells[3]), "driver": cells[4], "capability": cells[5],
                "processes": processes(apps.stdout, cells[2]),
            })  # fmt: skip
    return found


def processes(text: str, uuid: str) -> list[dict[str, Any]]:
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 4 and cells[0] == uuid and cells[1].isdigit():
            used = mebibytes(cells[3])
            found.append({"pid": int(cells[1]), "name": cells[2], "memory_bytes": used})
    return found


def mebibytes(text: str) -> int | None:
    return int(text) * 2**20 if text.isdigit() else None


def nics(root: Path) -> list[dict[str, Any]]:
    addresses: dict[str, list[str]] = {}
    for link in table("ip", "-j", "addr", "show"):
        addresses[str(link.get("ifname"))] = [
            f"{entry['local']}/{entry['prefixlen']}"
            for entry in link.get("addr_info", [])
            if "local" in entry and entry.get("scope") in ("global", "host")
        ]
    found = []
    for folder in sorted((root / "sys/class/net").glob("*")):
        speed, mtu = read(folder / "speed"), read(folder / "mtu")
        found.append({
            "name": folder.name, "up": read(folder / "operstate") in ("up", "unknown"),
            "carrier": read(folder / "carrier") == "1",
            "mtu": int(mtu) if mtu.isdigit() else 0,
            "speed_mbps": int(speed) if speed.isdigit() else None,
            "addresses": addresses.get(folder.name, []),
        })  # fmt: skip
    return found


def hcas(root: Path) -> list[dict[str, Any]]:
    found = []
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        types, devices = port / "gid_attrs/types", port / "gid_attrs/ndevs"
        gids = []
        for entry in sorted((port / "gids").glob("*"), key=lambda path: int(path.name)):
            gid = read(entry)
            if gid.strip("0:"):
                gids.append({
                    "index": int(entry.name), "gid": gid, "type": read(types / entry.name),
                    "netdev": read(devices / entry.name),
                })  # fmt: skip
        state = read(port / "state").partition(":")[2].strip()
        found.append({"name": port.parents[1].name, "port": int(port.name), "state": state,
                      "rate": read(port / "rate"), "gids": gids})  # fmt: skip
    return found


def docker(images: list[str]) -> dict[str, Any]:
    if shutil.which("docker") is None:
        return {"present": False, "error": "docker: command not found"}
    info = run("docker", "info", "--format", "{{json .}}")
    try:
        facts = json.loads(info.stdout)
    except ValueError:
        facts = {}
    if not facts.get("ServerVersion"):
        errors = facts.get("ServerErrors") or [info.stderr.strip() or "no answer"]
        return {"present": True, "error": str(errors[0])}
    return {
        "present": True, "error": "", "version": facts["ServerVersion"],
        "root": facts.get("DockerRootDir", ""), "arch": facts.get("Architecture", ""),
        "runtimes": sorted(facts.get("Runtimes") or {}),
        "cdi": [str(entry.get("ID")) for entry in facts.get("DiscoveredDevices") or []],
        "toolkit": shutil.which("nvidia-container-runtime-hook") is not None,
        "images": [found for name in images for found in image(name)],
        "containers": containers(),
    }  # fmt: skip


def image(name: str) -> list[dict[str, Any]]:
    """What makes two images the same: platform, layers and configuration, not the id."""
    return [image_facts(name, entry) for entry in table("docker", "image", "inspect", name)]


def image_facts(name: str, entry: dict[str, Any]) -> dict[str, Any]:
    """One entry of `docker image inspect`."""
    config = entry.get("Config") or {}
    kept = {
        key: config.get(key)
        for key in ("Cmd", "Entrypoint", "Env", "ExposedPorts", "Labels", "User", "WorkingDir")
    }
    text = json.dumps(kept, sort_keys=True).encode()
    return {
        "name": name, "os": entry.get("Os"), "arch": entry.get("Architecture"),
        "layers": (entry.get("RootFS") or {}).get("Layers") or [],
        "labels": config.get("Labels") or {}, "config": hashlib.sha256(text).hexdigest()[:16],
        "digests": entry.get("RepoDigests") or [], "bytes": entry.get("Size"),
    }  # fmt: skip


def containers() -> list[dict[str, Any]]:
    names = run("docker", "ps", "-aq", "--no-trunc").stdout.split()
    found = []
    for entry in table("docker", "inspect", *names) if names else []:
        config, state = entry.get("Config") or {}, entry.get("State") or {}
        requests = (entry.get("HostConfig") or {}).get("DeviceRequests") or []
        found.append({
            "name": entry.get("Name", "").lstrip("/"), "image": config.get("Image"),
            "state": state.get("Status"), "labels": config.get("Labels") or {},
            "created": entry.get("Created"), "gpus": bool(requests),
        })  # fmt: skip
    return found


def nccl() -> str:
    """The libnccl.so.2 that the dynamic loader of this machine would take."""
    for line in run("ldconfig", "-p").stdout.splitlines():
        name, arrow, path = line.partition(" => ")
        if arrow and name.split()[:1] == ["libnccl.so.2"]:
            return path.strip()
    return ""


def path_facts(text: str) -> dict[str, Any]:
    """The file system of a path that may not exist yet: that of its nearest parent."""
    path = Path(text).expanduser()
    near = path
    while not near.exists() and near != near.parent:
        near = near.parent
    usage = os.statvfs(near)
    return {
        "path": text, "full": str(path), "exists": path.exists(),
        "free_bytes": usage.f_bavail * usage.f_frsize,
        "free_inodes": usage.f_favail if usage.f_files else None, "device": near.stat().st_dev,
        "owner": near.stat().st_uid, "writable": os.access(str(near), os.W_OK),
        "read_only": bool(usage.f_flag & os.ST_RDONLY), "foreign": foreign(path),
    }  # fmt: skip


def foreign(path: Path, limit: int = 2000) -> list[str]:
    """The first entries below `path` that this user cannot replace."""
    found: list[str] = []
    for count, (folder, _, _) in enumerate(os.walk(str(path))):
        if count >= limit or len(found) >= 3:
            break
        if not os.access(folder, os.W_OK):
            found.append(folder)
    return found


def listening(root: Path) -> list[dict[str, Any]]:
    found = set()
    for name in ("tcp", "tcp6"):
        for line in read(root / "proc/net" / name).splitlines()[1:]:
            cells = line.split()
            if cells[3] == "0A":
                host, _, port = cells[1].rpartition(":")
                found.add((address(host), int(port, 16)))
    return [{"address": host, "port": port} for host, port in sorted(found)]


def address(text: str) -> str:
    """The kernel's hexadecimal address as people write it; `*` for all."""
    words = [text[i : i + 8] for i in range(0, len(text), 8)]
    data = b"".join(bytes.fromhex(word)[::-1] for word in words)
    if not any(data):
        return "*"
    import ipaddress

    found = ipaddress.ip_address(data)
    return str(getattr(found, "ipv4_mapped", None) or found)


def gather(request: dict[str, Any]) -> dict[str, Any]:
    root = Path(request.get("root", "/"))
    release = dict(re.findall(r'^(\w+)="?([^"\n]*)', read(root / "etc/os-release"), re.MULTILINE))
    seen = docker(request.get("images", []))
    paths = [*request.get("paths", []), *filter(None, [seen.get("root")])]
    return {
        "schema": SCHEMA, "host": platform.node(), "arch": platform.machine(),
        "system": release.get("PRETTY_NAME", ""), "kernel": platform.release(),
        "python": platform.python_version(), "user": os.environ.get("USER", ""), "uid": os.getuid(),
        "home": str(Path.home()), "cores": os.cpu_count(), "memory": memory(root),
        "rsync": shutil.which("rsync") is not None, "gpus": gpus(), "nics": nics(root),
        "hcas": hcas(root), "docker": seen, "paths": [path_facts(path) for path in paths],
        "nccl": nccl(),
        "listening": listening(root),
    }  # fmt: skip


if __name__ == "__main__":
    json.dump(gather(json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}), sys.stdout)
