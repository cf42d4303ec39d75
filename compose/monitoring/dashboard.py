"""Writes the Grafana dashboard: `python3 compose/monitoring/dashboard.py`, from the table below.

A panel is a title, a unit and lines of (legend, query). `tests/compose/test_monitoring.py` proves
that the file is what this program writes and that every metric exists.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("grafana") / "dashboards" / "glm-exl3.json"
WIDTH, HEIGHT, COLUMNS = 8, 7, 3
RATE = "[$__rate_interval]"


@dataclass(frozen=True)
class Panel:
    """One graph; `unit` is Grafana's name of it."""

    title: str
    unit: str
    lines: tuple[tuple[str, str], ...]
    maximum: float | None = None


def quantiles(metric: str) -> tuple[tuple[str, str], ...]:
    """Median and 95th percentile of a histogram."""
    return tuple(
        (f"p{int(100 * q)}", f"histogram_quantile({q}, sum by (le) (rate({metric}_bucket{RATE})))")
        for q in (0.5, 0.95)
    )


def rate(metric: str) -> str:
    return f"rate({metric}{RATE})"


DRAFTS = "sum(rate(vllm:spec_decode_num_drafts_total" + RATE + "))"
ACCEPTED = "sum(rate(vllm:spec_decode_num_accepted_tokens_total" + RATE + "))"
RDMA = "node_infiniband_port_data"

PANELS = (
    Panel("Requests", "short", (
        ("running", "sum(vllm:num_requests_running)"),
        ("waiting", "sum(vllm:num_requests_waiting)"),
    )),
    Panel("KV cache in use", "percentunit", (("used", "max(vllm:kv_cache_usage_perc)"),), 1.0),
    Panel("Tokens per second", "short", (
        ("written", f"sum({rate('vllm:generation_tokens_total')})"),
        ("read", f"sum({rate('vllm:prompt_tokens_total')})"),
    )),
    Panel("Time to first token", "s", quantiles("vllm:time_to_first_token_seconds")),
    Panel("Time between tokens", "s", quantiles("vllm:inter_token_latency_seconds")),
    Panel("Waiting before the first step", "s", quantiles("vllm:request_queue_time_seconds")),
    Panel("Drafting: tokens per step", "short", (("accepted + 1", f"1 + {ACCEPTED} / {DRAFTS}"),)),
    Panel("Drafting: accepted by position", "percentunit", (
        ("position {{position}}",
         "sum by (position) (rate(vllm:spec_decode_num_accepted_tokens_per_pos_total" + RATE
         + f")) / scalar({DRAFTS})"),
    ), 1.0),
    Panel("Steps per second", "short", (
        ("steps", f"sum({rate('vllm:iteration_tokens_total_count')})"),
    )),
    Panel("Prefix cache hits", "percentunit", (
        ("hits", f"sum({rate('vllm:prefix_cache_hits_total')}) / "
                 f"sum({rate('vllm:prefix_cache_queries_total')})"),
    ), 1.0),
    Panel("Restarts by the supervisor", "short", (
        ("restarts", "glm_exl3_restarts_total"), ("watching", "glm_exl3_watching"),
    )),
    Panel("Memory available", "bytes", (("{{instance}}", "node_memory_MemAvailable_bytes"),)),
    Panel("Memory pressure", "percentunit", (
        ("{{instance}}", rate("node_pressure_memory_stalled_seconds_total")),
    )),
    Panel("RDMA traffic", "Bps", (
        ("{{instance}} {{device}} in", rate(f"{RDMA}_received_bytes_total")),
        ("{{instance}} {{device}} out", rate(f"{RDMA}_transmitted_bytes_total")),
    )),
    Panel("Socket traffic", "Bps", (
        ("{{instance}} {{device}} in", rate('node_network_receive_bytes_total{device!="lo"}')),
        ("{{instance}} {{device}} out", rate('node_network_transmit_bytes_total{device!="lo"}')),
    )),
    Panel("Fabric errors", "short", (
        ("{{instance}} {{device}} link down", "node_infiniband_link_downed_total"),
        ("{{instance}} {{device}} symbols", "node_infiniband_symbol_error_total"),
        ("{{instance}} {{device}} discards", "node_infiniband_port_discards_transmitted_total"),
        ("{{instance}} {{device}} carrier changes",
         'node_network_carrier_changes_total{device!="lo"}'),
    )),
)  # fmt: skip


def render() -> dict[str, Any]:
    """The dashboard as Grafana reads it."""
    return {
        "uid": "glm-exl3", "title": "glm-exl3", "schemaVersion": 39, "version": 1,
        "refresh": "5s", "time": {"from": "now-30m", "to": "now"}, "timezone": "browser",
        "panels": [panel_json(number, panel) for number, panel in enumerate(PANELS)],
    }  # fmt: skip


def panel_json(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number, COLUMNS)
    defaults = {"unit": panel.unit, "min": 0} | ({"max": panel.maximum} if panel.maximum else {})
    return {
        "id": number + 1, "type": "timeseries", "title": panel.title,
        "datasource": {"type": "prometheus", "uid": "prometheus"},
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": query, "legendFormat": legend}
            for index, (legend, query) in enumerate(panel.lines)
        ],
    }  # fmt: skip


def text() -> str:
    return json.dumps(render(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
