"""The dashboard asks only for metrics that exist, and nothing of it listens beyond loopback."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from glm_launch.plan import LaunchPlan
from glm_launch.procs import Identity
from glm_launch.supervise import desk

ROOT = Path(__file__).parents[2]
COMPOSE = Path(sys.executable).parent / "docker-compose"
METRICS = Path(__file__).with_name("metrics")
LABELS = re.compile(r"\{[^}]*\}|\[[^\]]*\]|by \([^)]*\)")
WORDS = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
FUNCTIONS = {"sum", "rate", "max", "histogram_quantile", "scalar"}
NEEDED = {"KV", "Requests", "first token", "between tokens", "Drafting", "Restarts", "Memory",
          "RDMA", "errors"}  # fmt: skip


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


dashboard = load(ROOT / "compose" / "monitoring" / "dashboard.py")
record = load(Path(__file__).with_name("record_metrics.py"))


def recorded(name: str) -> dict[str, str]:
    lines = (METRICS / name).read_text().splitlines()[1:]
    return dict(line.split(" ") for line in lines)


def ours() -> dict[str, str]:
    plan = LaunchPlan("local", "m", "n", "none", "", "", 1, "", 1, (), (), 1, 1)
    saved = desk.Saved("watching", "g", plan, Identity(1, 1, ""), time.time())
    return dict(line.split(" ") for line in record.names(desk.metrics(saved)))


def queries() -> list[str]:
    return [query for panel in dashboard.PANELS for _, query in panel.lines]


def names(query: str) -> set[str]:
    return set(WORDS.findall(LABELS.sub(" ", query))) - FUNCTIONS


def test_the_file_is_what_the_program_writes() -> None:
    assert dashboard.FILE.read_text() == dashboard.text()


def test_every_metric_exists() -> None:
    known = recorded("vllm.txt") | recorded("node.txt") | ours()
    asked = set().union(*map(names, queries()))
    assert len(asked) > 20
    assert asked <= set(known), sorted(asked - set(known))


def test_counters_are_rated_and_gauges_are_not() -> None:
    known = recorded("vllm.txt") | recorded("node.txt") | ours()
    shown_whole = {"glm_exl3_restarts_total", "node_infiniband_link_downed_total",
                   "node_infiniband_symbol_error_total", "node_network_carrier_changes_total",
                   "node_infiniband_port_discards_transmitted_total"}  # fmt: skip
    for query in queries():
        for name in names(query) - shown_whole:
            counts = known[name] in ("counter", "histogram")
            assert counts == bool(re.search(rf"rate\({name}[{{\[]", query)), query


def test_what_was_recorded_is_of_the_pinned_version() -> None:
    head = (METRICS / "vllm.txt").read_text().splitlines()[0]
    lock = (ROOT / "config" / "locks" / "cpu.txt").read_text()
    pinned = re.search(r"^vllm==([\d.]+)", lock, re.MULTILINE)
    assert pinned and head.startswith(f"# vLLM {pinned[1]},")


def test_the_engine_counters_that_decide_about_restarts_exist() -> None:
    sys.path.insert(0, str(ROOT / "docker"))
    import canary
    from glm_launch.supervise import eyes

    known = recorded("vllm.txt")
    assert {*canary.COUNTERS.values(), eyes.RUNNING, eyes.STEPS} <= set(known)


def test_the_panels_show_what_an_operator_needs() -> None:
    titles = " ".join(panel.title for panel in dashboard.PANELS)
    assert all(word in titles for word in NEEDED)


def config(**env: str) -> dict:
    command = [COMPOSE, "--env-file", "/dev/null", "-f", "compose/monitoring.yaml", "config",
               "--format", "json"]  # fmt: skip
    env = {"PATH": "/usr/bin:/bin", "HOME": "/home/user"} | env
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_all_listen_on_loopback_unless_told() -> None:
    services = config()["services"]
    assert "--web.listen-address=127.0.0.1:9090" in services["prometheus"]["command"]
    assert services["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    assert "--web.listen-address=127.0.0.1:9100" in services["node"]["command"]
    told = config(GLM_EXPORTER_ADDRESS="10.0.0.2")["services"]["node"]["command"]
    assert "--web.listen-address=10.0.0.2:9100" in told
    for service in services.values():
        assert not service.get("privileged")
        assert all(
            mount.get("read_only") for mount in service["volumes"] if mount["type"] == "bind"
        )


@pytest.mark.parametrize(
    ("exporters", "targets"),
    [
        ("", ["127.0.0.1:9100"]),
        ("10.0.0.1:9100, 10.0.0.2:9100", ["10.0.0.1:9100", "10.0.0.2:9100"]),
    ],
)
def test_prometheus_scrapes_the_engine_and_all_nodes(exporters, targets) -> None:
    import yaml

    content = config(GLM_EXPORTERS=exporters)["configs"]["prometheus"]["content"]
    jobs = {job["job_name"]: job for job in yaml.safe_load(content)["scrape_configs"]}
    assert jobs["node"]["static_configs"] == [{"targets": targets}]
    assert jobs["vllm"]["static_configs"] == [{"targets": ["127.0.0.1:8888"]}]


def test_grafana_finds_what_is_mounted() -> None:
    import yaml

    folder = ROOT / "compose" / "monitoring" / "grafana"
    source = yaml.safe_load((folder / "datasources" / "prometheus.yaml").read_text())
    uids = {target["uid"] for panel in dashboard.render()["panels"]
            for target in [panel["datasource"]]}  # fmt: skip
    assert uids == {entry["uid"] for entry in source["datasources"]}
    provider = yaml.safe_load((folder / "dashboards" / "provider.yaml").read_text())
    mounted = {one["target"] for one in config()["services"]["grafana"]["configs"]}
    assert f"{provider['providers'][0]['options']['path']}/glm-exl3.json" in mounted
