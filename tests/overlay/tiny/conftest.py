"""Both packed families, their twins and drafters, made once per session from seed 0."""

from __future__ import annotations

from pathlib import Path

import pytest

from glm_exl3.ref.tiny.build import build_drafter, build_target, build_twin
from glm_exl3.ref.tiny.recipe import Family

PACKED = (Family.TR3, Family.FULL)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`<family>`, `<family>-twin` (no MTP layer) and `<family>-drafter` (BF16)."""
    root = tmp_path_factory.mktemp("tiny")
    made: dict[str, Path] = {}
    for family in PACKED:
        name = family.value
        made |= {f"{name}{kind}": root / f"{name}{kind}" for kind in ("", "-twin", "-drafter")}
        build_target(made[name], family)
        build_twin(made[name], made[f"{name}-twin"], mtp=False)
        build_drafter(made[f"{name}-drafter"], family)
    return made
