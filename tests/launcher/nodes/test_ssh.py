"""ssh's own failures become causes with a fix; commands survive quoting."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm_launch.nodes import ssh
from glm_launch.nodes.ssh import Done, LocalShell, SshShell

SAID = {
    "ssh-missing": "ssh: No such file or directory",
    "ssh-name": "ssh: Could not resolve hostname nope: Name or service not known",
    "ssh-timeout": "ssh: connect to host 10.0.0.9 port 22: Connection timed out",
    "ssh-route": "ssh: connect to host 10.0.0.9 port 22: No route to host",
    "ssh-refused": "ssh: connect to host 10.0.0.9 port 22: Connection refused",
    "ssh-host-key-changed": "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\n"
    "Host key verification failed.",
    "ssh-host-key-unknown": "No ED25519 host key is known for n and you have requested strict "
    "checking.\nHost key verification failed.",
    "ssh-key-file": "WARNING: UNPROTECTED PRIVATE KEY FILE!\nops@n: Permission denied (publickey).",
    "ssh-agent": "sign_and_send_pubkey: signing failed for ED25519 from agent: agent refused "
    "operation\nops@n: Permission denied (publickey).",
    "ssh-too-many": "Received disconnect from 10.0.0.9: Too many authentication failures",
    "ssh-denied": "ops@n: Permission denied (publickey,password).",
    "ssh-account": "This account is currently not available.",
    "ssh-closed": "kex_exchange_identification: Connection closed by remote host",
}


def test_every_cause_has_an_example() -> None:
    assert set(SAID) == {cause.code for cause in ssh.CAUSES}


@pytest.mark.parametrize("code", SAID)
def test_what_ssh_says_is_classified(code) -> None:
    finding = ssh.classify(Done(255, "", SAID[code]), "ops@n")
    assert finding.code == code
    assert "ops@n" in finding.seen and finding.fix and "{" not in finding.fix


def test_the_unknown_is_said_as_it_is() -> None:
    finding = ssh.classify(Done(255, "", "something new"), "n")
    assert finding.code == "ssh-failed" and "something new" in finding.seen


@given(st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8")), min_size=1))
def test_a_command_arrives_as_it_was_sent(words) -> None:
    line = SshShell("n", "n").argv(["printf", "%s\\0", *words])[-1]
    done = subprocess.run(["sh", "-c", line], capture_output=True, check=True)
    assert done.stdout.split(b"\0")[:-1] == [word.encode() for word in words]


def test_nobody_is_asked_for_a_password_and_connections_are_shared(tmp_path) -> None:
    argv = SshShell("n", "ops@n", sockets=tmp_path).argv(["true"])
    assert argv[0] == "ssh" and argv[-3:] == ["ops@n", "--", "true"]
    assert {"BatchMode=yes", "ControlMaster=auto", f"ControlPath={tmp_path}/%C"} <= set(argv)


def test_stdin_reaches_the_command_and_late_ones_are_cut_off() -> None:
    assert LocalShell().run(["cat"], stdin="hello").out == "hello"
    assert LocalShell().run(["sleep", "9"], timeout_s=0.05).code == ssh.TIMED_OUT
    assert LocalShell().run(["/no/such"]).code == 127


def test_an_agent_without_keys_is_no_agent(monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    assert ssh.without_agent()
    tool = Path(tmp_path / "ssh-add")
    tool.write_text("#!/bin/sh\nexit 0\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SSH_AUTH_SOCK", "x")
    assert not ssh.without_agent()
