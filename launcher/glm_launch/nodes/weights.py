"""Weights of target and drafter: on the head from the hub, on every other node from the head.

What must stay true: weights are used only after `manifest.verify` found no problem on that node;
SKIP_DOWNLOAD and SKIP_SYNC skip the transfer and never the verification; only files with a problem
are transferred; a complete model needs no network. Files keep the hub's own cache layout (links in
`snapshots/`, contents in `blobs/`), so other tools see them and nothing is stored twice.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from glm_launch.errors import Finding, RefusedError
from glm_launch.nodes import manifest as manifests
from glm_launch.nodes.manifest import Manifest, Problem, summary
from glm_launch.nodes.ssh import Shell, SshShell, execute

RSYNC_TIMEOUT_S = 6 * 3600.0
PARTIAL = ".glm-exl3-partial"
HASH_CACHE = "~/.cache/glm-exl3/hashes.json"
_DAMAGED = ("content", "size", "unreadable")


@dataclass(frozen=True)
class Source:
    """Where a model comes from; `repo` may also be a folder of this machine."""

    repo: str
    revision: str = "main"
    fallback: str = ""
    endpoint: str = ""
    token: str | None = None

    @property
    def is_folder(self) -> bool:
        return Path(self.repo).expanduser().is_dir()


@dataclass(frozen=True)
class Model:
    """Verified weights of one node: `folder` is what the engine reads, `root` what is mounted."""

    folder: Path
    root: Path
    manifest: Manifest


@dataclass(frozen=True)
class Policy:
    """What may be transferred, and how thoroughly it is verified."""

    skip_download: bool = False
    skip_sync: bool = False
    refresh: bool = False
    full: bool = False
    rehash_days: float = 30.0


@dataclass(frozen=True)
class Store:
    """Folders of this machine: the hub's cache, our manifests, the cache of hashes."""

    hub: Path
    manifests: Path
    hashes: str = HASH_CACHE

    def manifest_path(self, repo: str, revision: str) -> Path:
        return self.manifests / f"{repo.replace('/', '--')}@{revision.replace('/', '--')}.json"

    def repo_folder(self, repo: str) -> Path:
        return self.hub / f"models--{repo.replace('/', '--')}"


def ensure(
    source: Source, store: Store, policy: Policy, say: Callable[[str], None] = lambda _text: None
) -> Model:
    """The verified model on this machine, downloaded as far as needed.

    Raises `RefusedError` when it is not complete and may not or cannot be made so.
    """
    if source.is_folder:
        return _ensure_folder(source, store, policy)
    known = None if policy.refresh else stored(source, store)
    problems: tuple[Problem, ...] = ()
    if known is not None:
        model = _model(known, store)
        problems = _verify(model, store, policy)
        if not problems:
            return model
    if policy.skip_download:
        seen = summary(problems) if known else "its manifest was never fetched"
        raise RefusedError(_incomplete(source.repo, "this machine", seen, "unset SKIP_DOWNLOAD"))
    known = fetch_manifest(source, store, say)
    model = _model(known, store)
    problems = _verify(model, store, policy)
    if problems:
        size = sum(entry.size for entry in known.of(p.name for p in problems))
        say(f"downloading {len(problems)} file(s), {size / 2**30:.2f} GiB, of {known.repo}")
        _download(source, known, store, problems)
        if problems := _verify(model, store, policy):
            fix = "start again; what is complete is kept"
            raise RefusedError(_incomplete(known.repo, "this machine", summary(problems), fix))
    return model


def _ensure_folder(source: Source, store: Store, policy: Policy) -> Model:
    folder = Path(source.repo).expanduser().resolve()
    path = folder_manifest(folder, store)
    known = None if policy.refresh else Manifest.load(path)
    if known is None:
        known = manifests.of_folder(folder)
        known.save(path)
    model = Model(folder, folder, known)
    if problems := _verify(model, store, policy):
        fix = "restore the files, or REFRESH_WEIGHTS=1 if you changed them on purpose"
        raise RefusedError(_incomplete(source.repo, "this machine", summary(problems), fix))
    return model


