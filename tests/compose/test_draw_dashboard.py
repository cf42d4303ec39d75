"""The picture of the dashboard: every panel, every query, its unit, and gaps that are said."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import draw_dashboard as drawing

REPLY = {"data": {"result": [
    {"metric": {"instance": "a", "device": "x"}, "values": [[10, "1"], [15, "NaN"], [20, "3"]]},
    {"metric": {}, "values": []},
]}}  # fmt: skip


def test_lines_have_grafanas_legends_and_gaps() -> None:
    first, empty = drawing.lines_of({"legendFormat": "{{instance}} {{device}} in"}, REPLY)
    assert first.legend == "a x in" and first.times == (10, 15, 20)
    assert first.values[0] == 1 and first.values[1] != first.values[1]
    assert empty == drawing.Line("  in", (), ())


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(0.5, "percentunit", "50 %"), (2.5e9, "bytes", "2.5 G"), (1500, "Bps", "1.5 kB/s"),
     (0.2, "s", "0.2 s"), (12, "short", "12"), (0, "Bps", "0 B/s")],
)  # fmt: skip
def test_units(value, unit, text) -> None:
    assert drawing.shown(value, unit) == text


def test_every_panel_is_drawn_at_its_place_and_an_empty_one_says_so() -> None:
    panels = json.loads(drawing.DASHBOARD.read_text())["panels"]
    line = drawing.Line("running", (0.0, 60.0), (1.0, 2.0))
    found = {panel["id"]: [] for panel in panels} | {panels[0]["id"]: [line]}
    figure = drawing.draw(found, 0.0, 2.0, "what ran")
    axes = [one for one in figure.axes if one.get_visible()]
    assert [one.get_title(loc="left") for one in axes] == [panel["title"] for panel in panels]
    assert axes[0].lines and not axes[1].lines
    assert axes[1].texts[0].get_text() == "no data" and not axes[0].texts
    assert "not by Grafana" in figure._supxlabel.get_text()
