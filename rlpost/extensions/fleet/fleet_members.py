"""Fleet members: carries out the decisions of ``rlpost.extensions.fleet.membership``, and renews the lease.

Input: the fleet's folder, versions of the weights and their folders. Output: the engines that hold
the current version and may get requests; the lease; messages and usage for the user.

One task polls the folder, in a thread because storage may hang, and asks ``rlpost.extensions.fleet.membership``
what to do. Each action runs in a separate task with a deadline (``fleet_servers``), so that an
engine that hangs delays no other. Another task checks the health of the engines that serve.

    hold -> (the trainer's own engines are updated, the weights written) -> publish
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock

from common.bounded import cancel_all, for_each
from rlpost.durable.daemon_threads import in_daemon
from rlpost.errors import Fenced, RlpostError, RolloutError
from rlpost.extensions.fleet.fleet_folder import FleetFolder
from rlpost.extensions.fleet.fleet_servers import DEADLINES, Deadlines, FleetServers
from rlpost.extensions.fleet.membership import (
    Action,
    Admit,
    Dismiss,
    EngineUsage,
    Membership,
    Update,
)
from rlpost.extensions.fleet.records import EngineRecord, Lease, LeaseState, Orders

logger = logging.getLogger(__name__)

POLL_S, LEASE_S = 1.0, 5.0
STEP_S = 0.01  # so that many actions that end together are followed by one decision
SAY_FIRST_S, SAY_AGAIN_S = 10.0, 30.0
RECORD_KEPT_S = 3600.0
"""The file of an engine is removed when its beat has not changed for this time."""


class FleetMembers:
    """The fleet of one attempt. Call ``start`` first, ``close`` last."""

    def __init__(
        self,
        folder: FleetFolder,
        membership: Membership,
        lease: Lease,
        *,
        changed: Callable[[Sequence[EngineRecord]], None] = lambda _: None,
        lost: Callable[[str], None] = lambda _: None,
        check: Callable[[], None] = lambda: None,
        deadlines: Deadlines = DEADLINES,
        poll_s: float = POLL_S,
        load_adapters: bool = False,
    ) -> None:
        """
        Args:
            lease: with the attempt, the settings and the address of this driver.
            changed: called with the engines that serve, after each change; requests go to these
                from then on, and to no other engine of the fleet.
            lost: called with the address of an engine whose requests in flight are not answered.
            check: called before each write of the lease; raises Fenced when another attempt owns
                the run.
            load_adapters: see ``FleetServers``.
        """
        self._folder, self._membership = folder, membership
        self._lease, self._changed, self._lost = lease, changed, lost
        self._deadlines, self._check = deadlines, check
        self._poll_s, self._load_adapters = poll_s, load_adapters
        self._weights: Path | None = None
        self._records: list[EngineRecord] = []
        self._orders = Orders()
        self._acting: set[asyncio.Task[None]] = set()
        self._notified = asyncio.Condition()
        self._must_step = asyncio.Event()
        self._running: list[asyncio.Task[None]] = []
        self._leased_at = -LEASE_S
        self._lease_lock, self._file_lock = asyncio.Lock(), Lock()
        self._leases_wanted = self._leases_written = self._beat_on_disk = 0
        self._seen: dict[str, tuple[int, float]] = {}
        """By engine, the newest beat in its file and when it was seen."""
        self._served: list[str] = []
        """Incarnations that ``changed`` was called with."""

    async def start(self) -> None:
        """Read the secret, write the first lease and begin to poll. Raises FleetError, OSError."""
        self._secret = await in_daemon(self._folder.secret)
        self._servers = FleetServers(
            self._secret, self._deadlines, load_adapters=self._load_adapters
        )
        await self._write_lease()
        begin = (self._poll(), self._follow(), self._check_health())
        self._running = [asyncio.create_task(one) for one in begin]

    async def hold(self) -> None:
        """Return when no engine of the fleet generates: the weights are about to change."""
        self._membership.withdraw_version()
        await self._step()
        async with self._notified:
            await self._notified.wait_for(lambda: self._membership.is_settled)

    async def publish(self, version: int, weights: Path | None, *, num_bytes: int = 0) -> None:
        """Let engines read the complete folder ``weights``, and serve with them afterwards.

        None: they serve with the weights of their model.
        """
        self._weights = weights
        self._lease = replace(self._lease, version=version, weights=str(weights or ""))
        self._membership.set_version(version, num_bytes=num_bytes)
        await self._step()
        await self._write_lease()

    async def enough(self, needed: int, others: int = 0, *, wait_s: float = 3600.0) -> None:
        """Return when at least ``needed`` engines serve, with ``others`` of the run's own job.

        Raises RolloutError after ``wait_s`` seconds.
        """
        began = time.monotonic()
        say_at = began + SAY_FIRST_S  # each update of the weights takes a moment
        while (message := self._membership.shortage(needed, others)) is not None:
            now = time.monotonic()
            if now - began >= wait_s:
                raise RolloutError(f"{message}; {wait_s:.0f} s are over (--engine-wait-s)")
            if now >= say_at:
                logger.warning("%s", message)
                say_at = now + SAY_AGAIN_S
            async with self._notified:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(say_at, began + wait_s) - now):
                        await self._notified.wait()

    def shortage(self, needed: int, others: int) -> str | None:
        """Return a message if fewer than ``needed`` engines serve; None if there are enough."""
        return self._membership.shortage(needed, others)

    def request_failed(self, url: str, problem: str) -> None:
        """Check the health of an engine at once after a failed request."""
        record = self._membership.request_failed(url)
        self._must_step.set()
        if record is not None:
            logger.warning("fleet engine %s: %s", record.engine, problem)
            self._begin(self._check_engine(record))

    def allocated(self) -> dict[str, float]:
        """Return the GPU-seconds that each engine's job has had, over all its starts."""
        return {one.engine: one.alive_s * one.num_gpus for one in self._records}

    def usage(self) -> dict[str, EngineUsage]:
        """Return what each engine has contributed in this attempt."""
        return self._membership.usage(time.monotonic())

    @property
    def secret(self) -> str:
        """The API key of the fleet's servers."""
        return self._secret

    async def close(self, *, has_ended: bool) -> None:
        """Stop polling. ``has_ended``: the run is done, and its engine jobs leave."""
        await cancel_all({*self._running, *self._acting})
        if has_ended:
            self._lease = replace(self._lease, state=LeaseState.ENDED)
        await self._write_lease()

    # -- polling -----------------------------------------------------------------------------------

    async def _poll(self) -> None:
        while True:
            try:
                self._records, self._orders = await in_daemon(self._read)
                await self._remove_old_files()
                await self._step()
                if time.monotonic() - self._leased_at >= LEASE_S:
                    await self._write_lease()
            except Fenced as error:  # the driver notices it too, and ends
                logger.warning("%s; the fleet is left to the other attempt", error)
                self._changed([])
                return
            except OSError as error:
                logger.warning("the files of the fleet cannot be used: %s", error)
            await asyncio.sleep(self._poll_s)

    async def _follow(self) -> None:
        """Decide again soon after actions have ended."""
        while True:
            await self._must_step.wait()
            await asyncio.sleep(STEP_S)
            await self._step()

    async def _check_health(self) -> None:
        while True:
            await asyncio.sleep(self._deadlines.health_every_s)
            await for_each(self._check_engine, self._membership.serving())

    async def _check_engine(self, record: EngineRecord) -> None:
        """Make a serving engine leave if it does not generate."""
        since = self._membership.serves_since(record)
        problem = await self._servers.check(record)
        # The result does not count if the engine was paused for new weights during the check.
        if problem is None or since is None or self._membership.serves_since(record) != since:
            return
        self._membership.failed(record.engine, record.incarnation, problem)
        self._must_step.set()

    def _read(self) -> tuple[list[EngineRecord], Orders]:
        return self._folder.engines(), self._folder.orders()

    async def _remove_old_files(self) -> None:
        """Remove files of engines that ended long ago; a requeued job writes its file again."""
        now, phases = time.monotonic(), self._membership.phases()
        old = []
        for record in self._records:
            beat, seen_at = self._seen.get(record.engine, (-1, now))
            if beat != record.beat:
                self._seen[record.engine] = (record.beat, now)
            elif now - seen_at > RECORD_KEPT_S and record.engine not in phases:
                old.append(record.engine)
        for engine in old:
            await in_daemon(lambda name=engine: self._folder.remove_engine(name))  # type: ignore[misc]
            self._membership.remove_record(engine)
            del self._seen[engine]
        if old:
            self._records = [one for one in self._records if one.engine not in old]

    async def _step(self) -> None:
        self._must_step.clear()
        actions = self._membership.step(self._records, time.monotonic(), self._orders)
        for action in actions:
            self._begin(self._carry_out(action))
        await self._notify()

    def _begin(self, acting: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(acting)
        self._acting.add(task)
        task.add_done_callback(self._acting.discard)

    async def _notify(self) -> None:
        serving = self._membership.serving()
        incarnations = [one.incarnation for one in serving]
        if incarnations != self._served:
            self._served = incarnations
            self._changed(serving)
        async with self._notified:
            self._notified.notify_all()

    async def _write_lease(self) -> None:
        """Return when a current lease is on disk; concurrent callers share a write.

        Raises OSError, Fenced.
        """
        self._leases_wanted += 1
        mine = self._leases_wanted
        async with self._lease_lock:
            if self._leases_written >= mine:
                return
            # One write serves all callers that wait for the lock by now.
            covered, now = self._leases_wanted, time.monotonic()
            self._lease = replace(
                self._lease,
                beat=self._lease.beat + 1,
                engines=self._membership.descriptions(now),
                in_use=self._membership.in_use(),
                time=time.time(),
            )
            lease = self._lease
            await in_daemon(lambda: self._write(lease))
            self._leases_written, self._leased_at = covered, now

    def _write(self, lease: Lease) -> None:
        """Write a lease unless a newer one is on disk, as threads outlive cancelled callers."""
        with self._file_lock:
            if lease.beat > self._beat_on_disk:
                self._check()
                self._folder.write_lease(lease)
                self._beat_on_disk = lease.beat

    # -- actions -----------------------------------------------------------------------------------

    async def _carry_out(self, action: Action) -> None:
        """Perform an action within its deadline and record its end."""
        problem: str | None = None
        try:
            await self._do(action)
        except TimeoutError:
            problem = f"{type(action).__name__.lower()}: no answer within the deadline"
        except (RlpostError, OSError) as error:
            problem = str(error) or type(error).__name__
        if problem is not None:
            logger.warning("fleet engine %s: %s", action.record.engine, problem)
        self._membership.end_action(action, time.monotonic(), problem)
        self._must_step.set()
        if isinstance(action, Dismiss):  # an agent that drains waits for it
            try:
                await self._write_lease()
            except (OSError, Fenced) as error:  # the next poll tries again, or ends
                logger.warning("the lease of the fleet could not be written: %s", error)

    async def _do(self, action: Action) -> None:
        match action:
            case Update(record=record, version=version):
                await self._servers.update(record, self._weights, version)
            case Admit(record=record, version=version):
                # The lease comes first: a draining agent waits while it names the server.
                await self._write_lease()
                await self._servers.admit(record, version)
            case Dismiss(record=record, reason=reason, answers=answers):
                # No new requests have been sent to it since the step that decided this.
                logger.info("fleet engine %s leaves: %s", record.engine, reason)
                if not (answers and await self._servers.stop(record)):
                    self._lost(record.url)
