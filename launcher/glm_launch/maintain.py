"""The verbs between launches: `download` weights, make a `key`, `rollback` to what answered."""

from __future__ import annotations

import json
import os
import secrets
import sys
from dataclasses import asdict

from glm_launch import verbs
from glm_launch.errors import ConfigurationError, ExitCode, Finding, RefusedError, raise_if_any
from glm_launch.nodes.deploy import Deployment
from glm_launch.nodes.models import check_names
from glm_launch.session import open_session
from glm_launch.settings_load import KEY_FILE
from glm_launch.state import Good
from glm_launch.ui import Ui

KEY_BYTES = 32


def download(ui: Ui, *, as_json: bool = False) -> int:
    """Weights on this machine and, with workers, on every node: complete and verified."""
    out = Ui(out=sys.stderr) if as_json else ui
    verbs.make_env_file(out)
    session = open_session(out)
    session.backend.require()
    nodes = Deployment(session.settings, session.store, out)
    raise_if_any(ConfigurationError, check_names(nodes.models))
    with session.lock("download"):
        missing = nodes.survey().missing if len(nodes.sites) > 1 else []
        raise_if_any(RefusedError, missing)
        done = nodes.ensure_weights()
    found = [
        {"folder": str(model.folder), "gib": round(model.manifest.bytes / 2**30, 2),
         "files": len(model.manifest.files), "digest": model.manifest.digest,
         "manifest": model.manifest.origin}
        for model in done
    ]  # fmt: skip
    if as_json:
        ui.line(json.dumps({"models": found}, indent=2))
    for one in [] if as_json else found:
        ui.line(f"complete  {one['folder']} ({one['gib']} GiB in {one['files']} files, "
                f"hashes from the {one['manifest']})")  # fmt: skip
    return ExitCode.OK


def key(ui: Ui) -> int:
    """Make a key that only this user can read, and say how to use it; never shows the key."""
    settings = open_session(Ui(out=sys.stderr)).settings
    path = settings.GLM_STATE_DIR / KEY_FILE
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        ui.line(f"{path} is there already; remove it first to get another key")
    else:
        with os.fdopen(descriptor, "w") as stream:
            stream.write(secrets.token_urlsafe(KEY_BYTES) + "\n")
        ui.line(f"made {path}")
    ui.line("put this line into .env:")
    ui.line(f"VLLM_API_KEY_FILE={path}")
    return ExitCode.OK


def rollback(ui: Ui, *, steal: bool = False) -> int:
    """Replace what runs by the last image and preset that answered and are not those of now."""
    session = open_session(ui)
    backend = session.backend
    if not isinstance(backend, Deployment):
        raise RefusedError(
            Finding(
                "nothing-to-roll-back",
                "RUNTIME=local has no image",
                "rollback returns to an earlier image and preset",
                "check out the earlier version instead",
            )
        )
    good = earlier(session.store.goods(), backend.configured())
    ui.line(f"rolling back to {good.image} ({good.fingerprint}), preset {good.preset or 'none'}")
    overrides = {"IMAGE": good.tag, "PRESET": good.preset, "BUILD": False}
    code = verbs.replace_launch(open_session(ui, overrides), "rollback", steal=steal)
    ui.line(f"to stay there, put into .env: IMAGE={good.tag} and PRESET={good.preset}")
    return code


def earlier(goods: list[Good], now: tuple[str, str]) -> Good:
    """The newest launch that answered with another image or preset than `now`."""
    for good in reversed(goods):
        if good.what != now:
            return good
    known = json.dumps([asdict(good)["image"] for good in goods])
    raise RefusedError(
        Finding(
            "nothing-to-roll-back",
            f"no other image and preset answered before (known: {known})",
            "rollback returns to one that did",
            "set IMAGE and PRESET in .env",
        )
    )
