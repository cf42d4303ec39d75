"""The Dockerfile and what builds it, as far as that can be proven without building it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pin

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def stages() -> dict[str, str]:
    parts = re.split(r"^FROM .* AS (\w+)$", DOCKERFILE, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_hadolint_has_nothing_to_say() -> None:
    done = subprocess.run(
        [BIN / "hadolint", ROOT / "Dockerfile"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout


def test_every_install_stays_off_the_network() -> None:
    installs = re.findall(r"pip install (.*?)(?:\n[A-Z]|\Z)", DOCKERFILE.replace("\\\n", " "), re.S)
    assert len(installs) == 3
    assert all("--no-index" in one and "--no-deps" in one for one in installs)
    assert not re.search(r"\b(curl|wget|git clone|apt-get)\b", DOCKERFILE)


def test_both_images_have_the_same_programs_and_contract() -> None:
    made = stages()
    for line in ("ENTRYPOINT", "HEALTHCHECK", "VOLUME", "LABEL", "COPY docker/"):
        cuda, cpu = (re.findall(rf"^{line}.*$", made[name], re.M) for name in ("cuda", "cpu"))
        assert cuda == cpu and len(cuda) == 1
    for source in re.findall(r"docker/\w+\.py", made["cuda"]):
        assert (ROOT / source).is_file()


def test_a_release_without_a_digest_is_refused(tmp_path) -> None:
    check = re.search(r'^RUN (test "\$\{RELEASE\}".*?\})$', DOCKERFILE, re.M | re.S)
    assert check is not None

    def run(**env: str) -> int:
        return subprocess.run(["sh", "-c", check[1].replace("\\\n", "")], env=env).returncode

    assert run(RELEASE="1", BASE_DIGEST="") == 1
    assert run(RELEASE="0", BASE_DIGEST="") == 0
    assert run(RELEASE="1", BASE_DIGEST="sha256:0") == 0


def test_the_pin_names_the_base_of_the_dockerfile() -> None:
    pins = json.loads((ROOT / "docker" / "pins.json").read_text())
    assert f"ARG BASE_IMAGE={pins['base_image']}\n" in DOCKERFILE
    assert f'"{pins["base_image"]}"' in (ROOT / "docker" / "build.hcl").read_text()
    assert re.fullmatch(r"(sha256:[0-9a-f]{64})?", pins["base_digest"])


@pytest.mark.parametrize(
    ("answer", "good"),
    [('{"digest": "sha256:' + "a" * 64 + '"}', True), ('{"digest": "latest"}', False), ("", False)],
)
def test_a_digest_is_only_copied_from_the_registry(tmp_path, monkeypatch, answer, good) -> None:
    docker = tmp_path / "docker"
    docker.write_text(f"#!/bin/sh\necho '{answer}'\n")
    docker.chmod(0o755)
    pins = tmp_path / "pins.json"
    pins.write_text(json.dumps({"base_image": "x", "base_digest": ""}))
    monkeypatch.setattr(pin, "PINS", pins)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert pin.main([]) == (0 if good else 1)
    assert json.loads(pins.read_text())["base_digest"] == ("sha256:" + "a" * 64 if good else "")
