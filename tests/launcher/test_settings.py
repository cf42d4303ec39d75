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
    "HYBRID_DRAFT": "?",
    "HYBRID_DRAFT_TOKENS": "16",
    "ADAPTIVE_K": "on",
    "ADAPTIVE_K_SET": "2,16",
    "MIN_ACCEPTANCE": "1.5",
    "REPLY_ACCEPTANCE": "sometimes",
    "PORT": "70000",
    "API_HOST": "not a host",
    "ALLOW_OPEN_API": "perhaps",
    "VLLM_API_KEY_FILE": "/nonexistent/key",
    "HF_HOME": "relative/folder",
    "WEIGHTS_REHASH_DAYS": "-1",
    "PRESET": "gb11",
    "RUNTIME": "podman",
    "EXECUTOR": "uni",
    "RAY_ADDRESS": "head",
    "RAY_PORT": "0",
    "WORKER_USER": "-oProxyCommand=x",
    "WORKER_SSH": "-F,x",
    "WORKER_HOME": "home",
    "GPUS_PER_NODE": "0",
    "DEVICE": "npu",
    "HEAD_CX7_IF": "eth 0",
    "WORKER_CX7_IF": "eth0;reboot",
    "HEAD_CX7_IB": "-x",
    "WORKER_CX7_IB": "a/b",
    "NCCL_IB_GID_INDEX": "256",
    "REQUIRE_RDMA": "?",
    "USE_HOST_NCCL": "/usr/lib/libnccl.so.2",
    "WATCH_PORT": "0",
    "MEM_FLOOR_GIB": "-1",
    "IMAGE": "two words",
    "GHCR_USER": "a b",
    "SKIP_OVERLAY_VERIFY": "?",
    "SHARED_WEIGHTS": "?",
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
    "KDA_STATE_DTYPE": "fp8",
    "DRAFT_KV_CACHE_DTYPE": "int8",
    "PREFIX_HIT_TOKENS": "100",
    "KV_PARKING_GIB": "-1",
    "INDEXER_WORKSPACE_MB": "-1",
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
    "SUPERVISE": "?",
    "REFRESH_WEIGHTS": "?",
    "ABLIT": "maybe",
    "ABLIT_METHOD": "silent",
    "ABLIT_LAYERS": "45-15",
    "ABLIT_ALPHA": "17",
    "ABLIT_DIRECTION": "two words",
    "ABLIT_INCLUDE_MTP": "?",
    "ABLIT_DONOR": "no-owner",
    "ABLIT_DONOR_REVISION": "a b",
    "ABLIT_FINGERPRINT": "a,b",
    "STEER_VECTOR": "a b.gguf",
    "STEER_SHA256": "abc",
    "STEER_ALPHA": "-17",
    "STEER_LAYERS": "none",
    "STEER_FORCE": "?",
    "DENSE_RECODE": "fp4",
    "DENSE_GROUPS": "experts",
    "DENSE_BITS": "3",
    "DENSE_CACHE": "relative/folder",
    "DENSE_FREED": "both",
    "READY_TIMEOUT_S": "1",
    "STOP_GRACE_S": "0",
    "ENGINE_COMMAND": "'open",
    "EXTRA_ARGS": "--port 9",
}
FREE_TEXT = {
    "MODEL", "MODEL_REVISION", "MODEL_FALLBACK", "DFLASH_MODEL", "DFLASH_REVISION",
    "VLLM_API_KEY", "HF_TOKEN", "GHCR_TOKEN", "GLM_STATE_DIR",
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
    assert BAD[key] in seen(caught.value)
    assert key in seen(caught.value) or key == "PRESET"


def test_all_bad_values_are_told_at_once() -> None:
    bad = {key: value for key, value in BAD.items() if key != "PRESET"}
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
    with pytest.raises(ConfigurationError, match="without VLLM_API_KEY"):
        load({"API_HOST": "0.0.0.0"}, NO_FILE)
    assert load({"API_HOST": "0.0.0.0", "VLLM_API_KEY": "k"}, NO_FILE)
    assert load({"API_HOST": "0.0.0.0", "ALLOW_OPEN_API": "1"}, NO_FILE)
    assert load({"API_HOST": "::1"}, NO_FILE).settings.base_url == "http://[::1]:8888"


@pytest.mark.parametrize(
    ("env", "code"),
    [
        ({"WORKER_IP": "10.0.0.2", "RUNTIME": "local"}, "remote-nodes"),
        ({"WORKER_IP": "10.0.0.2"}, "head-address"),
        ({"HEAD_IP": "10.0.0.2", "WORKER_IP": "10.0.0.2"}, "same-address"),
        ({"HEAD_IP": "10.0.0.1", "WORKER_IP": "10.0.0.2,10.0.0.3"}, "bad-tensor-parallel"),
        ({"IMAGE": "x:1", "PORT": "29522"}, "same-port"),
        ({"IMAGE": "x@sha256:1", "BUILD": "1"}, "build-by-digest"),
        ({"HEAD_IP": "10.0.0.1", "WORKER_IP": "10.0.0.2", "WORKER_SSH": "a,b"}, "wrong-count"),
        ({"PRESET": "gb10-tp2"}, "preset-nodes"),
        ({"PRESET": "h200-2x", "DFLASH_DRAFT_TP": "4"}, "draft-tp"),
        ({"PORT": "9000", "MASTER_PORT": "9000"}, "same-port"),
        ({"DFLASH_DRAFT_TP": "4"}, "draft-tp"),
        ({"ABLIT": "1"}, "no-donor"),
        ({"ABLIT": "1", "ABLIT_DONOR": "a/b", "ABLIT_DONOR_REVISION": "main"}, "donor-revision"),
        ({"ABLIT": "1", "ABLIT_METHOD": "proj", "ABLIT_ALPHA": "0"}, "ablit-alpha"),
        ({"STEER_VECTOR": "/v.gguf", "STEER_ALPHA": "2.5"}, "steer-alpha"),
        ({"STEER_SHA256": "0" * 64}, "steer-hash"),
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


def test_three_nodes_are_told_what_is_allowed() -> None:
    with pytest.raises(ConfigurationError, match="may be 1, 2, 4; leave one node out") as caught:
        load({"HEAD_IP": "10.0.0.1", "WORKER_IP": "10.0.0.2,10.0.0.3"}, NO_FILE)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("env", "runtime"),
    [
        ({}, "local"),
        ({"IMAGE": "x:1"}, "containers"),
        ({"BUILD": "1"}, "containers"),
        ({"PRESET": "h200-1x"}, "containers"),
        ({"PRESET": "cpu-demo"}, "local"),
        ({"PRESET": "h200-1x", "RUNTIME": "local"}, "local"),
        ({"HEAD_IP": "10.0.0.1", "WORKER_IP": "10.0.0.2"}, "containers"),
    ],
)
def test_the_runtime_follows_from_what_is_set(env: dict[str, str], runtime: str) -> None:
    assert load(env, NO_FILE).settings.runtime == runtime


def test_a_preset_gives_defaults_that_everything_else_wins_over(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    file.write_text("PRESET=gb10-tp2\nHEAD_IP=10.0.0.1\nWORKER_IP=10.0.0.2\nMAX_NUM_SEQS=2\n")
    settings = load({"MAX_MODEL_LEN": "4096"}, file).settings
    assert (settings.MAX_MODEL_LEN, settings.MAX_NUM_SEQS) == (4096, 2)
    assert settings.KV_CACHE_MEMORY_BYTES == 14 * 2**30
    assert (settings.nodes, settings.tensor_parallel) == (2, 2)


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        ("planted-key\n", 0o644, "has mode 0644"),
        ("planted-key another", 0o600, "does not hold one key"),
        ("", 0o600, "does not hold one key"),
    ],
)
def test_a_key_file_that_is_open_or_empty_is_refused(tmp_path, content, mode, said) -> None:
    path = tmp_path / "key"
    path.write_text(content)
    path.chmod(mode)
    with pytest.raises(ConfigurationError, match=said) as caught:
        load({"VLLM_API_KEY_FILE": str(path)}, NO_FILE)
    assert "planted" not in str(caught.value)


def test_a_key_file_opens_the_api_to_the_network(tmp_path) -> None:
    path = tmp_path / "key"
    path.write_text("planted-key\n")
    path.chmod(0o600)
    env = {"VLLM_API_KEY_FILE": str(path), "API_HOST": "0.0.0.0"}
    assert load(env, NO_FILE).settings.secrets() == {"VLLM_API_KEY": "planted-key"}
    with pytest.raises(ConfigurationError, match="VLLM_API_KEY is, too"):
        load(env | {"VLLM_API_KEY": "other"}, NO_FILE)


def test_an_open_address_is_refused_with_the_two_lines_that_fix_it() -> None:
    with pytest.raises(ConfigurationError) as caught:
        load({"API_HOST": "0.0.0.0", "GLM_STATE_DIR": "/state"}, NO_FILE)
    lines = caught.value.findings[0].fix.splitlines()[1:]
    assert [line.strip() for line in lines] == [
        "./start.sh key", "VLLM_API_KEY_FILE=/state/api-key",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("GLM53_MODEL_PRESET", "its successor is PRESET"),
        ("GLM53_MAX_NUM_SEQS", "its successor is MAX_NUM_SEQS"),
        ("EXL3_FAT_GROUPED", "it has no successor"),
        ("NFS_SHARE", "its successor is SHARED_WEIGHTS"),
    ],
)
def test_keys_of_other_launchers_are_answered(tmp_path: Path, key: str, said: str) -> None:
    file = tmp_path / ".env"
    file.write_text(f"{key}=1\n")
    (warning,) = load({}, file).warnings
    assert f"line 1: {key} is not read here; {said}" in warning
    if key.startswith(("GLM53_", "EXL3_")):
        assert load({key: "1"}, NO_FILE).warnings[0].startswith(f"shell: {key}")


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
        "SPEC_METHOD": "none",
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
