"""Settings: precedence, every bad value at once, nothing secret in a message."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm_launch.errors import ConfigurationError, ExitCode
from glm_launch.settings import Settings
from glm_launch.settings_load import load

NO_FILE = Path("/nonexistent/.env")

BAD = {
    "SERVED_MODEL_NAME": "two words",
    "SPEC_METHOD": "eagle",
    "DFLASH_TOKENS": "0",
    "DFLASH_DRAFT_TP": "9",
    "MTP_TOKENS": "9",
    "PORT": "70000",
    "API_HOST": "not a host",
    "ALLOW_OPEN_API": "perhaps",
    "RUNTIME": "podman",
    "RANKS": "3",
    "HEAD_IP": "1.2.3.4.5",
    "WORKER_IP": "10.0.0.2,10.0.0.999",
    "MASTER_PORT": "0",
    "MAX_MODEL_LEN": "-1",
    "MAX_NUM_SEQS": "0",
    "MAX_NUM_BATCHED_TOKENS": "many",
    "GPU_MEM_UTIL": "1.5",
    "KV_CACHE_DTYPE": "int3",
    "KV_CACHE_MEMORY_BYTES": "-5",
    "CUDAGRAPH_SIZES": "1,0",
    "ENFORCE_EAGER": "maybe",
    "CPU_KV_GIB": "0",
    "CPU_THREADS": "257",
    "LANGUAGE_MODEL_ONLY": "2",
    "LIMIT_MM": "audio=3",
    "SKIP_MM_PROFILING": "?",
    "BUILD": "?",
    "SKIP_PULL": "?",
    "SKIP_DOWNLOAD": "?",
    "SKIP_SYNC": "?",
    "REFRESH_WEIGHTS": "?",
    "ABLIT": "1",
    "READY_TIMEOUT_S": "1",
    "STOP_GRACE_S": "0",
    "ENGINE_COMMAND": "'open",
    "EXTRA_ARGS": "--port 9",
}
FREE_TEXT = {
    "MODEL", "MODEL_REVISION", "HF_HOME", "DFLASH_MODEL", "DFLASH_REVISION", "VLLM_API_KEY",
    "WORKER_USER", "IMAGE", "GLM_STATE_DIR",
}  # fmt: skip


def seen(error: ConfigurationError) -> str:
    return "\n".join(finding.seen for finding in error.findings)


def test_every_setting_is_free_text_or_has_a_bad_value_here() -> None:
    assert set(BAD) | FREE_TEXT == set(Settings.model_fields)


@pytest.mark.parametrize("key", BAD)
def test_a_bad_value_is_refused_by_name(key: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load({key: BAD[key]}, NO_FILE)
    assert caught.value.exit_code == ExitCode.BAD_CONFIGURATION
    assert f"{key}={BAD[key]}" in seen(caught.value)


def test_all_bad_values_are_told_at_once() -> None:
    bad = {key: value for key, value in BAD.items() if key != "ABLIT"}
    with pytest.raises(ConfigurationError) as caught:
        load(bad, NO_FILE)
    missing = [key for key in bad if f"{key}=" not in seen(caught.value)]
    assert not missing


def test_a_message_names_the_line_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    file.write_text("# ports\nPORT=0\n")
    with pytest.raises(ConfigurationError, match=r"from \.env line 2"):
        load({}, file)


def test_a_line_that_is_no_assignment_is_told(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    file.write_text("PORT=8000\nthis is: no 'assignment\n")
    with pytest.raises(ConfigurationError, match=r"\.env line 2 is not KEY=value"):
        load({}, file)


def test_the_shell_wins_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    file.write_text("PORT=8001\nRANKS=4\n")
    loaded = load({"PORT": "8002"}, file, defaults={"RANKS": 1, "MAX_NUM_SEQS": 2})
    assert (loaded.settings.PORT, loaded.settings.RANKS) == (8002, 4)
    assert loaded.settings.MAX_NUM_SEQS == 2
    assert loaded.chosen == {"PORT", "RANKS"}


def test_an_empty_value_means_the_default(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    file.write_text("PORT=\nVLLM_API_KEY=\n")
    loaded = load({"RANKS": " "}, file)
    assert (loaded.settings.PORT, loaded.settings.RANKS) == (8888, 2)
    assert loaded.settings.secrets() == {}


def test_an_unknown_key_is_warned_about_with_its_likely_name(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    file.write_text("MAX_MODEL_LENGTH=5\nUNRELATED=1\n")
    first, second = load({}, file).warnings
    assert "did you mean MAX_MODEL_LEN?" in first
    assert "UNRELATED" in second and "did you mean" not in second


def test_an_open_address_needs_a_key_or_consent() -> None:
    with pytest.raises(ConfigurationError, match="VLLM_API_KEY="):
        load({"API_HOST": "0.0.0.0"}, NO_FILE)
    assert load({"API_HOST": "0.0.0.0", "VLLM_API_KEY": "k"}, NO_FILE)
    assert load({"API_HOST": "0.0.0.0", "ALLOW_OPEN_API": "1"}, NO_FILE)
    assert load({"API_HOST": "::1"}, NO_FILE).settings.base_url == "http://[::1]:8888"


@pytest.mark.parametrize(
    ("env", "code"),
    [
        ({"WORKER_IP": "10.0.0.2"}, "remote-nodes"),
        ({"PORT": "9000", "MASTER_PORT": "9000"}, "same-port"),
        ({"DFLASH_DRAFT_TP": "4"}, "draft-tp"),
        ({"ABLIT": "1"}, "no-weight-edits"),
    ],
)
def test_combinations_are_checked(env: dict[str, str], code: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load(env, NO_FILE)
    assert [finding.code for finding in caught.value.findings] == [code]


def test_a_key_appears_in_no_message_or_representation() -> None:
    env = {"VLLM_API_KEY": "planted-secret", "PORT": "0"}
    with pytest.raises(ConfigurationError) as caught:
        load(env, NO_FILE)
    good = load(env | {"PORT": "1"}, NO_FILE)
    assert "planted-secret" not in f"{caught.value}{good!r}{good.settings!r}"


@pytest.mark.parametrize("flag", ["--port 3", "--master_port=3", "-tp 4", "--trust-remote-code"])
def test_extra_arguments_must_not_hold_what_a_setting_owns(flag: str) -> None:
    with pytest.raises(ConfigurationError, match="must not hold"):
        load({"EXTRA_ARGS": flag}, NO_FILE)


def test_containers_settings_are_said_to_have_no_effect() -> None:
    assert load({"SKIP_PULL": "1"}, NO_FILE).warnings == (
        "SKIP_PULL has no effect with RUNTIME=local",
    )


@given(
    port=st.integers(1, 65535),
    ranks=st.sampled_from([1, 2, 4]),
    share=st.floats(0.1, 0.98),
    sizes=st.lists(st.integers(1, 8192), min_size=1, max_size=5),
    images=st.integers(0, 9999),
    eager=st.booleans(),
)
def test_values_survive_the_way_through_text(
    port: int, ranks: int, share: float, sizes: list[int], images: int, eager: bool
) -> None:
    env = {
        "PORT": str(port),
        "MASTER_PORT": str(port % 65535 + 1),
        "RANKS": str(ranks),
        "GPU_MEM_UTIL": repr(share),
        "CUDAGRAPH_SIZES": " ".join(map(str, sizes)),
        "LIMIT_MM": f"image={images}",
        "ENFORCE_EAGER": str(int(eager)),
    }
    settings = load(env, NO_FILE).settings
    assert (port, ranks, share) == (settings.PORT, settings.RANKS, settings.GPU_MEM_UTIL)
    assert tuple(sizes) == settings.CUDAGRAPH_SIZES
    assert {"image": images} == settings.LIMIT_MM
    assert settings.ENFORCE_EAGER is eager
