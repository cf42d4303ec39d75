"""Check a checkpoint folder from its headers, before a process starts.

The format's own code (standard library only) judges; this turns what it raises into findings. A
folder that passes here can still fail in the engine, which knows the model.
"""

from __future__ import annotations

from pathlib import Path

from glm_launch.errors import Finding


def check(key: str, folder: Path) -> list[Finding]:
    """Findings about the checkpoint that setting `key` names; empty when it looks complete."""
    if not folder.is_dir():
        return [
            Finding(
                "no-checkpoint",
                f"{key}={folder} is not a folder",
                "RUNTIME=local reads weights from a folder and downloads nothing",
                f"set {key} to a folder with config.json and safetensors files",
            )
        ]
    from glm_exl3.format.errors import FormatError
    from glm_exl3.format.metadata import check_checkpoint

    try:
        check_checkpoint(folder)
    except FormatError as error:
        where = ": ".join(part for part in (error.file, error.tensor) if part)
        seen = (
            f"{key}={folder}: {where}: {error.seen}" if where else f"{key}={folder}: {error.seen}"
        )
        return [Finding(f"checkpoint-{error.code}", seen, error.why, error.fix)]
    except OSError as error:
        return [
            Finding(
                "checkpoint-unreadable",
                f"{key}={folder}: {error}",
                "the weights cannot be read",
                "check the permissions and the disk",
            )
        ]
    return []
