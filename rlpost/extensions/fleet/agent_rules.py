"""Rules of the agent of one fleet engine: what it reports, and when it leaves. Pure.

Input: the lease, the user's orders, a stop request and the state of the server at each poll.
Output: the state to report, and what to do.

    STARTING -> READY -> DRAINING -> leave
        |         |                    ^
        +---------+--- server ended ---+

While the lease is not renewed the engine is paused and keeps its server: the run may be in the queue
after a preemption. The ledger shows when no further attempt will start. Only the agent's clock is
used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from common.exit_codes import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED
from rlpost.extensions.fleet.records import EngineState, Lease, LeaseState, Orders

COMES_BACK = "again"  # answer of slurm.supervise after which the run's job is requeued


@dataclass(frozen=True, slots=True)
class Patience:
    """Times in seconds.

    Attributes:
        lease_s: a lease that was not renewed for this time has no driver.
        driver_s: longest wait for a driver; the node is idle while it waits.
        drain_s: longest wait for the driver to dismiss the engine.
        margin_s: time reserved before the end of the job to stop the server.
    """

    lease_s: float = 45.0
    driver_s: float = 3600.0
    drain_s: float = 25.0
    margin_s: float = 3.0


class ServerState(Enum):
    """The state of the server's process."""

    STARTING = "starting"
    READY = "ready"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class AgentObservations:
    """The observations of the agent at a poll.

    Attributes:
        stop: why the job ends soon; empty if it does not.
        stop_in_s: seconds until then; None where unknown.
        server: the state of the server's process.
        end: how it ended, with the end of its log.
        run_end: why no further attempt will start (``end_of_run``); empty if one may.
    """

    lease: Lease | None
    orders: Orders
    stop: str = ""
    stop_in_s: float | None = None
    server: ServerState = ServerState.STARTING
    end: str = ""
    run_end: str = ""


@dataclass(frozen=True, slots=True)
class EngineVerdict:
    """The state to report, and the actions to take.

    Attributes:
        pause: abort requests and pause the server, because no driver reads the answers.
        restart: start the server again, with other settings.
        waits: there is no driver.
        exit_code: leave with this code; None stays.
    """

    state: EngineState
    reason: str = ""
    pause: bool = False
    restart: bool = False
    waits: bool = False
    exit_code: int | None = None


class AgentRules:
    """Decides at each poll. One instance for each start of the server."""

    def __init__(
        self, engine: str, incarnation: str, settings: str, patience: Patience, now: float
    ) -> None:
        """``settings``: digest of the settings that the server was started with."""
        self._engine = engine
        self._incarnation = incarnation
        self._settings = settings
        self._patience = patience
        self._renewed_at = now
        self._beat: tuple[str, int] | None = None
        self._is_paused = True  # a server starts paused
        self._draining_since: float | None = None

    def step(self, seen: AgentObservations, now: float) -> EngineVerdict:
        """Return what follows from ``seen``; ``now`` is monotonic."""
        has_driver = self._renewed(seen.lease, now)
        if seen.server is ServerState.ENDED:
            return EngineVerdict(EngineState.GONE, seen.end, exit_code=EXIT_FAILED)
        if seen.lease is not None and seen.lease.state is LeaseState.ENDED:
            return EngineVerdict(EngineState.GONE, "the run has ended", exit_code=EXIT_DONE)
        if seen.stop:
            return self._drain(seen, seen.stop, EXIT_PREEMPTED, has_driver, now)
        if seen.orders.says_leave(self._engine):
            return self._drain(seen, "ordered to leave", EXIT_DONE, has_driver, now)
        state = EngineState.READY if seen.server is ServerState.READY else EngineState.STARTING
        if not has_driver:
            return self._without_driver(state, seen, now)
        assert seen.lease is not None
        if seen.lease.settings not in ("", self._settings):
            return EngineVerdict(state, "the run has other settings now", restart=True)
        self._is_paused = False
        return EngineVerdict(state)

    def _renewed(self, lease: Lease | None, now: float) -> bool:
        """Record a new beat of the lease; return whether there is a driver."""
        beat = None if lease is None else (lease.attempt, lease.beat)
        is_first = self._beat is None
        if beat is not None and beat != self._beat:
            self._beat = beat
            # The lease found by the first poll may be that of a driver that has ended.
            if not is_first:
                self._renewed_at = now
                return True
        return self._beat is not None and now - self._renewed_at <= self._patience.lease_s

    def _without_driver(
        self, state: EngineState, seen: AgentObservations, now: float
    ) -> EngineVerdict:
        waited_s, lease = now - self._renewed_at, seen.lease
        driver = "the run's first start" if lease is None else f"a driver after {lease.attempt}"
        if seen.run_end:
            return EngineVerdict(EngineState.GONE, seen.run_end, exit_code=EXIT_DONE)
        if waited_s > self._patience.driver_s:
            reason = f"no driver for {waited_s:.0f} s"
            return EngineVerdict(EngineState.GONE, reason, exit_code=EXIT_DONE)
        must_pause = not self._is_paused and state is EngineState.READY
        self._is_paused = self._is_paused or must_pause
        reason = f"waits for {driver}, {waited_s:.0f} s so far"
        return EngineVerdict(state, reason, pause=must_pause, waits=True)

    def _drain(
        self, seen: AgentObservations, reason: str, code: int, has_driver: bool, now: float
    ) -> EngineVerdict:
        """Wait until the driver sends no more requests, at most until the job ends."""
        is_first = self._draining_since is None
        if self._draining_since is None:
            self._draining_since = now
        in_use = seen.lease is not None and self._incarnation in seen.lease.in_use
        is_late = now - self._draining_since > self._patience.drain_s
        is_late |= seen.stop_in_s is not None and seen.stop_in_s <= self._patience.margin_s
        if is_late or not has_driver or (not in_use and not is_first):
            return EngineVerdict(EngineState.GONE, reason, exit_code=code)
        return EngineVerdict(EngineState.DRAINING, reason)


def end_of_run(ledger: Sequence[Mapping[str, object]]) -> str:
    """Return, from a run's ledger, why no further attempt will start; empty if one may."""
    end = ""
    for entry in ledger:
        match entry.get("event"):
            case "submitted" | "attempt" | "started" | "chained":
                end = ""
            case "cancelled":
                end = "the run was cancelled"
            case "done":
                end = "the run has ended"
            case "verdict":
                reason = f"the run has ended: {entry.get('reason') or entry.get('verdict')}"
                end = "" if entry.get("answer") == COMES_BACK else reason
    return end
