"""The verb `ablit`: fetch a donor's tensors, show and verify them, keep a direction."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from glm_exl3.format.donor import Donor, parse_layers, show_layers
from glm_exl3.format.errors import GlmExl3Error
from glm_exl3.format.headers import read_header
from glm_launch import edits, settings_load
from glm_launch.errors import ExitCode, Finding, RefusedError
from glm_launch.settings import Settings
from glm_launch.ui import Ui

ACTIONS = ("fetch", "status", "verify", "direction")
_COMMIT = re.compile(r"^[0-9a-f]{40}$")


def run(
    ui: Ui, action: str, *, file: str = "", name: str = "dealign", as_json: bool = False
) -> int:
    """Perform one action; raises `RefusedError` with what is missing and the command for it."""
    settings = settings_load.load(overrides={"ABLIT": False}).settings
    actions: Mapping[str, Callable[[], dict[str, Any]]] = {
        "fetch": lambda: _fetch(ui, settings),
        "status": lambda: _status(settings),
        "verify": lambda: _verify(settings),
        "direction": lambda: _direction(settings, file, name),
    }
    try:
        found = actions[action]()
    except GlmExl3Error as error:
        raise RefusedError(Finding(error.code, error.seen, error.why, error.fix)) from error
    if as_json:
        ui.line(json.dumps(found, indent=2))
    else:
        for key, value in found.items():
            ui.line(f"{key:10} {value}")
    return ExitCode.OK


def _fetch(ui: Ui, settings: Settings) -> dict[str, Any]:
    from glm_ablit.fetch import fetch
    from glm_ablit.remote import Remote

    _pinned(settings)
    token = settings.HF_TOKEN.get_secret_value() if settings.HF_TOKEN else None
    endpoint = os.environ.get("HF_ENDPOINT", "")
    remote = Remote(settings.ABLIT_DONOR, settings.ABLIT_DONOR_REVISION, endpoint, token)
    folder = edits.donor_folder(settings)
    with _bar(ui) as progress:
        done = fetch(
            remote, folder, parse_layers(settings.ABLIT_LAYERS), _target(settings), progress,
            with_mtp=settings.ABLIT_INCLUDE_MTP,
        )  # fmt: skip
    return {**_describe(folder, done.donor), "received": done.moved, "missing": done.needed}


def _status(settings: Settings) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if settings.ABLIT_DONOR:
        folder = edits.donor_folder(settings)
        donor = Donor.load(folder)
        found |= _describe(folder, donor) if donor else {"donor": "not fetched"}
    file = edits.direction_file(settings)
    found["direction"] = str(file) if file.is_file() else f"{settings.ABLIT_DIRECTION}: not there"
    return found


def _describe(folder: Path, donor: Donor) -> dict[str, Any]:
    from glm_ablit.fetch import progress_of

    total = sum(tensor.bytes for tensor in donor.tensors)
    return {
        "donor": f"{donor.repo}@{donor.revision}",
        "folder": str(folder),
        "layers": show_layers(donor.layers),
        "bytes": f"{progress_of(folder, donor)} of {total}",
        "complete": donor.complete,
        "digest": donor.digest,
    }


def _verify(settings: Settings) -> dict[str, Any]:
    from glm_ablit.fetch import verify

    folder = edits.donor_folder(settings)
    return {**_describe(folder, verify(folder)), "verified": True}


def _direction(settings: Settings, file: str, name: str) -> dict[str, Any]:
    """Keep a file of directions under a name."""
    source = Path(file).expanduser()
    if not file or not source.is_file() or not re.fullmatch(r"[\w-]+", name):
        raise RefusedError(
            Finding(
                "no-direction",
                f"{file or 'no file'} cannot be kept as {name!r}",
                "a direction is a safetensors file with the tensor `direction` or `direction.N`",
                "./start.sh ablit direction FILE --name NAME",
            )
        )
    tensors = read_header(source)
    other = [one for one in tensors if not re.fullmatch(r"direction(\.\d+)?", one)]
    if other or not tensors:
        raise RefusedError(
            Finding(
                "no-direction",
                f"{source} holds {', '.join(other[:3]) or 'nothing'}",
                "a direction is called `direction`, or `direction.N` for layer N",
                "rename the tensors",
            )
        )
    target = edits.direction_file(settings, name)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_suffix(".draft")
    shutil.copyfile(source, draft)
    draft.replace(target)
    return {"direction": str(target), "tensors": len(tensors)}


def _pinned(settings: Settings) -> None:
    """Raise `RefusedError` unless the donor is named by a commit; says today's where it can."""
    if not settings.ABLIT_DONOR:
        raise RefusedError(
            Finding(
                "no-donor",
                "ABLIT_DONOR is empty",
                "this project ships and recommends no donor; it takes the one you name",
                "set ABLIT_DONOR=owner/name and ABLIT_DONOR_REVISION to a commit of it",
            )
        )
    revision = settings.ABLIT_DONOR_REVISION
    if _COMMIT.match(revision):
        return
    from huggingface_hub import HfApi

    try:
        token = settings.HF_TOKEN.get_secret_value() if settings.HF_TOKEN else False
        api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, token=token)
        today = api.model_info(settings.ABLIT_DONOR, revision=revision or "main", timeout=30).sha
    except Exception as error:  # noqa: BLE001 (the hub raises many kinds; none changes the answer)
        today = f"a commit of it (the hub did not tell today's: {type(error).__name__})"
    raise RefusedError(
        Finding(
            "donor-revision",
            f"ABLIT_DONOR_REVISION={revision or '(empty)'} is no commit",
            "a name may mean other weights tomorrow",
            f"set ABLIT_DONOR_REVISION={today}",
        )
    )


def _target(settings: Settings) -> dict[str, Any] | None:
    """Geometry of the model to edit, where it is a folder here; ranks compare it in any case."""
    from glm_ablit.recipe import geometry_of

    config = Path(settings.MODEL).expanduser() / "config.json"
    if not settings.MODEL or not config.is_file():
        return None
    return geometry_of(json.loads(config.read_text()))


@contextmanager
def _bar(ui: Ui) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal; nothing elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=Console(file=ui.err), disable=not ui.fancy) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
