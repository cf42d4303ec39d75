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
    lines = DOCKERFILE.replace("\\\n", " ").splitlines()
    runs = [line for line in lines if line.startswith("RUN ")]
    assert len(runs) == 6 and all(line.startswith("RUN --network=none ") for line in runs)
    installs = [line for line in runs if "pip install" in line]
    assert len(installs) == 4
    assert all("--no-index" in one and "--no-deps" in one for one in installs)


def test_the_wheels_are_those_of_the_locks_that_the_image_installs() -> None:
    fetched = re.search(r"config/locks/\{(.*?)\}\.txt", (ROOT / "docker" / "wheels.sh").read_text())
    installed = re.search(r"for lock in (.*?);", DOCKERFILE)
    assert fetched is not None and installed is not None
    names = installed[1].split()
    assert fetched[1].split(",") == names
    assert f"COPY {' '.join(f'config/locks/{name}.txt' for name in names)} " in DOCKERFILE
    assert all((ROOT / "config" / "locks" / f"{name}.txt").is_file() for name in names)


def test_both_images_have_the_same_programs_and_contract() -> None:
    made = stages()
    for line in ("ENTRYPOINT", "HEALTHCHECK", "VOLUME", "LABEL", "COPY docker/"):
        cuda, cpu = (re.findall(rf"^{line}.*$", made[name], re.M) for name in ("cuda", "cpu"))
        assert cuda == cpu and len(cuda) == 1
    assert "COPY docker/*.py /opt/glm-exl3/" in made["cuda"]
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored.index("docker/pin.py") > ignored.index("!docker")


def test_another_label_repeats_no_step() -> None:
    """A RUN below an ARG is run again for every new value of it."""
    for name in ("cuda", "cpu"):
        _, found, below = stages()[name].partition("\nARG PLUGIN_LABEL")
        assert found and "\nRUN " not in below and "\nCOPY " not in below


def test_a_release_without_a_digest_is_refused(tmp_path) -> None:
    check = re.search(r'^RUN --network=none (test "\$\{RELEASE\}".*?\})$', DOCKERFILE, re.M | re.S)
    assert check is not None

    def run(**env: str) -> int:
        return subprocess.run(["sh", "-c", check[1].replace("\\\n", "")], env=env).returncode

    assert run(RELEASE="1", BASE_DIGEST="") == 1
    assert run(RELEASE="0", BASE_DIGEST="") == 0
    assert run(RELEASE="1", BASE_DIGEST="sha256:0") == 0


FAKE_NVCC = """#!/bin/sh
# Writes what it was asked for and leaves the file that -o names.
echo "$*" >> "$CALLS"
while [ "$1" != -o ]; do shift; done
: > "$2"
"""


def test_the_kernel_stage_builds_every_source_for_every_architecture(tmp_path) -> None:
    command = re.search(r'PYTHONPATH=/src (python3 -c ".*?")$', stages()["kernels"], re.M | re.S)
    assert command is not None
    (tmp_path / "bin").mkdir()
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.write_text(FAKE_NVCC)
    nvcc.chmod(0o755)
    script = command[1].replace("\\\n", "").replace("/out", str(tmp_path / "out"))
    calls = tmp_path / "calls"
    env = {"CUDA_HOME": str(tmp_path), "CALLS": str(calls), "PYTHONPATH": str(ROOT / "overlay"),
           "PATH": f"{BIN}:/usr/bin:/bin", "KERNEL_JOBS": "1"}  # fmt: skip
    done = subprocess.run(["sh", "-c", script], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["libglm_exl3_cuda.so"]
    made = calls.read_text()
    sources = (ROOT / "overlay" / "glm_exl3" / "csrc").glob("*.c[up]*")
    assert all(f"/{path.name} " in made for path in sources if path.suffix in (".cu", ".cpp"))
    for architecture in ("80", "90a", "120", "121"):
        assert f"-gencode=arch=compute_{architecture},code=sm_{architecture}" in made
    target = re.search(r"^COPY --from=kernels /out/ (.*)$", DOCKERFILE, re.M)
    assert target is not None and target[1].endswith("/glm_exl3/ops/")


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


def test_the_label_changes_with_the_sources_and_with_nothing_else(tmp_path, capsys) -> None:
    (tmp_path / "a.py").write_text("1")
    first = pin.plugin_label(tmp_path)
    (tmp_path / "a.pyc").write_text("compiled")
    assert pin.plugin_label(tmp_path) == first
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert pin.plugin_label(tmp_path) != first
    assert pin.main(["--print"]) == 0
    names = [line.partition("=")[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["BASE_IMAGE", "BASE_DIGEST", "PLUGIN_LABEL"]
    hcl = (ROOT / "docker" / "build.hcl").read_text()
    assert all(f'variable "{name}"' in hcl for name in names)
