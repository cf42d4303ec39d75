"""What a request has to say to leave nothing in the prefix cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from glm_exl3.kvcache.storing import stores
from glm_exl3.patches import no_store


def request(extra: dict[str, Any] | None) -> Any:
    return SimpleNamespace(sampling_params=SimpleNamespace(extra_args=extra))


@pytest.mark.parametrize("value", [0, 0.0, "0", "false", "No", False])
def test_a_request_can_opt_out(value: object) -> None:
    assert not stores(request({"store_prefix": value}))


@pytest.mark.parametrize("extra", [None, {}, {"other": 0}, {"store_prefix": 1}])
def test_every_other_request_is_stored(extra: dict[str, Any] | None) -> None:
    assert stores(request(extra))


def test_a_pooling_request_is_stored() -> None:
    assert stores(SimpleNamespace(sampling_params=None))


def test_the_patch_leaves_out_the_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator

    seen: list[int] = []
    monkeypatch.setattr(
        KVCacheCoordinator, "cache_blocks", lambda self, request, count: seen.append(count)
    )
    no_store.apply()
    no_store.apply()
    KVCacheCoordinator.cache_blocks(None, request({"store_prefix": 0}), 3)
    KVCacheCoordinator.cache_blocks(None, request(None), 5)
    assert seen == [5]
