"""Fleet sync: the fleet of one group of engines, and its part of a weight update.

Input: the run folder, the actors, the places of requests. Output: engines of the fleet that serve
their version, once it is in a folder that they read; lines of the ledger that account for their time.

    before: no engine of the fleet generates -> the run's own engines are updated -> written: the
    weights are in a folder -> publish

That is the policy's fleet. Engines of a group [engines.NAME] ``serve`` the weights of their model, or
those of a folder.

``in_background`` does the last two while the run's own engines already generate; ``wait_for_write`` waits
for them, because the weights must not change before. A run without a fleet only checks at each
update whether one has been created.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from common.bounded import cancel_all
from common.fleet_name import POLICY
from rlpost.config.engine_groups import group_config
from rlpost.config.tree import Config
from rlpost.driver.checkpoints import folder_bytes
from rlpost.driver.engines.joining import Export, JoiningEngines, JoinParts
from rlpost.driver.ledger_lines import RecordEvent, not_recorded
from rlpost.durable.daemon_threads import in_daemon
from rlpost.durable.run_files import LAST_S
from rlpost.engines.places import Place, Places
from rlpost.errors import (
    CheckpointError,
    ConfigError,
    Fenced,
    RlpostError,
    RolloutError,
    TrainerDied,
    WorkerFailed,
)
from rlpost.extensions.fleet.fleet_checks import engine_size_problem, quantised_problem
from rlpost.extensions.fleet.fleet_folder import FleetFolder, settings_digest
from rlpost.extensions.fleet.fleet_members import FleetMembers
from rlpost.extensions.fleet.fleet_servers import DEADLINES, Deadlines
from rlpost.extensions.fleet.fleet_table import FleetConfig
from rlpost.extensions.fleet.membership import STEP_WAITS, FleetLimits, Membership
from rlpost.extensions.fleet.records import EngineRecord, Lease

logger = logging.getLogger(__name__)

LIMITS = FleetLimits()
KEPT = 2  # folders of weights to keep: an engine may still read the previous one
ACCOUNT_S = 300.0  # between lines of the ledger
SAY_AGAIN_S = 30.0


@dataclass(frozen=True, slots=True)
class FleetRules:
    """The requirements of a run on its fleet.

    Attributes:
        concurrency: most requests in flight on one engine.
        is_wanted: whether the run's settings request a fleet; otherwise one is used if it exists.
        min_engines: engines below which a step waits, those of the run's own job included.
        wait_s: longest wait for them, in seconds.
        refusal: why this run cannot have a fleet; None if it can.
        load_adapters: whether engines load adapters beside the base.
        waits: see ``Membership``.
    """

    concurrency: int
    is_wanted: bool = False
    min_engines: int = 0
    wait_s: float = 3600.0
    refusal: str | None = None
    limits: FleetLimits = LIMITS
    deadlines: Deadlines = DEADLINES
    load_adapters: bool = False
    waits: str = STEP_WAITS


def fleet_rules(
    config: Config, hf: Mapping[str, object], group: str = POLICY, *, command: str = ""
) -> FleetRules:
    """Return the rules of the fleet of a group.

    Args:
        hf: the content of the policy's config.json.
        command: what starts engine jobs of the group.
    """
    settings, fleet = group_config(config, group), config.table(FleetConfig)
    sglang, rate, is_policy = settings.sglang, fleet.pull_gb_per_s, group == POLICY
    reads_weights = is_policy or config.engines.groups[group].follows_policy
    waits = f"[engines.{group}] needs {{}}: its requests wait, and {command} starts engine jobs"
    return FleetRules(
        concurrency=sglang.sglang_server_concurrency,
        is_wanted=not is_policy or bool(fleet.engines) or fleet.min_engines > config.num_engines,
        min_engines=fleet.min_engines if is_policy else 1,
        wait_s=fleet.engine_wait_s,
        load_adapters=settings.sends_adapters,
        refusal=(quantised_problem(hf) if reads_weights else None) or engine_size_problem(settings),
        waits=STEP_WAITS if is_policy else waits,
        limits=FleetLimits(
            lost_after_s=fleet.engine_lost_after_s,
            pulls_at_once=fleet.pulls_at_once,
            pull_bytes_per_s=None if rate is None else rate * 10**9,
        ),
        deadlines=Deadlines(
            update_s=60.0 * config.cluster.distributed_timeout_minutes,
            health_s=sglang.rollout_health_check_timeout,
            health_every_s=sglang.rollout_health_check_interval,
        ),
    )


class FleetSync(JoiningEngines):
    """Brings the weights of each update to the fleet. ``close`` last."""

    def __init__(
        self,
        folder: FleetFolder,
        lease: Lease,
        places: Places,
        *,
        rules: FleetRules,
        check: Callable[[], None],
        export: Export | None = None,
        record: RecordEvent = not_recorded,
    ) -> None:
        """
        Args:
            lease: with the attempt, the settings and the address of this driver.
            export: writes the weights of a version, as engines read them, to a folder; collective
                over the actors. None for a group that does not get each version.
            check: raises Fenced when another attempt owns the run.
        """
        self._folder, self._lease, self._places = folder, lease, places
        self._export, self._rules = export, rules
        self._check = check
        self._record = record if folder.group == POLICY else partial(record, group=folder.group)
        self._members: FleetMembers | None = None
        self._has_ended = False
        self._written: int | None = None
        self._num_bytes = 0
        self._writing: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._owed: int | None = None  # the version that is written in the background
        self._accounting: asyncio.Task[None] | None = None
        self._none_since: float | None = None
        self._said_at = -SAY_AGAIN_S
        self._is_refused = False

    async def serve(self, version: int, weights: Path | None = None) -> None:
        """See ``JoiningEngines``. Raises ConfigError, FleetError, Fenced, OSError."""
        await self.before()
        assert self._members is not None, "a group's fleet is wanted"
        await self._members.publish(version, weights)

    async def before(self) -> None:
        """Return when no engine of the fleet generates. Raises FleetError, Fenced."""
        await self.wait_for_write()
        if self._members is None:
            await self._start()
        if self._members is not None:
            await self._members.hold()

    async def write(self, version: int) -> None:
        """Write the weights of ``version`` for the fleet. Call while the actors hold them."""
        if self._members is None:
            return
        assert self._export is not None
        folder = self._version_folder(version)
        if version == self._written:
            return  # an update that is repeated after an engine died sends the same weights
        await in_daemon(lambda: shutil.rmtree(folder, ignore_errors=True))
        await self._export(str(folder), version)
        self._num_bytes = await in_daemon(lambda: folder_bytes(folder))
        self._written = version

    async def publish(self, version: int) -> None:
        """Let the fleet serve ``version``, whose weights are written."""
        if self._members is None:
            return
        folder = self._version_folder(version)
        await self._members.publish(version, folder, num_bytes=self._num_bytes)
        await in_daemon(self._remove_old)

    def in_background(self, version: int) -> None:
        """Write and publish ``version`` in a task; ``wait_for_write`` waits for the writing."""
        if self._members is None:
            return

        self._owed = version
        self._writing = asyncio.create_task(self._write(version))

    async def wait_for_write(self) -> None:
        """Return when no write is running in the background, so that the weights may change.

        Raises the error of the write; a storage error is raised only if the run depends on its
        fleet, and logged otherwise. If ranks died, TrainerDied is raised, and the next call writes
        the weights.
        """
        if self._owed is None:
            return
        try:
            await self._finish_writing(self._owed)
        except (OSError, CheckpointError) as error:
            if isinstance(error, Fenced) or self._rules.min_engines:
                raise
            logger.error("the fleet does not get the newest weights: %s", error)
        self._owed = None

    async def _finish_writing(self, version: int) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            self._closing.add(writing)
            writing.add_done_callback(self._closing.discard)
            try:
                await asyncio.shield(writing)
                return
            except (TrainerDied, WorkerFailed) as error:
                # The ranks may have been started again since; if not, the next lines find them dead.
                logger.warning("writing the weights for the fleet again: %s", error)
        await self._write(version)

    async def _write(self, version: int) -> None:
        await self.write(version)
        await self.publish(version)

    async def enough(self, others: int) -> None:
        """Return when --min-engines engines serve, ``others`` of them of the run's own job.

        Raises RolloutError after --engine-wait-s seconds.
        """
        rules = self._rules
        if rules.min_engines > others and self._members is not None:
            await self.wait_for_write()
            await self._members.enough(rules.min_engines, others, wait_s=rules.wait_s)

    def check_any(self, others: int) -> None:
        """Warn while no engine serves at all. Raises RolloutError after --engine-wait-s seconds.

        Call it repeatedly while answers are awaited.
        """
        message = None
        if self._rules.min_engines and self._members is not None:
            message = self._members.shortage(1, others)
        now = time.monotonic()
        if message is None:
            self._none_since = None
            return
        self._none_since = now if self._none_since is None else self._none_since
        waited_s = now - self._none_since
        if waited_s > self._rules.wait_s:
            raise RolloutError(f"{message}; {waited_s:.0f} s are over (--engine-wait-s)")
        if now - self._said_at >= SAY_AGAIN_S:
            self._said_at = now
            logger.warning("%s; answers wait for an engine, %.0f s so far", message, waited_s)

    def end(self) -> None:
        """Record that the run is done: ``close`` tells the engine jobs to leave."""
        self._has_ended = True

    async def close(self) -> None:
        """Stop; engine jobs wait for the next attempt, or leave after ``end``."""
        tasks = [task for task in (self._writing, self._accounting) if task is not None]
        await cancel_all([*tasks, *self._closing])
        if self._members is None:
            return
        self._account()
        try:
            async with asyncio.timeout(LAST_S):
                await self._members.close(has_ended=self._has_ended)
        except (OSError, RlpostError) as error:  # TimeoutError is an OSError
            why = error or "the storage hangs"
            logger.warning("the lease of the fleet could not be written: %s", why)

    async def _start(self) -> None:
        rules = self._rules
        if rules.refusal is not None:
            await self._refuse(rules.refusal)
            return
        if rules.is_wanted:
            await in_daemon(self._folder.create)
        elif not await in_daemon(self._folder.exists):
            return
        await in_daemon(self._remove_all)
        members = FleetMembers(
            self._folder,
            Membership(rules.limits, settings=self._lease.settings, waits=rules.waits),
            self._lease,
            changed=self._set_places,
            lost=self._places.give_up,
            check=self._check,
            deadlines=rules.deadlines,
            load_adapters=rules.load_adapters,
        )
        await members.start()
        self._members = members
        self._places.listen(members.request_failed)
        self._accounting = asyncio.create_task(self._keep_accounts())
        logger.info("engines of the fleet may join: %s", self._folder.root)

    async def _refuse(self, why: str) -> None:
        """Report once that engines cannot join. Raises ConfigError if the run waits for them."""
        if self._rules.is_wanted:
            raise ConfigError(f"the engines of the fleet cannot join: {why}")
        if not self._is_refused and await in_daemon(self._folder.exists):
            self._is_refused = True
            logger.error("the engines of the fleet cannot join: %s", why)

    async def _keep_accounts(self) -> None:
        while True:
            await asyncio.sleep(ACCOUNT_S)
            self._account()

    def _account(self) -> None:
        """Write what the engines got and used in this attempt into the ledger.

        ``allocated`` are GPU-seconds, ``used`` the seconds in which each engine served.
        """
        if self._members is None:
            return
        allocated = {engine: round(gpu_s, 1) for engine, gpu_s in self._members.allocated().items()}
        usage = self._members.usage()
        used = {engine: round(one.engine_s, 1) for engine, one in usage.items()}
        if not (allocated or used):
            return
        served = sum(one.gpu_s for one in usage.values())
        details: dict[str, object] = {"used": used, "served_gpu_s": round(served, 1)}
        self._record("fleet", attempt=self._lease.attempt, **details, allocated=allocated)

    def _set_places(self, serving: Sequence[EngineRecord]) -> None:
        assert self._members is not None
        key = self._members.secret
        if serving:
            self._none_since = None
        self._places.set_joined(
            [Place(one.url, key, self._rules.concurrency, is_own=False) for one in serving]
        )

    def _version_folder(self, version: int) -> Path:
        """The folder of a version in this attempt; other attempts may give its number to others."""
        return self._folder.weights / f"{self._lease.attempt}-{version:07d}"

    def _remove_old(self) -> None:
        for folder in sorted(self._folder.weights.glob(f"{self._lease.attempt}-*"))[:-KEPT]:
            shutil.rmtree(folder, ignore_errors=True)

    def _remove_all(self) -> None:
        for folder in self._folder.weights.glob("*"):
            shutil.rmtree(folder, ignore_errors=True)


def fleet_engines(config: Config, parts: JoinParts) -> FleetSync:
    """Return the fleet of a group in this attempt (``rlpost.driver.engines.joining``)."""
    folder = FleetFolder(Path(parts.cluster.attempt_dir).parents[1], parts.group)
    head, group_settings = parts.cluster.nodes[0], group_config(config, parts.group)
    settings = settings_digest(group_settings.model_dump(mode="json"))
    lease = Lease(
        parts.cluster.driver_name, beat=0, settings=settings, host=head.host, address=head.ip
    )
    return FleetSync(
        folder,
        lease,
        parts.places,
        rules=fleet_rules(config, parts.hf, parts.group, command=folder.command),
        check=parts.check,
        export=parts.export,
        record=parts.record,
    )
