"""Every preset and hardware file loads, and broken ones are refused."""

from __future__ import annotations

import pytest

from glm_launch.errors import ConfigurationError
from glm_launch.nodes import memory, presets

NAMES = ["cmp170hx-2x", "cpu-demo", "gb10-tp2", "gb10-tp4", "h200-1x", "h200-2x", "rtx6000-2x"]


def test_the_presets_that_the_documentation_names() -> None:
    assert presets.names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_number_has_a_source_and_every_setting_takes_it(name) -> None:
    found = presets.preset(name)
    assert set(found.sources) == set(found.settings)
    if found.hardware:
        assert presets.hardware(found.hardware).reserve.floor > 0


@pytest.mark.parametrize(("nodes", "ranks"), [(3, 1), (3, 2), (1, 3), (4, 2), (0, 1)])
def test_ranks_that_the_model_cannot_be_cut_into(nodes, ranks) -> None:
    with pytest.raises(ConfigurationError, match="use 1, 2, 4 ranks") as caught:
        presets.tensor_parallel(nodes, ranks)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("PORT: {value: 1}", "PORT has no source"),
        ("PROT: {value: 1, source: x}", "PROT is not a setting"),
        ("PORT: {value: 70000, source: x}", "less than or equal to 65535"),
    ],
)
def test_a_broken_preset_is_refused(tmp_path, settings, said) -> None:
    head = "name: x\nhardware: null\nnodes: 1\nranks_per_node: 1\nsettings:\n  "
    (tmp_path / "x.yaml").write_text(head + settings)
    with pytest.raises(ConfigurationError, match=said):
        presets.preset("x", tmp_path)


def test_an_unknown_preset_names_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match="gb10-tp2"):
        presets.preset("gb10")


def test_the_gb10_preset_fits_the_kit_that_it_is_for(kit) -> None:
    found = presets.preset("gb10-tp2")
    assert found.hardware
    reserve = presets.hardware(found.hardware).reserve
    cache = found.settings["KV_CACHE_MEMORY_BYTES"]
    need = memory.demand(164 * memory.GIB, 3 * memory.GIB, cache, ranks=2)
    for node, head in zip(kit("gb10-pair").nodes, (True, False), strict=True):
        assert memory.findings(memory.predict(node, need, reserve, head=head)) == []
