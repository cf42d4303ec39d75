"""Target and drafter of a launch: where each comes from, lies, and is seen in a container.

The head's folders decide: a model lies on a worker at the same path, with the worker's home in
place of the head's. Inside a container target and drafter have fixed places, so that all ranks get
equal arguments.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from glm_launch.errors import Finding
from glm_launch.nodes import manifest as manifests
from glm_launch.nodes import weights
from glm_launch.nodes.manifest import Manifest
from glm_launch.nodes.plan import Mounted
from glm_launch.nodes.ssh import Shell
from glm_launch.nodes.weights import Model, Policy, Source, Store
from glm_launch.settings import Settings

INSIDE = {"MODEL": "/models/target", "DFLASH_MODEL": "/models/drafter"}
_REPOSITORY = re.compile(r"^[\w.-]+/[\w.-]+$")


@dataclass(frozen=True)
class Wanted:
    """A model by the setting that names it."""

    key: str
    source: Source

    def locate(self, store: Store) -> tuple[Path, Path, Manifest | None]:
        """Folder, root and stored manifest on this machine, without asking anybody."""
        if self.source.is_folder:
            folder = Path(self.source.repo).expanduser().resolve()
            return folder, folder, Manifest.load(weights.folder_manifest(folder, store))
        known = weights.stored(self.source, store)
        root = store.repo_folder(known.repo if known else self.source.repo)
        return root / "snapshots" / (known.revision if known else self.source.revision), root, known

    def mounted(self, store: Store) -> Mounted:
        """As a container sees it; the digest is empty until the manifest is known."""
        folder, root, known = self.locate(store)
        inside = folder.relative_to(root)
        path = Path(INSIDE[self.key]) / inside
        return Mounted(str(path), known.digest if known else "")


def wanted(settings: Settings, environ_endpoint: str = "") -> list[Wanted]:
    """Target, then drafter where there is one."""
    token = settings.HF_TOKEN.get_secret_value() if settings.HF_TOKEN else None
    found = [
        Wanted("MODEL", Source(settings.MODEL, settings.MODEL_REVISION or "main",
                               settings.MODEL_FALLBACK, environ_endpoint, token)),
    ]  # fmt: skip
    if settings.SPEC_METHOD == "dflash":
        source = Source(settings.DFLASH_MODEL, settings.DFLASH_REVISION or "main", "",
                        environ_endpoint, token)  # fmt: skip
        found.append(Wanted("DFLASH_MODEL", source))
    return found


def store_of(settings: Settings) -> Store:
    """The hub's cache and our manifests on this machine."""
    home = Path(settings.HF_HOME or "~/.cache/huggingface").expanduser()
    return Store(home / "hub", settings.GLM_STATE_DIR / "manifests")


def policy_of(settings: Settings, *, full: bool = False) -> Policy:
    return Policy(
        skip_download=settings.SKIP_DOWNLOAD,
        skip_sync=settings.SKIP_SYNC or settings.SHARED_WEIGHTS,
        refresh=settings.REFRESH_WEIGHTS,
        full=full,
        rehash_days=settings.WEIGHTS_REHASH_DAYS,
    )


def check_names(models: list[Wanted]) -> list[Finding]:
    """What is neither a folder here nor the name of a repository."""
    found = []
    for one in models:
        name = one.source.repo
        if one.source.is_folder and re.search(r'[,"]', str(Path(name).expanduser().resolve())):
            found.append(_bad(one.key, f"{name} has a comma or a quote in its path"))
        elif not one.source.is_folder and not _REPOSITORY.match(name):
            found.append(_bad(one.key, f"{name} is neither a folder here nor a hub repository"))
    return found


def _bad(key: str, seen: str) -> Finding:
    return Finding(
        "no-checkpoint",
        f"{key}: {seen}",
        "there is nothing to serve",
        f"set {key} to a folder with config.json and safetensors files, or to owner/name",
    )


def root_on(root: Path, worker_home: str, *, shared: bool) -> str:
    """Where a root of the head lies on a worker; a home of "~" is left to the worker."""
    if shared:
        return str(root)
    try:
        return f"{worker_home.rstrip('/')}/{root.relative_to(Path.home())}"
    except ValueError:
        return str(root)


def pending(model: Manifest, folder: str, shell: Shell) -> int:
    """Bytes of the files that are not there in full, judged by size alone."""
    done = manifests.verify(model, folder, "", shell=shell, sizes_only=True)
    return sum(entry.size for entry in model.of(problem.name for problem in done.problems))


def weight_bytes(model: Manifest | None) -> int:
    """What the engine reads of it."""
    entries = model.files if model else ()
    return sum(entry.size for entry in entries if entry.name.endswith(".safetensors"))


def mounts(models: list[tuple[Wanted, Model]]) -> tuple[tuple[str, str], ...]:
    return tuple((str(model.root), INSIDE[one.key]) for one, model in models)
