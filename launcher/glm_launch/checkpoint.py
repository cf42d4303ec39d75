"""Check a checkpoint folder before a process starts.

A folder that passes here can still fail in the engine, which knows the model.
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
    if not (folder / "config.json").is_file():
        return [
            Finding(
                "no-config",
                f"{key}={folder} holds no config.json",
                "the engine cannot tell what model this is",
                "finish the download, or point at the folder inside it",
            )
        ]
    return []