def folder_manifest(folder: Path, store: Store) -> Path:
    """Where the manifest of a folder that is not of the hub is kept."""
    return store.manifest_path(str(folder).strip("/"), "local")


def stored(source: Source, store: Store) -> Manifest | None:
    """The manifest that an earlier run fetched, or None."""
    for repo in filter(None, (source.repo, source.fallback)):
        found = Manifest.load(store.manifest_path(repo, source.revision))
        if found is not None:
            return found
    return None


def _model(known: Manifest, store: Store) -> Model:
    root = store.repo_folder(known.repo)
    return Model(root / "snapshots" / known.revision, root, known)


def _verify(model: Model, store: Store, policy: Policy) -> tuple[Problem, ...]:
    done = manifests.verify(
        model.manifest, str(model.folder), store.hashes, full=policy.full,
        rehash_days=policy.rehash_days,
    )  # fmt: skip
    return done.problems


def fetch_manifest(source: Source, store: Store, say: Callable[[str], None]) -> Manifest:
    """Ask the hub, then the fallback repository, what the files must be."""
    from huggingface_hub import HfApi

    api = HfApi(endpoint=source.endpoint or None, token=source.token or False)
    findings = []
    for repo in filter(None, (source.repo, source.fallback)):
        try:
            info = api.model_info(repo, revision=source.revision, files_metadata=True, timeout=30)
        except Exception as error:  # noqa: BLE001 (the hub raises many kinds; each is classified)
            findings.append(hub_finding(repo, source.revision, error))
            continue
        if findings:
            say(f"{source.repo} is not available, using {repo}")
        known = manifests.of_hub(repo, str(info.sha), info.siblings or ())
        known.save(store.manifest_path(repo, source.revision))
        return known
    raise RefusedError(*findings)


def _download(source: Source, known: Manifest, store: Store, problems: Sequence[Problem]) -> None:
    from huggingface_hub import snapshot_download

    folder = _model(known, store).folder
    for problem in problems:
        if problem.kind in _DAMAGED:
            link = folder / problem.name
            link.resolve().unlink(missing_ok=True)
            link.unlink(missing_ok=True)
    try:
        snapshot_download(
            known.repo,
            revision=known.revision,
            cache_dir=store.hub,
            endpoint=source.endpoint or None,
            token=source.token or False,
            allow_patterns=[problem.name for problem in problems],
        )
    except Exception as error:
        raise RefusedError(hub_finding(known.repo, known.revision, error)) from error


