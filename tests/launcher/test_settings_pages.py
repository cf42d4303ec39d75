"""`.env.example` and the reference page are what the fields say."""

from __future__ import annotations

from pathlib import Path

import pytest
from dotenv import dotenv_values

from glm_launch import settings_pages
from glm_launch.settings import Settings
from glm_launch.settings_load import load


@pytest.mark.parametrize("path", settings_pages.PAGES, ids=lambda path: path.name)
def test_the_committed_page_is_current(path: Path) -> None:
    assert path.read_text() == settings_pages.PAGES[path](), (
        "stale; run python -m glm_launch.settings_pages"
    )


def test_check_tells_a_stale_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    monkeypatch.setattr(settings_pages, "PAGES", {page: lambda: "text"})
    assert settings_pages.main(["--check"]) == 1
    assert settings_pages.main([]) == 0
    assert settings_pages.main(["--check"]) == 0


def test_the_example_loads_to_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    file.write_text(settings_pages.render_env_example())
    loaded = load({}, file)
    assert loaded.settings == load({}, tmp_path / "absent").settings
    assert not loaded.warnings


def test_the_example_with_every_line_active_loads_to_the_defaults(tmp_path: Path) -> None:
    lines = settings_pages.render_env_example().splitlines()
    active = [line.removeprefix("#") for line in lines if not line.startswith("# ")]
    file = tmp_path / ".env"
    file.write_text("\n".join(active))
    assert set(dotenv_values(file)) == set(Settings.model_fields)
    loaded = load({"HOME": str(tmp_path)}, file)
    assert loaded.settings == load({"HOME": str(tmp_path)}, tmp_path / "absent").settings
