"""Draw the provisioned dashboard's panels out of a Prometheus, where no Grafana is at hand.

    python tests/compose/draw_dashboard.py --prometheus http://127.0.0.1:9090 --minutes 30 \\
        --caption 'WHAT RAN' --out docs/images/dashboard.png

Reads compose/monitoring/grafana/dashboards/glm-exl3.json as Grafana does: panels at their grid
positions, each target's query over the range, legends filled in, units. A query without an answer
leaves its panel empty and says "no data", as Grafana does. The picture says that Grafana did not
draw it.
"""

from __future__ import annotations

import argparse
import json
import re
import time
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "compose" / "monitoring" / "grafana" / "dashboards" / "glm-exl3.json"
STEP_S = 5
RATE_INTERVAL = "20s"
SUFFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Line:
    """One graph: times in seconds since 1970, values as they come."""

    legend: str
    times: tuple[float, ...]
    values: tuple[float, ...]


def legend(template: str, labels: dict[str, str]) -> str:
    """Grafana's `{{label}}` filled in."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), template)


def lines_of(target: dict[str, Any], reply: dict[str, Any]) -> list[Line]:
    """The graphs of a target out of the reply to `query_range`; NaN are gaps."""
    found = []
    for series in reply["data"]["result"]:
        points = [(float(at), float(value)) for at, value in series["values"]]
        times, values = zip(*points, strict=True) if points else ((), ())
        found.append(Line(legend(target["legendFormat"], series["metric"]), times, values))
    return found


def shown(value: float, unit: str) -> str:
    """A value with its unit, as on an axis."""
    if unit == "percentunit":
        return f"{100 * value:g} %"
    for size, letter in SUFFIXES:
        if abs(value) >= size:
            return f"{value / size:g} {letter}{'B/s' if unit == 'Bps' else ''}"
    return f"{value:g}{ {'s': ' s', 'Bps': ' B/s'}.get(unit, '') }"


def ask(prometheus: str, query: str, begin: float, end: float) -> dict[str, Any]:
    fields = {"query": query.replace("$__rate_interval", RATE_INTERVAL), "start": begin,
              "end": end, "step": STEP_S}  # fmt: skip
    url = f"{prometheus}/api/v1/query_range?{urllib.parse.urlencode(fields)}"
    with urllib.request.urlopen(url, timeout=60) as reply:
        value: dict[str, Any] = json.load(reply)
    return value


def draw_panel(axes: Any, panel: dict[str, Any], lines: list[Line], begin: float) -> None:
    from matplotlib.ticker import FuncFormatter

    defaults = panel["fieldConfig"]["defaults"]
    for line in lines:
        minutes = [(at - begin) / 60 for at in line.times]
        axes.plot(minutes, line.values, linewidth=1.0, label=line.legend)
    if lines:
        axes.legend(fontsize=6, loc="upper left", framealpha=0.6)
    else:
        axes.text(0.5, 0.5, "no data", ha="center", va="center", transform=axes.transAxes)
    axes.set_title(panel["title"], fontsize=8, loc="left")
    axes.set_ylim(bottom=defaults["min"], top=defaults.get("max"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: shown(v, defaults["unit"])))
    axes.tick_params(labelsize=6)
    axes.grid(alpha=0.3)


def draw(found: dict[int, list[Line]], begin: float, minutes: float, caption: str) -> Any:
    """A figure with every panel of the dashboard at its place."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    panels = json.loads(DASHBOARD.read_text())["panels"]
    rows = 1 + max(panel["gridPos"]["y"] // panel["gridPos"]["h"] for panel in panels)
    figure, grid = pyplot.subplots(rows, 3, figsize=(13, 2.1 * rows), squeeze=False)
    for axes in grid.flat:
        axes.set_visible(False)
    for panel in panels:
        place = panel["gridPos"]
        axes = grid[place["y"] // place["h"]][place["x"] // place["w"]]
        axes.set_visible(True)
        axes.set_xlim(0, minutes)
        draw_panel(axes, panel, found[panel["id"]], begin)
    figure.suptitle(caption, fontsize=9)
    figure.supxlabel(
        "minutes; drawn by tests/compose/draw_dashboard.py, not by Grafana", fontsize=7
    )
    figure.tight_layout()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--end", type=float, default=time.time())
    parser.add_argument("--caption", required=True)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    begin = chosen.end - 60 * chosen.minutes
    found: dict[int, list[Line]] = {}
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        found[panel["id"]] = [
            line for target in panel["targets"]
            for line in lines_of(target, ask(chosen.prometheus, target["expr"], begin, chosen.end))
        ]  # fmt: skip
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    draw(found, begin, chosen.minutes, chosen.caption).savefig(chosen.out, dpi=110)
    empty = sorted(panel for panel, lines in found.items() if not lines)
    print(f"{chosen.out}: {len(found)} panels, without data: {empty}")


if __name__ == "__main__":
    main()
