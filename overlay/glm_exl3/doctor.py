"""Self-check inside the serving environment: `python -m glm_exl3.doctor [--json] [--model FOLDER]`.

Runs what a rank does before it reads weights, in order and without touching a device, and says for
each step what was found. A later step still runs when an earlier one failed, so one call shows all
problems. Exit status 0 when nothing failed, 3 otherwise.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version as distribution_version
from pathlib import Path

from glm_exl3 import envs, plugin
from glm_exl3.format.errors import GlmExl3Error

SUPPORTED_VLLM = "0.33.0"


@dataclass(frozen=True)
class Finding:
    """One line of the report; `detail` is the finding or the error."""

    name: str
    ok: bool
    detail: str


def _settings() -> str:
    values = envs.check_all()
    changed = {k.name: values[k.name] for k in envs.KNOBS if values[k.name] != k.default}
    return ", ".join(f"{name}={value}" for name, value in changed.items()) or "all defaults"


def _versions() -> str:
    found = plugin.vllm_version()
    if found != SUPPORTED_VLLM:
        raise GlmExl3Error(
            code="version",
            seen=f"vLLM {found} is installed",
            why=f"the plugin is written against vLLM {SUPPORTED_VLLM}",
            fix=f"install vllm=={SUPPORTED_VLLM}",
        )
    torch = distribution_version("torch")
    return f"vLLM {found}, torch {torch}, Python {platform.python_version()}"


def _patches() -> str:
    from glm_exl3.patches import PATCHES

    version = plugin.vllm_version()
    drifted = {patch.id: found for patch in PATCHES if (found := patch.drift(version))}
    if drifted:
        raise GlmExl3Error(
            code="patch",
            seen=f"unknown source: {drifted}",
            why="these patches refuse to be applied",
            fix=f"install vllm=={SUPPORTED_VLLM} unchanged",
        )
    return f"{', '.join(patch.id for patch in PATCHES)}: known source"


def _registration() -> str:
    from glm_exl3.quant.startup import raise_failure

    plugin.register()
    raise_failure()
    return str(plugin.make_digest())


def _backend() -> str:
    from vllm.platforms import current_platform

    from glm_exl3.ops import table

    kind = str(current_platform.device_type)
    capability = current_platform.get_device_capability() if kind == "cuda" else None
    device = table.Device(kind, None if capability is None else (capability[0], capability[1]))
    return f"{table.choose(device).name} on {kind} {capability or ''}".rstrip()


def _checkpoint(folder: Path) -> str:
    from glm_exl3.format.metadata import check_checkpoint

    report = check_checkpoint(folder)
    return (
        f"{report.architecture}, {len(report.modules)} packed matrices, "
        f"{report.bits_per_weight:.2f} bits on average, {report.total_bytes / 2**30:.2f} GiB"
    )


def examine(model: Path | None = None) -> list[Finding]:
    """Run every check; none of them stops the others."""
    checks: list[tuple[str, Callable[[], str]]] = [
        ("settings", _settings),
        ("versions", _versions),
        ("patches", _patches),
        ("registration", _registration),
        ("back end", _backend),
    ]
    if model is not None:
        checks.append(("checkpoint", lambda: _checkpoint(model)))
    findings = []
    for name, check in checks:
        try:
            findings.append(Finding(name, True, check()))
        except Exception as error:
            findings.append(Finding(name, False, f"{type(error).__name__}: {error}"))
    return findings


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m glm_exl3.doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--model", type=Path, help="checkpoint folder to judge from its headers")
    options = parser.parse_args(arguments)
    findings = examine(options.model)
    if options.json:
        text = json.dumps([asdict(finding) for finding in findings], indent=1)
    else:
        text = "\n".join(f"{'ok  ' if f.ok else 'FAIL'} {f.name}: {f.detail}" for f in findings)
    sys.stdout.write(text + "\n")
    return 0 if all(finding.ok for finding in findings) else 3


if __name__ == "__main__":
    sys.exit(main())
