"""An image with Python and the programs of the real one, whose packages are this machine's.

What `pip` would put into it (4 GB) is bound read-only into every container instead: the environment
of the checkout, Ray in a folder of its own, and the plugin's sources. So the real engine runs in
lab containers a minute after the lab is up, without a build and without sending an image. It proves
nothing about the image that is built.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import torch
from lab import BASE, CACHE, ROOT, Lab

SITE = Path(torch.__file__).parents[1]
NAME = "glm-exl3:thin"
LOCK = ROOT / "config" / "locks" / "ray.txt"
MOUNTS = {str(SITE): "/opt/site", str(CACHE / "ray"): "/opt/ray",
          str(ROOT / "overlay"): "/opt/overlay"}  # fmt: skip
PROGRAM = "#!/usr/bin/python3\nimport sys\nfrom {module} import main\nsys.exit(main())\n"
PROGRAMS = {"vllm": "vllm.entrypoints.cli.main", "ray": "ray.scripts.scripts"}


def load(lab: Lab) -> None:
    """The image on every node of `lab`, whose containers get the packages from now on."""
    ray = install_ray()
    tar = make(lab.folder / "thin.tar")
    for node in lab.nodes:
        node.bring_in(SITE, ray, ROOT / "overlay")
        (node.work / "lab" / "mounts.json").write_text(json.dumps(MOUNTS))
        node.load(tar, NAME, ENV=f"PYTHONUNBUFFERED=1 PYTHONPATH={':'.join(MOUNTS.values())}")
    tar.unlink()


def install_ray() -> Path:
    """Ray as it is locked, in the lab's cache."""
    folder, mark = CACHE / "ray", CACHE / "ray.lock.txt"
    if not (folder.is_dir() and mark.is_file() and mark.read_bytes() == LOCK.read_bytes()):
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([ROOT / "docker" / "wheels.sh", "--ray", "3.11"], check=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
        wheels = ["--find-links", str(ROOT / ".cache" / "wheels-ray")]
        subprocess.run([*pip, *wheels, "--target", str(folder), "-r", str(LOCK)], check=True)
        mark.write_bytes(LOCK.read_bytes())
    return folder


def make(target: Path) -> Path:
    """The base of the CPU image as a tar, with the entry point and both commands."""
    shutil.copyfile(BASE, target)
    with tarfile.open(target, "a") as tar:
        for name in ("site", "ray", "overlay"):
            info = tarfile.TarInfo(f"./opt/{name}")
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(info)
        for source in (ROOT / "docker").glob("*.py"):
            tar.add(source, f"./opt/glm-exl3/{source.name}")
        for name, module in PROGRAMS.items():
            text = PROGRAM.format(module=module).encode()
            info = tarfile.TarInfo(f"./usr/local/bin/{name}")
            info.size, info.mode = len(text), 0o755
            tar.addfile(info, io.BytesIO(text))
    return target
