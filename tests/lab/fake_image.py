"""An image of 50 MB that looks like the real ones to a launcher: entry point, vllm, plugin, doctor.

What the engine would be is `fakerank.py`; the plugin knows its digest only, and the doctor passes
unless the image was imported with GLM_FAKE_DOCTOR set to what it should complain about.
"""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

from lab import HERE, ROOT, ROOTFS, run

PACKAGES = "usr/lib/python3/dist-packages/glm_exl3"
FILES = {
    "usr/bin/vllm": """#!/usr/bin/python3
import runpy
runpy.run_path("/opt/glm-exl3/fakerank.py", run_name="__main__")
""",
    f"{PACKAGES}/__init__.py": "",
    f"{PACKAGES}/plugin.py": """import os
def make_digest():
    salt = os.environ.get("GLM_EXL3_DIGEST_SALT")
    return "sources=lab" + (f" salt={salt}" if salt else "")
""",
    f"{PACKAGES}/doctor.py": """import json, os, sys
said = os.environ.get("GLM_FAKE_DOCTOR", "")
print(json.dumps([{"name": "back end", "ok": not said, "detail": said or "fake"}]))
sys.exit(3 if said else 0)
""",
    "opt/broken/glm_exl3/__init__.py": "",
    "opt/broken/glm_exl3/plugin.py": "raise RuntimeError('planted import failure')\n",
}


def make_image(target: Path) -> Path:
    """A tar with Python, the real entry point and the fake rank, cut out of the node's root."""
    if target.exists():
        return target
    ldd = run("chroot", str(ROOTFS), "ldd", "/usr/bin/python3", *_extensions())
    found = {word for line in ldd.splitlines() for word in line.split() if word.startswith("/")}
    found.add("/usr/lib/x86_64-linux-gnu/libgcc_s.so.1")
    libraries = sorted(path for path in found if ".so" in path and not path.endswith(":"))
    draft = target.with_suffix(f".{os.getpid()}")
    with tarfile.open(draft, "w") as tar:
        for name in ("bin", "lib", "lib64"):
            if (ROOTFS / name).is_symlink():
                tar.add(ROOTFS / name, name)
        for name in ("usr/bin/python3", "usr/bin/python3.13", "usr/lib/python3.13",
                     "usr/bin/dash", "usr/bin/sh", "usr/bin/sleep"):  # fmt: skip
            if (ROOTFS / name).exists() or (ROOTFS / name).is_symlink():
                tar.add(ROOTFS / name, name)
        for library in libraries:
            real = (ROOTFS / library.lstrip("/")).resolve()
            tar.add(real, f"usr/{library.lstrip('/').removeprefix('usr/')}")
        for source in (*(ROOT / "docker").glob("*.py"), HERE / "fakerank.py"):
            tar.add(source, f"opt/glm-exl3/{source.name}")
        for name, text in FILES.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(text), 0o755
            tar.addfile(info, io.BytesIO(text.encode()))
    draft.replace(target)
    return target


def _extensions() -> list[str]:
    folder = ROOTFS / "usr/lib/python3.13/lib-dynload"
    return [f"/usr/lib/python3.13/lib-dynload/{path.name}" for path in folder.glob("*.so")]
