"""A launch over nodes: look, judge, plan, prepare. The `Backend` of `RUNTIME=containers`.

`survey`, `check` and `plan` change nothing on any node. `prepare` brings image and weights to all
of them and is the only part that does. What must stay true: what can refuse a launch is found by
`check`, all at once, before `prepare` begins; what `prepare` left is verified, never assumed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from glm_launch import checkpoint, drafting, edits
from glm_launch.errors import (
    ConfigurationError,
    Finding,
    LaunchError,
    LaunchFailedError,
    RefusedError,
    raise_if_any,
)
from glm_launch.nodes import assemble, images, lease, models, preflight, steps, supply, weights
from glm_launch.nodes.facts import NodeFacts
from glm_launch.nodes.manifest import Manifest
from glm_launch.nodes.memory_watch import MemoryWatch, watching
from glm_launch.nodes.models import Wanted
from glm_launch.nodes.preflight import Needs, Port, Report
from glm_launch.nodes.ray_cluster import ray_ports
from glm_launch.nodes.sites import Site, Survey, at_once, owner_name, path_mtu, sites_of, survey
from glm_launch.nodes.weights import Model, Policy, Source, Store
from glm_launch.plan import LaunchPlan, missing
from glm_launch.settings import Settings
from glm_launch.state import Good, StateStore
from glm_launch.ui import Ui


@dataclass
class Deployment:
    """One command's view of all nodes."""

    settings: Settings
    state: StateStore
    ui: Ui
    sites: list[Site] = field(init=False)
    models: list[Wanted] = field(init=False)
    weights: Store = field(init=False)
    _seen: Survey | None = None
    _leased: bool = False

    def __post_init__(self) -> None:
        self.sites = sites_of(self.settings)
        self.models = models.wanted(self.settings, os.environ.get("HF_ENDPOINT", ""))
        self.weights = models.store_of(self.settings)

    @property
    def image(self) -> str:
        """The name under which every node has the image."""
        return supply.local_name(supply.image_name(self.settings))

    def survey(self, *, again: bool = False) -> Survey:
        """What every node says about itself; asked once, unless `again`."""
        if self._seen is None or again:
            roots = [one.locate(self.weights)[1] for one in self.models]
            paths: list[list[str]] = [[str(root) for root in roots]]
            paths += [[self.root_on(root, None) for root in roots] for _ in self.sites[1:]]
            self._seen = survey(self.sites, paths, self.image)
        return self._seen

    def root_on(self, root: Path, facts: NodeFacts | None) -> str:
        """Where a root lies on a worker; without facts its home is written as `~`."""
        home = self.settings.WORKER_HOME or (facts.home if facts else "~")
        return models.root_on(root, home, shared=self.settings.SHARED_WEIGHTS)

    def require(self) -> None:
        """Raise `ConfigurationError` for settings without which there is no launch."""
        raise_if_any(ConfigurationError, missing(self.settings))
        drafting.require(self.settings, *[one.locate(self.weights)[0] for one in self.models])

    def check(self, *, held: bool = False, again: bool = False) -> Report:
        """Everything that would make the launch fail, from every node, at once.

        With `held`, a launch of ours runs: its ports, memory and GPUs do not count. With `again`,
        the nodes are asked once more.
        """
        looked = self.survey(again=again)
        findings = [*looked.missing, *models.check_names(self.models)]
        choices, wrong = looked.choices(self.settings)
        findings += wrong
        sizes, wrong = self._still_to_come(looked)
        findings += wrong
        needs = [self._needs(index, sizes.get(site.address, ()), facts)
                 for index, (site, facts) in enumerate(looked.known)]  # fmt: skip
        report = preflight.check(list(zip(looked.facts, needs, strict=True)))
        shipped = () if self.settings.SKIP_PULL else ("image-differs",)
        findings += [one for one in report.findings if one.code not in shipped]
        findings += path_mtu(looked, choices) if not findings else []
        findings += assemble.memory_findings(self.settings, looked, self._known_models())
        findings += assemble.nccl_findings(self.settings, looked)
        findings += [
            found for one in self.models if one.source.is_folder
            for found in checkpoint.check(one.key, Path(one.source.repo).expanduser())
        ]  # fmt: skip
        findings = [one for one in findings if not (held and one.code in preflight.HELD)]
        findings += [] if self._leased or looked.missing else lease.others(self.sites, owner_name())
        current = self.state.current()
        warnings = (
            *report.warnings,
            *assemble.hardware_warnings(self.settings, looked),
            *preflight.unknown_containers(
                looked.facts, owner_name(), current.generation if current else ""
            ),
        )
        return Report(tuple(findings), warnings)

    def _known_models(self) -> list[Manifest | None]:
        return [one.locate(self.weights)[2] for one in self.models]

    def _needs(self, index: int, writes: tuple[tuple[str, int], ...], facts: NodeFacts) -> Needs:
        settings = self.settings
        ports = []
        if not index:
            ports.append(Port("PORT", settings.API_HOST, settings.PORT))
            if len(self.sites) > 1:
                ports.append(Port("MASTER_PORT", "*", settings.MASTER_PORT))
                ports.append(Port("WATCH_PORT", settings.HEAD_IP, settings.WATCH_PORT))
        ports += [Port("RAY_PORT", "*", port) for port in ray_ports(settings, index == 0)]
        size = self._image_bytes()
        if facts.image(self.image) is None and size:
            writes = (*writes, (facts.docker.root, size))
        return Needs(
            gpus=settings.GPUS_PER_NODE if settings.DEVICE == "cuda" else 0,
            ports=tuple(ports), writes=writes, image=self.image, owner=owner_name(),
            receives=len(self.sites) > 1 and not (settings.SKIP_SYNC or settings.SHARED_WEIGHTS),
        )  # fmt: skip

    def _image_bytes(self) -> int:
        """The image's size where some node has it."""
        found = [facts.image(self.image) for facts in self.survey().facts]
        return max((image.bytes or 0 for image in found if image), default=0)

    def _still_to_come(
        self, looked: Survey
    ) -> tuple[dict[str, tuple[tuple[str, int], ...]], list[Finding]]:
        """Bytes of weights that each node lacks, by address; asks the hub once per revision."""
        sizes: dict[str, list[tuple[str, int]]] = {}
        findings: list[Finding] = []
        for one in self.models:
            if not one.source.is_folder and one.locate(self.weights)[2] is None:
                findings += self._fetch(one)
            folder, root, known = one.locate(self.weights)
            if known is None:
                continue
            left = partial(self._left, known, root, folder.relative_to(root))
            missing = at_once(left, looked.known)
            for (site, _), size in zip(looked.known, missing, strict=True):
                there = self.root_on(root, None) if site.ssh else str(root)
                sizes.setdefault(site.address, []).append((there, size))
        return {address: tuple(entries) for address, entries in sizes.items()}, findings

    def _left(self, known: Manifest, root: Path, inside: Path, pair: tuple[Site, NodeFacts]) -> int:
        """Bytes that one node lacks; 0 where it cannot tell."""
        site, facts = pair
        full = self.root_on(root, facts) if site.ssh else str(root)
        try:
            return models.pending(known, str(Path(full) / inside), site.shell)
        except OSError:
            return 0

    def _fetch(self, one: Wanted) -> Sequence[Finding]:
        if self.settings.SKIP_DOWNLOAD or models.check_names([one]):
            return ()
        try:
            weights.fetch_manifest(one.source, self.weights, self.ui.line)
        except LaunchError as error:
            return error.findings
        return ()

    def plan(self) -> LaunchPlan:
        """What would run where; raises `RefusedError` when a node does not say enough for that."""
        self.require()
        looked = self.survey()
        choices, wrong = looked.choices(self.settings)
        if looked.missing or any(not choice.nic for choice in choices if len(self.sites) > 1):
            raise RefusedError(*(self.check().findings or wrong))
        raise_if_any(RefusedError, models.check_names(self.models))
        homes = {"" if not index else site.address: facts
                 for index, (site, facts) in enumerate(looked.known)}  # fmt: skip
        mounts = {
            address: tuple(
                (self.root_on(root, facts) if address else str(root), models.INSIDE[one.key])
                for one in self.models
                for root in [one.locate(self.weights)[1]]
            )
            for address, facts in homes.items()
        }
        mounted = [one.mounted(self.weights) for one in self.models]
        made = assemble.plan(self.settings, looked, choices, mounted, mounts, self.image)
        settled = edits.settle(self.settings)
        folders = [
            [(self.root_on(here, facts) if index else str(here), inside)
             for here, inside in settled.folders]
            for index, (_, facts) in enumerate(looked.known)
        ]  # fmt: skip
        return edits.edited(made, settled, folders)

    def prepare(self) -> LaunchPlan:
        """Image and weights on every node, verified; the plan with their digests.

        Raises `RefusedError`: nothing was started yet. Missing files of weight edits are told
        before anything large moves.
        """
        edits.settle(self.settings)
        try:
            self._bring_image()
        except LaunchFailedError as error:
            raise RefusedError(*error.findings) from error
        self.ensure_weights()
        return self.plan()

    def _bring_image(self) -> None:
        looked = self.survey()
        head, workers = self.sites[0].shell, [site.shell for site in self.sites[1:]]
        wanted = supply.supply_of(self.settings)
        found = supply.obtain(
            wanted, head, looked.facts[0].arch, self.state.folder / "build.log", self.ui.line
        )
        if not wanted.skip_check and not self.state.image_passed(found.fingerprint):
            self.ui.line(f"checking {wanted.name}")
            supply.check(wanted, head)
            self.state.keep_passed(found.fingerprint)
        images.ensure(self.image, head, workers, self.ui.line, ship_allowed=not wanted.skip_pull)

    def ensure_weights(self, *, full: bool = False) -> list[Model]:
        """Download, copy and verify target and drafter; raises `RefusedError`."""
        policy = models.policy_of(self.settings, full=full)
        done: list[Model] = []
        for one in self.models:
            self.ui.line(f"verifying {one.source.repo}")
            model = weights.ensure(one.source, self.weights, policy, self.ui.line)
            raise_if_any(RefusedError, checkpoint.check(one.key, model.folder))
            drafting.require(self.settings, *[known.folder for known in (*done, model)])
            send = partial(self._send, model, policy)
            failed = [found for found in at_once(send, self.sites[1:]) if found]
            raise_if_any(RefusedError, [one for found in failed for one in found])
            done.append(model)
        self._ensure_edits(replace(policy, refresh=True))
        return done

    def _ensure_edits(self, policy: Policy) -> None:
        """The files of weight edits on every node; they are small, so they are hashed each time."""
        for folder, _ in edits.settle(self.settings).folders:
            model = weights.ensure(Source(str(folder)), self.weights, policy, self.ui.line)
            failed = at_once(partial(self._send, model, policy), self.sites[1:])
            raise_if_any(RefusedError, [one for found in failed for one in found])

    def _send(self, model: Model, policy: Policy, site: Site) -> Sequence[Finding]:
        """Copy a model to one worker; what kept it from being complete there."""
        facts = dict(zip((one.address for one, _ in self.survey().known), self.survey().facts,
                         strict=True))  # fmt: skip
        root = self.root_on(model.root, facts.get(site.address))
        try:
            weights.sync(model, site.shell, root, policy, address=site.address, say=self.ui.line)
        except LaunchError as error:
            return error.findings
        except OSError as error:
            return [_not_verified(site, str(error))]
        return ()

    @contextmanager
    def changing(self, verb: str, *, steal: bool = False) -> Iterator[None]:
        """The right to change something on every node."""
        with lease.held(self.sites, owner_name(), verb, steal=steal):
            self._leased = True
            try:
                yield
            finally:
                self._leased = False

    def steps(self, plan: LaunchPlan) -> list[steps.Step]:
        """Every command that `start` would run."""
        looked = self.survey()
        head = self.sites[0].shell
        found = steps.image_steps(supply.supply_of(self.settings), looked, images.docker_of(head))
        if not (self.settings.SKIP_SYNC or self.settings.SHARED_WEIGHTS):
            roots = [one.locate(self.weights)[1] for one in self.models]
            roots += [here for here, _ in edits.settle(self.settings).folders]
            for site, facts in looked.known[1:]:
                pairs = [(root, self.root_on(root, facts)) for root in roots]
                found += steps.weight_steps(pairs, site, facts)
        shells = [site.shell for site in self.sites]
        return found + steps.rank_steps(plan, shells, self.state.folder / "keys")

    def answered(self) -> None:
        """Remember image and preset of a launch that answered, and keep the image by a tag."""
        found = images.image_on(self.sites[0].shell, self.image)
        if found is None:
            return
        tag = f"{supply.BUILT}:good-{found.fingerprint}"
        before = {good.tag for good in self.state.goods()}
        name = supply.image_name(self.settings)
        self.state.keep_good(Good(name, found.fingerprint, tag, self.settings.PRESET, time.time()))
        gone = before - {good.tag for good in self.state.goods()}

        def label(site: Site) -> None:
            site.shell.run(["docker", "tag", self.image, tag])
            if gone:
                site.shell.run(["docker", "image", "rm", *sorted(gone)])

        at_once(label, self.sites)

    def configured(self) -> tuple[str, str]:
        """Fingerprint of the image that the settings name, empty when absent, and the preset."""
        found = images.image_on(self.sites[0].shell, self.image)
        return found.fingerprint if found else "", self.settings.PRESET

    @contextmanager
    def guarding(self) -> Iterator[MemoryWatch]:
        """Watch the memory of every node while weights are read."""
        looked = self.survey()
        floors = assemble.floors(self.settings, looked)
        shells = [(name, site.shell) for name, (site, _) in
                  zip(looked.names(), looked.known, strict=True)]  # fmt: skip
        with watching(shells, floors) as watch:
            yield watch


def _not_verified(site: Site, said: str) -> Finding:
    return Finding(
        "not-verified",
        f"{site.address}: the weights could not be verified: {said}",
        "an engine that loads other bytes fails late, or answers nonsense",
        "check that node, then start again",
    )
