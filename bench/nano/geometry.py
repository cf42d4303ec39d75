"""Dimensions of the trained miniature: the entry `nano` of the tiny checkpoints' geometry file.

One file serves the random test checkpoints and the trained model, so that every consumer (loader
tests, engine tests, kernels' shape lists) sees the same constraints. The trained entry differs from
the random one where stored bytes matter more than coverage: two dense layers before the routed
ones, narrower MLA heads and a narrower drafter.
"""

from __future__ import annotations

import json
from functools import cache

from glm_exl3.ref.tiny.geometry import GEOMETRY_FILE, Geometry, TextGeometry, parse

__all__ = ["Geometry", "TextGeometry", "nano_geometry"]


@cache
def nano_geometry() -> Geometry:
    """The dimensions of the miniature and its drafter; the vision tower is the tiny one's."""
    document = json.loads(GEOMETRY_FILE.read_text(encoding="utf-8"))
    return parse({"vision": document["vision"], **document["nano"]})
