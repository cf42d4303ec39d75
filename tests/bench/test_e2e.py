"""The end-to-end tools: kernel families, results files, and the committed results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "bench"))

from e2e import record  # noqa: E402
from e2e.families import KernelTime, by_family, family_of  # noqa: E402
from e2e.inside import busy_us  # noqa: E402

RESULTS = sorted((ROOT / "bench" / "expected").glob("*/e2e.json"))


@pytest.mark.parametrize(
    ("kernel", "family"),
    [
        ("void moe_gate_up<3, 2>(MoeArguments)", "experts"),
        ("void linear_few_tokens<4>(Arguments)", "packed linears"),
        ("mhc_fused_tilelang_kernel", "mHC"),
        ("_seam_kernel", "mHC"),
        ("fused_recurrent_kda_fwd_kernel", "KDA"),
        ("_inputs_kernel", "KDA"),
        ("_causal_conv1d_update_kernel", "KDA"),
        ("sm90_fp8_paged_mqa_logits", "indexer"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "dense GEMM"),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(vllm::RankData*)", "all-reduce"),
        ("void exl3::byte_rows_kernel<true, 1>(ByteRowsArguments)", "recoded linears"),
        ("void exl3::dense_rows_kernel<1, 16>(DenseRowsArguments)", "dense GEMM"),
        ("void exl3::mhc::mhc_seam_kernel<1>(SeamArguments)", "mHC"),
        ("something nobody knows", "other"),
    ],
)
def test_kernels_find_their_family(kernel: str, family: str) -> None:
    assert family_of(kernel) == family


def test_families_add_up_to_the_step() -> None:
    kernels = [KernelTime("moe_down", 10, 500.0), KernelTime("nobody", 20, 30.0)]
    assert by_family(kernels, 10) == {
        "experts": {"us": 50.0, "launches": 1.0},
        "other": {"us": 3.0, "launches": 2.0},
    }


def test_overlapping_kernels_count_once() -> None:
    assert busy_us([(10.0, 14.0), (0.0, 4.0), (2.0, 6.0), (3.0, 5.0)]) == 10.0
    assert busy_us([]) == 0.0


def test_a_result_becomes_rows_and_failures_do_not(tmp_path: Path) -> None:
    decode = {"kind": "decode", "requests": 1, "context": 8, "steps": 4, "step_ms": 5.0}
    prefill = {"kind": "prefill", "requests": 1, "context": 64, "tokens_per_s": 100.0}
    failed = {"kind": "prefill", "requests": 1, "context": 128, "error": "no memory"}
    result = {"rows": [decode | {"batch_tokens_per_s": 200.0}, prefill, failed]}
    (tmp_path / "r.json").write_text(json.dumps(result))
    out = tmp_path / "sub" / "e2e.json"
    arguments = [str(out), f"{tmp_path / 'r.json'}=a model", "--machine", "m", "--versions", "v=1"]
    record.main(arguments)
    record.main(arguments)
    rows = json.loads(out.read_text())["rows"]
    assert [row["metric"] for row in rows] == ["decode_step", "decode_rate", "prefill_rate"]
    assert rows[0]["value"] == 5.0


def test_drafts_stand_in_the_conditions_and_give_a_step_alone() -> None:
    decode = {"kind": "decode", "requests": 1, "context": 8, "steps": 4, "step_ms": 5.0}
    decode |= {"drafts": 7, "batch_tokens_per_s": 200.0}
    prefill = {"kind": "prefill", "requests": 1, "context": 64, "tokens_per_s": 9.0, "drafts": 7}
    rows = list(record.rows_of({"rows": [decode, prefill]}, "a model"))
    assert [row["metric"] for row in rows] == ["decode_step", "prefill_rate"]
    assert all("7 drafts a step" in row["conditions"] for row in rows)


def test_the_peer_becomes_rows_under_its_own_name() -> None:
    decode = {"kind": "decode", "requests": 4, "context": 8, "step_ms": 5.0}
    verify = {"kind": "verify", "requests": 1, "tokens": 8, "step_ms": 9.0}
    prefill = {"kind": "prefill", "context": 64, "seconds": 2.0, "tokens_per_s": 32.0}
    failed = {"kind": "decode", "requests": 16, "context": 8, "error": "no memory"}
    result = {"engine": "exllamav3 1.6.5", "rows": [decode, failed, verify, prefill]}
    rows = list(record.rows_of(result, "a model"))
    assert {row["engine"] for row in rows} == {"exllamav3"}
    assert {row["metric"]: row["value"] for row in rows} == {
        "decode_step": 5.0,
        "decode_rate": 800.0,
        "verify_step": 9.0,
        "prefill_rate": 32.0,
    }
    assert "8 tokens" in rows[2]["conditions"]
    with pytest.raises(ValueError, match="nobody"):
        list(record.rows_of(result | {"engine": "nobody 1.0"}, "a model"))


def test_requests_that_start_together_say_how_they_ended() -> None:
    together = {"kind": "together", "requests": 2, "context": 64, "tokens": 16, "seconds": 3.0}
    together |= {"finished": 2, "preemptions": 1}
    (row,) = record.rows_of({"rows": [together]}, "a model")
    assert (row["metric"], row["value"], row["unit"]) == ("together", 3.0, "s")
    assert row["conditions"].endswith("2 finished, 1 evicted")


def test_the_day_of_the_runs_can_be_told(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(json.dumps({"rows": []}))
    out = tmp_path / "e2e.json"
    arguments = [str(out), f"{tmp_path / 'r.json'}=a model", "--machine", "m", "--versions", "v=1"]
    record.main([*arguments, "--date", "2026-11-30"])
    assert json.loads(out.read_text())["date"] == "2026-11-30"


def test_requests_that_never_ran_together_are_left_out() -> None:
    decode = {"kind": "decode", "context": 8, "steps": 4, "step_ms": 5.0, "batch_tokens_per_s": 2.0}
    result = {"rows": [decode | {"requests": 1}, decode | {"requests": 16}]}
    assert len(list(record.rows_of(result, "a model"))) == 4
    kept = list(record.rows_of(result, "a model", [1, 2]))
    assert len(kept) == 2
    assert all("; 1 requests" in row["conditions"] for row in kept)


def test_a_server_becomes_rows_that_name_http() -> None:
    decode = {"requests": 2, "context": 8, "tokens": 64, "tokens_per_s": 400.0, "step_ms": 5.0}
    decode |= {"ttft_last_s": 0.5, "tokens_per_step": 1.0}
    prefill = {"context": 64, "ttft_s": 2.0, "tokens_per_s": 32.0}
    result = {"command": ["serve"], "ready_s": 90.0, "max_model_len": 1024}
    rows = list(record.rows_of(result | {"rows": [decode, prefill]}, "a model"))
    assert {row["metric"]: row["value"] for row in rows} == {
        "ready": 90.0,
        "max_model_len": 1024,
        "decode_step": 5.0,
        "decode_rate": 400.0,
        "first_token_of_all": 0.5,
        "prefill_rate": 32.0,
    }
    assert all("over HTTP" in row["conditions"] for row in rows[2:])
    never_ready = {"command": ["serve"], "rows": []}
    assert list(record.rows_of(never_ready, "a model")) == []
    unsaid = list(record.rows_of(result | {"rows": [], "max_model_len": None}, "a model"))
    assert [row["metric"] for row in unsaid] == ["ready"]


def test_old_rows_are_dropped_by_words_that_they_must_have() -> None:
    rows = [{"conditions": "kernels a; 1 requests"}, {"conditions": "kernels b; 1 requests"}]
    assert record.without(rows, ["kernels a; 1"]) == rows[1:]
    with pytest.raises(ValueError, match="no row has these words"):
        record.without(rows, ["kernels c"])


def test_committed_results_say_how_they_came_about() -> None:
    for path in RESULTS:
        document = json.loads(path.read_text())
        assert set(document) == {"machine", "date", "versions", "rows"}
        assert document["rows"]
        for row in document["rows"]:
            assert set(row) == {"metric", "engine", "value", "unit", "conditions"}
            assert row["engine"] in record.ENGINES
            assert row["value"] >= 0
            assert len(row["conditions"]) > 20


def test_a_server_that_ends_is_no_ready_server() -> None:
    from e2e import serve

    gone = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    gone.wait()
    with pytest.raises(RuntimeError, match="status 3"):
        serve.wait_ready("http://127.0.0.1:1/v1", gone, 5)
