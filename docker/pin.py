"""Fill in the digest of the base image, or print it for a build.

    python3 docker/pin.py            ask the registry and write docker/pins.json
    python3 docker/pin.py --print    the variables of docker/build.hcl, for `env`

The digest is of the multi-platform index, so one value serves amd64 and arm64. It is only ever
copied from the registry's own answer; a release build refuses an empty one. PLUGIN_LABEL becomes
the image's label, by which people tell two images apart: a hash of the plugin's sources.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

PINS = Path(__file__).with_name("pins.json")
PLUGIN = Path(__file__).parents[1] / "overlay" / "glm_exl3"


def ask(image: str) -> str:
    """The registry's digest of `image`; raises ValueError for an answer without one."""
    done = subprocess.run(
        ["docker", "buildx", "imagetools", "inspect", "--format", "{{json .Manifest}}", image],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    try:
        digest = str(json.loads(done.stdout)["digest"])
    except (ValueError, KeyError, TypeError):
        digest = ""
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        raise ValueError(f"no digest for {image}: {done.stderr.strip() or done.stdout.strip()}")
    return digest


def plugin_label(folder: Path) -> str:
    """Twelve hex digits over names and contents of what the image copies from `folder`."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix not in (".pyc", ".so"):
            total.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return f"sources-{total.hexdigest()[:12]}"


def main(arguments: list[str]) -> int:
    pins = json.loads(PINS.read_text())
    if "--print" in arguments:
        sys.stdout.write(f"BASE_IMAGE={pins['base_image']}\nBASE_DIGEST={pins['base_digest']}\n")
        sys.stdout.write(f"PLUGIN_LABEL={plugin_label(PLUGIN)}\n")
        return 0
    try:
        pins["base_digest"] = ask(pins["base_image"])
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    PINS.write_text(json.dumps(pins, indent=1) + "\n")
    sys.stdout.write(f"{pins['base_image']} is {pins['base_digest']}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
