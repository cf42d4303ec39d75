"""What the ranks need for weight edits: variables, files and a line for people.

`settle` looks at the files, judges what can be judged without tensors and pins them by hash;
`edited` puts the outcome into a plan and is pure. What is missing is an error that names the
command that brings it, never a launch without the edit or with another one.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from glm_exl3.format.donor import FETCH, Donor, parse_layers, show_layers
from glm_exl3.format.errors import GlmExl3Error
from glm_launch import dense
from glm_launch.errors import Finding, RefusedError, raise_if_any
from glm_launch.plan import LaunchPlan
from glm_launch.settings import Settings

DIRECTIONS = "directions"
INSIDE_DONOR, INSIDE_FILES, INSIDE_DENSE = "/edits/donor", "/edits/files", "/edits/dense"


@dataclass(frozen=True)
class Part:
    """One file or folder that ranks read: its variable and its place here and in a container."""

    variable: str
    here: Path
    inside: str


@dataclass(frozen=True)
class Settled:
    """Everything about the edits of a launch; empty without edits.

    `folders` are to be brought to every node and mounted: (here, in a container).
    """

    env: Mapping[str, str]
    parts: tuple[Part, ...] = ()
    folders: tuple[tuple[Path, str], ...] = ()
    titles: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return "; ".join(self.titles)


def donor_folder(settings: Settings) -> Path:
    """Where the tensors of the donor lie, one folder per commit."""
    name = settings.ABLIT_DONOR.replace("/", "--")
    return settings.GLM_STATE_DIR / "ablit" / f"{name}@{settings.ABLIT_DONOR_REVISION[:12]}"


def direction_file(settings: Settings, name: str = "") -> Path:
    """The file of a direction: a path as it is, a name in our folder."""
    text = name or settings.ABLIT_DIRECTION
    if "/" in text or text.endswith(".safetensors"):
        return Path(text).expanduser().absolute()
    return settings.GLM_STATE_DIR / "ablit" / DIRECTIONS / f"{text}.safetensors"


def wanted_layers(settings: Settings, hidden_layers: int | None) -> tuple[int, ...]:
    """ABLIT_LAYERS, without the MTP block where it is not to be edited."""
    layers = parse_layers(settings.ABLIT_LAYERS)
    if settings.ABLIT_INCLUDE_MTP or hidden_layers is None:
        return layers
    return tuple(layer for layer in layers if layer < hidden_layers)


def settle(settings: Settings) -> Settled:
    """What the settings ask for. Raises `RefusedError` with everything that is missing."""
    found: list[Finding] = []
    settled = Settled({})
    kinds = (
        (settings.ABLIT, _ablit),
        (bool(settings.STEER_VECTOR), _steering),
        (settings.DENSE_RECODE != "off", _dense),
    )
    for wanted, one in kinds:
        if not wanted:
            continue
        try:
            more = one(settings)
        except RefusedError as error:
            found += error.findings
            continue
        except GlmExl3Error as error:
            found.append(Finding(error.code, error.seen, error.why, error.fix))
            continue
        settled = Settled(
            {**settled.env, **more.env},
            settled.parts + more.parts,
            settled.folders + more.folders,
            settled.titles + more.titles,
        )
    raise_if_any(RefusedError, found)
    return _staged(settled, settings)


def _ablit(settings: Settings) -> Settled:
    kind = "proj" if settings.ABLIT_METHOD == "proj" else "transplant"
    env = {
        "GLM_EXL3_ABLIT": kind,
        "GLM_EXL3_ABLIT_LAYERS": settings.ABLIT_LAYERS,
        "GLM_EXL3_ABLIT_MTP": str(int(settings.ABLIT_INCLUDE_MTP)),
    }
    if kind == "proj":
        file = direction_file(settings)
        env |= {
            "GLM_EXL3_ABLIT_PIN": _hash(file, "ABLIT_DIRECTION", DIRECTION_FIX)[:16],
            "GLM_EXL3_ABLIT_ALPHA": f"{settings.ABLIT_ALPHA:g}",
        }
        parts = [Part("GLM_EXL3_ABLIT_SOURCE", file, f"{INSIDE_FILES}/direction.safetensors")]
        folders: tuple[tuple[Path, str], ...] = ()
        title = (
            f"direction {settings.ABLIT_DIRECTION} taken out with alpha {settings.ABLIT_ALPHA:g}"
        )
    else:
        donor, folder = _donor(settings), donor_folder(settings)
        env["GLM_EXL3_ABLIT_PIN"] = donor.digest
        parts = [Part("GLM_EXL3_ABLIT_SOURCE", folder, INSIDE_DONOR)]
        folders = ((folder, INSIDE_DONOR),)
        title = f"output projections of {donor.repo}@{donor.revision[:12]}"
    if settings.ABLIT_FINGERPRINT:
        file = Path(settings.ABLIT_FINGERPRINT).expanduser().absolute()
        _hash(file, "ABLIT_FINGERPRINT", "correct its path, or leave it empty")
        parts.append(Part("GLM_EXL3_ABLIT_FINGERPRINT", file, f"{INSIDE_FILES}/fingerprint.json"))
    mtp = "" if settings.ABLIT_INCLUDE_MTP else " without the MTP block"
    titles = (f"ablit: {title}, layers {settings.ABLIT_LAYERS}{mtp}",)
    return Settled(env, tuple(parts), folders, titles)


DIRECTION_FIX = "./start.sh ablit direction FILE, or set ABLIT_DIRECTION to a file"


def _donor(settings: Settings) -> Donor:
    """The complete record of the donor with all wanted layers."""
    donor = Donor.require(donor_folder(settings))
    wanted = wanted_layers(settings, int(donor.geometry["num_hidden_layers"]))
    missing = sorted(set(wanted) - set(donor.layers))
    if missing:
        raise RefusedError(
            Finding(
                "donor-layers",
                f"layer(s) {show_layers(missing)} of ABLIT_LAYERS were not fetched",
                "they would be served without the edit",
                FETCH,
            )
        )
    return donor


def _steering(settings: Settings) -> Settled:
    file = Path(settings.STEER_VECTOR).expanduser().absolute()
    sha256 = _hash(file, "STEER_VECTOR", "correct its path, or leave it empty")
    if settings.STEER_SHA256 and settings.STEER_SHA256.lower() != sha256:
        raise RefusedError(
            Finding(
                "steer-hash",
                f"{file} has SHA-256 {sha256}, STEER_SHA256 is another",
                "another vector would steer the model elsewhere",
                "fetch the file again, or correct STEER_SHA256",
            )
        )
    env = {
        "GLM_EXL3_STEER_PIN": sha256,
        "GLM_EXL3_STEER_ALPHA": f"{settings.STEER_ALPHA:g}",
        "GLM_EXL3_STEER_LAYERS": settings.STEER_LAYERS,
        "GLM_EXL3_STEER_FORCE": str(int(settings.STEER_FORCE)),
    }
    alpha = f"{settings.STEER_ALPHA:g}" if settings.STEER_ALPHA else "of the file"
    title = f"steering: {file.name} ({sha256[:12]}), alpha {alpha}, layers {settings.STEER_LAYERS}"
    part = Part("GLM_EXL3_STEER_VECTOR", file, f"{INSIDE_FILES}/vector.model")
    return Settled(env, (part,), (), (title,))


def _dense(settings: Settings) -> Settled:
    recode = dense.asked(settings)
    freed = "; what it frees stays free" if settings.DENSE_FREED == "host" else ""
    titles = (f"dense recode {recode}: numbers differ from the checkpoint's{freed}",)
    env = dense.environment(settings)
    if recode.scheme != "exl3":
        return Settled(env, titles=titles)
    root = dense.require_cache(settings)
    part = Part("GLM_EXL3_DENSE_CACHE", root, INSIDE_DENSE)
    return Settled(env, (part,), ((root, INSIDE_DENSE),), titles)


def _staged(settled: Settled, settings: Settings) -> Settled:
    """Small files in a folder of their own, for nodes: named by what they hold."""
    files = [part for part in settled.parts if part.inside.startswith(f"{INSIDE_FILES}/")]
    if not files or settings.runtime == "local":
        return settled
    contents = {Path(part.inside).name: part.here.read_bytes() for part in files}
    total = hashlib.sha256()
    for name, data in sorted(contents.items()):
        total.update(f"{name} {hashlib.sha256(data).hexdigest()}\n".encode())
    folder = settings.GLM_STATE_DIR / "edits" / total.hexdigest()[:16]
    if not folder.is_dir():
        draft = folder.with_name(f"{folder.name}.draft")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        for name, data in contents.items():
            (draft / name).write_bytes(data)
        draft.replace(folder)
    return replace(settled, folders=(*settled.folders, (folder, INSIDE_FILES)))


def _hash(file: Path, key: str, fix: str) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        seen = f"{key}: {file} cannot be read ({error.strerror})"
        raise RefusedError(
            Finding("edit-file", seen, "the edit that was asked for needs it", fix)
        ) from error


def variables(settled: Settled, *, contained: bool) -> dict[str, str]:
    """Everything that a rank's environment gets; paths are those of its container or of here."""
    places = {part.variable: part.inside if contained else str(part.here) for part in settled.parts}
    return {**settled.env, **places}


def edited(
    plan: LaunchPlan, settled: Settled, mounts: Sequence[Sequence[tuple[str, str]]] = ()
) -> LaunchPlan:
    """The plan with the edits; `mounts` are the folders of each rank's node, for containers."""
    if not settled.titles:
        return plan
    ranks = []
    for index, rank in enumerate(plan.ranks):
        contained = rank.box is not None
        env = {**dict(rank.env), **variables(settled, contained=contained)}
        box = rank.box
        if box is not None:
            box = replace(box, mounts=(*box.mounts, *mounts[index]))
        ranks.append(replace(rank, env=tuple(sorted(env.items())), box=box))
    warnings = (*plan.warnings, f"the model is changed in memory: {settled.title}")
    return replace(plan, ranks=tuple(ranks), edits=settled.title, warnings=warnings)
