"""The report tells what happened and gives no secret away."""

from __future__ import annotations

import io
import json
import re
import tarfile
import urllib.parse
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm_launch import report
from glm_launch.report_redact import HIDDEN, Redactor
from glm_launch.ui import Ui

KEY = 'planted+key/"with$signs'
PLANTED = {
    "hub": "hf_PlantedPlantedPlantedPlanted",
    "registry": "ghp_PlantedPlantedPlantedPlanted00",
    "openai": "sk-planted-planted-planted-planted",
    "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJwbGFudGVkIjoxfQ.c2lnbmF0dXJl",
}


@pytest.mark.parametrize("token", PLANTED.values())
def test_what_looks_like_a_token_is_hidden(token) -> None:
    said = Redactor()(f"pulling with {token}, then more")
    assert token not in said and said == f"pulling with {HIDDEN}, then more"


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Bearer planted-value-1",
        '{"authorization": "Basic planted-value-1"}',
        "--api-key planted-value-1",
        "VLLM_API_KEY=planted-value-1",
        "export HF_TOKEN='planted-value-1'",
        '"password": "planted-value-1",',
        "https://user:planted-value-1@host/path",
        "-----BEGIN OPENSSH PRIVATE KEY-----\nplanted-value-1\n-----END OPENSSH PRIVATE KEY-----",
        "-----BEGIN RSA PRIVATE KEY-----\nplanted-value-1 cut off",
    ],
)
def test_what_a_name_gives_away_is_hidden(text) -> None:
    assert "planted-value-1" not in Redactor()(text)


@given(st.text(st.characters(codec="utf-8"), min_size=4, max_size=40), st.text(max_size=20))
def test_a_known_secret_is_hidden_in_every_form(secret, around) -> None:
    redact = Redactor([secret])
    for form in (secret, json.dumps(secret)[1:-1], urllib.parse.quote(secret, safe="")):
        text = redact(f"{around}\x00{form}\x00{around}")
        assert f"\x00{form}\x00" not in text


def test_words_of_a_log_stay() -> None:
    log = (
        "INFO 12:01:02 tokens per second 31.2, max_tokens=64, tokenizer /model/tokenizer.json\n"
        "vllm:generation_tokens_total 12.0  token ids [1, 2]  version 0.33.0  torch 2.14.0+cu130\n"
        "keyboard interrupt, secretary, 127.0.0.1:8888 and [::1]:8888 at 12:34:56\n"
    )
    assert Redactor(names={"spark": "node0"})(log) == log


def test_addresses_get_an_alias_and_keep_it() -> None:
    redact = Redactor(names={"spark-1": "node1"})
    said = redact("spark-1 10.0.0.7:8888 and 10.0.0.8, again 10.0.0.7; fd00::12 aa:bb:cc:dd:ee:ff")
    one, two, six = (redact.aliases[a] for a in ("10.0.0.7", "10.0.0.8", "fd00::12"))
    assert said == f"node1 {one}:8888 and {two}, again {one}; {six} (mac)"
    assert len({one, two, six}) == 3
    kept = Redactor(names={"spark-1": "node1"}, keep_addresses=True)
    assert kept("spark-1 10.0.0.7") == "spark-1 10.0.0.7"


@pytest.fixture
def site(tmp_path, monkeypatch, checkpoint):
    """A state folder after a launch, with secrets wherever they could have strayed to."""
    key_file = tmp_path / "key"
    key_file.write_text("planted-file-key-1\n")
    key_file.chmod(0o600)
    state = tmp_path / "state"
    launch = state / "launches" / "20260101-000000-aaaa"
    launch.mkdir(parents=True)
    (launch / "rank0.log").write_text(
        f"key {KEY} {json.dumps(KEY)} planted-file-key-1 {' '.join(PLANTED.values())}\n"
        "INFO the engine came up at 10.9.8.7\n"
    )
    (launch / "rank1.log").write_text("x\n" * (report.LOG_BYTES // 2) + "the last line\n")
    (state / "supervisor").mkdir()
    (state / "supervisor" / "log").write_text("error [rank-ended] rank 1 exited\n")
    for name, value in {
        "GLM_STATE_DIR": str(state), "MODEL": str(checkpoint), "VLLM_API_KEY": KEY,
        "HF_TOKEN": PLANTED["hub"], "GHCR_TOKEN": PLANTED["registry"],
        "GLM_ENV_FILE": str(tmp_path / "none.env"), "SOME_PASSWORD": "planted-environment",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    return tmp_path, key_file


def contents(folder: Path) -> dict[str, str]:
    (path,) = folder.glob("glm-exl3-report-*.tar.gz")
    assert path.stat().st_mode & 0o777 == 0o600
    with tarfile.open(path) as archive:
        return {
            member.name.partition("/")[2]: archive.extractfile(member).read().decode()
            for member in archive.getmembers()
        }


def test_the_archive_tells_what_happened_and_holds_no_secret(site) -> None:
    folder, _ = site
    out = io.StringIO()
    assert report.report(Ui(out=out), folder=str(folder)) == 0
    parts = contents(folder)
    everything = "\n".join([*parts, *parts.values()])
    for secret in (KEY, json.dumps(KEY)[1:-1], *PLANTED.values(), "planted-environment"):
        assert secret not in everything
    assert "10.9.8.7" not in everything and re.search("came up at address-", everything)
    assert "the engine came up" in parts["launches/20260101-000000-aaaa/rank0.log"]
    cut = parts["launches/20260101-000000-aaaa/rank1.log"]
    assert cut.endswith("the last line\n") and "bytes before this are left out" in cut
    assert "rank 1 exited" in parts["supervisor/log"]
    assert json.loads(parts["settings.json"])["VLLM_API_KEY"] == HIDDEN
    assert "could not be gathered" in parts["supervisor/state.json"]
    assert any(name.startswith("nodes/") and "uname" in text for name, text in parts.items())
    assert str(folder) in out.getvalue()


def test_the_content_of_a_key_file_is_hidden(site, monkeypatch) -> None:
    folder, key_file = site
    monkeypatch.delenv("VLLM_API_KEY")
    monkeypatch.setenv("VLLM_API_KEY_FILE", str(key_file))
    report.report(Ui(out=io.StringIO()), folder=str(folder))
    assert "planted-file-key-1" not in "".join(contents(folder).values())


def test_addresses_stay_when_asked_for(site) -> None:
    folder, _ = site
    report.report(Ui(out=io.StringIO()), keep_addresses=True, folder=str(folder))
    assert "10.9.8.7" in contents(folder)["launches/20260101-000000-aaaa/rank0.log"]
