"""Held-out panel and limits of the trained miniature, for the tests that serve it.

The panel is `tests/bench/nano_panel.json`, made by `nano.panel` from the packages named in the
miniature's model card; the limits are those of `nano.gate`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "bench" / "nano" / "model"
PANEL = json.loads((ROOT / "tests" / "bench" / "nano_panel.json").read_text())
GATE = json.loads((ROOT / "bench" / "nano" / "metrics.json").read_text())["gate"]


def engine(name: str, **more: Any) -> dict[str, Any]:
    """Engine arguments that serve the packed model `name` as text."""
    return {"model": str(MODEL / name), "limit_mm_per_prompt": {"image": 0, "video": 0}, **more}
