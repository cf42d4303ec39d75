"""Fetching a donor: exactly its bytes, hardly more than needed, resumed wherever it was killed."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from ablit_hub import COMMIT, HEADS, HIDDEN, REPO, Hub, config, make_donor, serving
from glm_ablit import fetch as fetching
from glm_ablit.fetch import fetch, verify
from glm_ablit.recipe import geometry_of
from glm_ablit.remote import Remote
from glm_exl3.format.donor import RECORD, Donor, EditError, read_tensor

WANTED = (2, 3, 4, 5, 6)
NEEDED = len(WANTED) * 2 * HIDDEN * HEADS


@pytest.fixture(scope="module")
def donor(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    folder = tmp_path_factory.mktemp("donor")
    return folder, make_donor(folder)


@pytest.fixture
def hub(donor: tuple[Path, dict[str, np.ndarray]]) -> Iterator[Hub]:
    with serving(donor[0]) as server:
        yield server


def remote(hub: Hub, **changed: object) -> Remote:
    return replace(Remote(REPO, COMMIT, hub.endpoint, wait_s=0.01), **changed)


def assert_equal(folder: Path, wanted: dict[str, np.ndarray], layers: tuple[int, ...]) -> None:
    record = verify(folder)
    assert record.layers == layers
    for tensor in record.tensors:
        assert read_tensor(folder, tensor) == wanted[tensor.name].tobytes()
        with safe_open(folder / tensor.stored, "np") as file:
            assert list(file.keys()) == [tensor.name]
    left = {path.name for path in folder.iterdir()} - {tensor.stored for tensor in record.tensors}
    assert left == {RECORD, ".lock"}


@pytest.mark.parametrize("storage", [True, False], ids=["redirected", "direct"])
def test_only_the_wanted_bytes_travel(hub: Hub, donor, tmp_path: Path, storage: bool) -> None:
    hub.storage = storage
    seen: list[tuple[int, int]] = []
    done = fetch(remote(hub), tmp_path, WANTED, progress=lambda *at: seen.append(at))
    assert_equal(tmp_path, donor[1], WANTED)
    assert done.needed == NEEDED
    assert done.moved == hub.sent
    assert hub.sent / NEEDED <= 1.02
    assert seen[-1] == (NEEDED, NEEDED)
    assert [at for at, _ in seen] == sorted(at for at, _ in seen)


def test_what_is_there_is_not_asked_for_again(hub: Hub, donor, tmp_path: Path) -> None:
    fetch(remote(hub), tmp_path, (3, 4))
    before = hub.sent
    again = fetch(remote(hub), tmp_path, (3, 4))
    assert (again.moved, again.needed, hub.sent) == (0, 0, before)
    more = fetch(remote(hub), tmp_path, (3, 4, 5))
    assert more.needed == 2 * HIDDEN * HEADS
    assert_equal(tmp_path, donor[1], (3, 4, 5))


def forked(hub: Hub, folder: Path) -> int:
    """A child process that fetches; its id."""
    child = os.fork()
    if not child:
        try:
            fetch(remote(hub), folder, WANTED, sync_bytes=1 << 16)
        finally:
            os._exit(0)
    return child


def test_killed_at_ten_random_points_it_resumes(hub: Hub, donor, tmp_path: Path) -> None:
    points, kept = random.Random(11), []
    hub.slow_s = 0.001
    for _ in range(10):
        target = hub.sent + points.randrange(NEEDED // 100, NEEDED // 12)
        child = forked(hub, tmp_path)
        while hub.sent < target:
            time.sleep(0.001)
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "it ended before it could be killed"
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if record := Donor.load(tmp_path):
            kept.append(fetching.progress_of(tmp_path, record))
            for tensor in record.tensors:
                if (tmp_path / tensor.stored).exists():
                    assert read_tensor(tmp_path, tensor) == donor[1][tensor.name].tobytes()
    hub.slow_s = 0.0
    done = fetch(remote(hub), tmp_path, WANTED)
    assert_equal(tmp_path, donor[1], WANTED)
    assert kept == sorted(kept), "something that had arrived was lost"
    assert done.needed == NEEDED - kept[-1] < NEEDED


def test_cut_connections_and_busy_servers_are_tried_again(hub: Hub, donor, tmp_path: Path) -> None:
    hub.cut_after = [100_000, 5_000, 300_000, 7]
    hub.status = [503, 429]
    done = fetch(remote(hub), tmp_path, WANTED)
    assert_equal(tmp_path, donor[1], WANTED)
    assert done.moved / NEEDED <= 1.02


def test_a_server_that_stays_broken_is_told_and_what_arrived_is_kept(
    hub: Hub, tmp_path: Path
) -> None:
    hub.cut_after = [50_000] * 99
    with pytest.raises(EditError, match="what arrived is kept") as caught:
        fetch(remote(hub, attempts=3), tmp_path, (3,))
    assert "./start.sh ablit fetch" in caught.value.fix
    state = json.loads((tmp_path / "layer-3.state.json").read_text())
    assert state["done"] == 150_000


@pytest.mark.parametrize("spoil", ["flip", "truncate", "state"])
def test_a_spoiled_part_is_begun_anew(hub: Hub, donor, tmp_path: Path, spoil: str) -> None:
    hub.cut_after = [200_000] * 2
    with pytest.raises(EditError):
        fetch(remote(hub, attempts=2), tmp_path, (3,))
    part, state = tmp_path / "layer-3.part", tmp_path / "layer-3.state.json"
    if spoil == "state":
        state.write_text("{")
    elif spoil == "truncate":
        part.write_bytes(part.read_bytes()[:5000])
    else:
        data = bytearray(part.read_bytes())
        data[-77] ^= 1
        part.write_bytes(data)
    fetch(remote(hub), tmp_path, (3,))
    assert_equal(tmp_path, donor[1], (3,))


def test_a_spoiled_tensor_is_refused_and_fetched_again(hub: Hub, donor, tmp_path: Path) -> None:
    fetch(remote(hub), tmp_path, (3, 4))
    path = tmp_path / "layer-4.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 128
    path.write_bytes(data)
    with pytest.raises(EditError, match="recorded hash"):
        verify(tmp_path)
    fetch(remote(hub), tmp_path, (3, 4))
    assert_equal(tmp_path, donor[1], (3, 4))


@pytest.mark.parametrize("trouble", ["commit", "whole", "etag", "denied"])
def test_bytes_without_a_proven_origin_are_refused(hub: Hub, tmp_path: Path, trouble: str) -> None:
    if trouble == "etag":
        hub.cut_after = [1_000] * 9
        with pytest.raises(EditError, match="stays|kept"):
            fetch(remote(hub, attempts=2), tmp_path, (3,))
        hub.cut_after, hub.salt = [], "x"
    elif trouble == "denied":
        hub.status = [403]
    else:
        setattr(hub, trouble, "0" * 40 if trouble == "commit" else True)
    before = hub.sent
    with pytest.raises(EditError) as caught:
        fetch(remote(hub), tmp_path, (3,))
    said = {"commit": "commit 0000", "whole": "HTTP 200", "etag": "entity tag", "denied": "403"}
    assert said[trouble] in caught.value.seen
    assert not list(tmp_path.glob("*.safetensors"))
    assert hub.sent - before < NEEDED


def test_a_missing_repository_or_revision_is_told(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(EditError, match="no such file, revision or repository"):
        fetch(remote(hub, revision="f" * 40), tmp_path, (3,))


def target(**changed: object) -> dict[str, object]:
    return {**geometry_of(config()), **changed}


@pytest.mark.parametrize(
    "changed",
    [{"hidden_size": 4096}, {"num_hidden_layers": 45}, {"layer_types": ["linear_attention"] * 6}],
    ids=lambda changed: next(iter(changed)),
)
def test_a_donor_of_another_model_is_refused(hub: Hub, tmp_path: Path, changed: dict) -> None:
    with pytest.raises(EditError, match=next(iter(changed))):
        fetch(remote(hub), tmp_path, (3,), target(**changed))
    assert fetch(remote(hub), tmp_path, (3,), target()).donor.complete
    with pytest.raises(EditError, match=next(iter(changed))):
        fetch(remote(hub), tmp_path, (3,), target(**changed))


def test_a_layer_the_donor_lacks_is_told(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(EditError, match=r"no o_proj.weight in layer\(s\) 7-8"):
        fetch(remote(hub), tmp_path, (3, 7, 8))


def test_another_dtype_is_refused(tmp_path: Path) -> None:
    make_donor(tmp_path / "donor", dtype="F16")
    with serving(tmp_path / "donor") as hub, pytest.raises(EditError, match="is F16, not BF16"):
        fetch(remote(hub), tmp_path / "store", (3,))


def test_another_donor_never_goes_into_the_same_folder(hub: Hub, tmp_path: Path) -> None:
    fetch(remote(hub), tmp_path, (3,))
    with pytest.raises(EditError, match="holds donor/"):
        fetch(remote(hub, revision="f" * 40), tmp_path, (3,))


def test_one_process_at_a_time(hub: Hub, tmp_path: Path) -> None:
    with fetching._lock(tmp_path), pytest.raises(EditError, match="another process"):
        fetch(remote(hub), tmp_path, (3,))


def test_a_checkpoint_of_one_file_has_no_index(tmp_path: Path) -> None:
    wanted = make_donor(tmp_path / "donor", layers=2)
    (tmp_path / "donor" / "model.safetensors.index.json").unlink()
    (tmp_path / "donor" / "model-0.safetensors").rename(tmp_path / "donor" / "model.safetensors")
    with serving(tmp_path / "donor") as hub:
        fetch(remote(hub), tmp_path / "store", (1, 2))
    assert_equal(tmp_path / "store", wanted, (1, 2))


def test_an_incomplete_donor_is_told_with_the_command(tmp_path: Path) -> None:
    with pytest.raises(EditError) as caught:
        verify(tmp_path)
    assert caught.value.fix == "./start.sh ablit fetch"


def test_the_mtp_block_is_left_out_on_request(hub: Hub, donor, tmp_path: Path) -> None:
    fetch(remote(hub), tmp_path, (4, 5, 6), with_mtp=False)
    assert_equal(tmp_path, donor[1], (4, 5))
    before = hub.sent
    fetch(remote(hub), tmp_path, (4, 5, 6), with_mtp=False)
    assert hub.sent == before