def hub_finding(repo: str, revision: str, error: Exception) -> Finding:
    """What the hub's failure means; the token is never part of it."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    name = type(error).__name__
    where = f"{repo}@{revision}"
    if getattr(error, "errno", None) == errno.ENOSPC:
        code, seen, fix = "disk-full", "no space left on the device", "free space; it goes on"
    elif name == "GatedRepoError" or status == 403:
        code, seen = "hub-gated", f"the hub refuses access (HTTP {status or 403})"
        fix = "accept the model's terms on its page and set HF_TOKEN"
    elif name == "RevisionNotFoundError":
        code, seen = "hub-no-revision", "the revision does not exist (HTTP 404)"
        fix = "set MODEL_REVISION to one that does"
    elif status in (401, 404) or name == "RepositoryNotFoundError":
        code, seen = "hub-not-found", f"no such repository, or it is private (HTTP {status})"
        fix = "check MODEL, or set HF_TOKEN"
    elif status is not None:
        code, seen = "hub-error", f"the hub answered HTTP {status}"
        fix = "try later, or set a fallback repository"
    else:
        code, seen = "hub-unreachable", f"the hub cannot be reached ({name})"
        fix = "check the network and HF_ENDPOINT; a model that is complete needs no network"
    return Finding(code, f"{where}: {seen}", "the weights are not complete here", fix)


def sync(
    model: Model,
    node: Shell,
    target_root: str,
    policy: Policy,
    *,
    address: str = "",
    say: Callable[[str], None] = lambda _text: None,
) -> int:
    """Make `target_root` on `node` hold the model, verified; the number of files sent.

    `address` is the node's fabric address, used for the copy only. Raises `RefusedError`.
    """  # fmt: skip
    inside = model.folder.relative_to(model.root)
    folder = str(Path(target_root) / inside)
    problems = _verify_on(model, node, folder, policy)
    if not problems:
        return 0
    if policy.skip_sync:
        fix = "unset SKIP_SYNC, or copy these files"
        raise RefusedError(_incomplete(model.manifest.repo, node.name, summary(problems), fix))
    files = model.manifest.of(problem.name for problem in problems)
    size = sum(entry.size for entry in files)
    say(f"copying {len(files)} file(s), {size / 2**30:.2f} GiB, to {node.name}")
    names = [name for entry in files for name in _with_target(model, entry.name)]
    done = execute(
        rsync_argv(model.root, node, target_root, address),
        "".join(f"{name}\0" for name in dict.fromkeys(names)),
        RSYNC_TIMEOUT_S,
    )
    if not done.ok:
        raise RefusedError(_copy_failed(node.name, done.code, done.err))
    if problems := _verify_on(model, node, folder, policy):
        fix = f"check disk and memory of {node.name}, then start again"
        raise RefusedError(_incomplete(model.manifest.repo, node.name, summary(problems), fix))
    return len(files)


def _verify_on(model: Model, node: Shell, folder: str, policy: Policy) -> tuple[Problem, ...]:
    done = manifests.verify(
        model.manifest, folder, HASH_CACHE, shell=node, full=policy.full,
        rehash_days=policy.rehash_days,
    )  # fmt: skip
    return done.problems


def _with_target(model: Model, name: str) -> list[str]:
    """A file below the root, and what it links to there."""
    path = model.folder / name
    found = [str(path.relative_to(model.root))]
    if path.is_symlink():
        found.append(os.path.relpath(path.resolve(), model.root.resolve()))
    return found


def rsync_argv(root: Path, node: Shell, target_root: str, address: str = "") -> list[str]:
    """Copy the names on standard input below `root`; interrupted files go on where they stopped.

    Times are not trusted (`--ignore-times`): a damaged file may have the size and time of a good
    one. Only its changed blocks travel.
    """
    argv = [
        "rsync", "--archive", "--ignore-times", "--no-whole-file", f"--partial-dir={PARTIAL}",
        "--from0", "--files-from=-", "--mkpath", "--timeout=120", "--info=progress2",
        "--no-owner", "--no-group",
    ]  # fmt: skip
    if not isinstance(node, SshShell):
        return [*argv, f"{root}/", f"{target_root}/"]
    user, at, host = node.target.rpartition("@")
    base = node.base()
    if address:
        base += ["-o", f"HostKeyAlias={host}", "-o", f"HostName={address}"]
        base += ["-o", "ControlPath=none"]
    remote = " ".join(_shell_word(word) for word in base)
    return [*argv, "-e", remote, f"{root}/", f"{user}{at}{host}:{target_root}/"]


def _shell_word(word: str) -> str:
    """rsync splits its -e at blanks and knows quotes, but no backslashes."""
    return f"'{word}'" if " " in word else word


def _incomplete(repo: str, where: str, seen: str, fix: str) -> Finding:
    return Finding(
        "weights-incomplete",
        f"{repo} is not complete on {where}: {seen}",
        "an engine that loads other bytes fails late, or answers nonsense",
        fix,
    )


def _copy_failed(node: str, code: int, error: str) -> Finding:
    last = (error.strip().splitlines() or [f"exit code {code}"])[-1]
    if "No space left" in error:
        return Finding(
            "disk-full",
            f"{node}: no space left while copying weights",
            "what arrived is kept",
            f"free space on {node} and start again",
        )
    return Finding(
        "copy-failed",
        f"{node}: rsync ended with {code}: {last}",
        "the node needs the weights; what arrived is kept and is not sent again",
        "start again; SKIP_SYNC=1 if the folder is shared",
    )
