"""Membership: decides which fleet engines serve. Pure.

Input: the records of the engines, the policy version, the driver's clock, results of actions.
Output: actions for the driver to carry out.

    IDLE -> Update -> UPDATING -> IDLE with the weights -> Admit -> ADMITTING -> SERVING
      ^                                                                            |
      +----------------------------- LEAVING <------------- Dismiss --------------+

Invariants:
- An engine is admitted only with the weights of the current version, received in this attempt. The
  version that it reports is never used: an earlier attempt may have trained other weights under the
  same number.
- Each engine has at most one action in progress, and is forgotten only when it has none.
- An engine is alive while its beat grows. Only the driver's clock is used.
- At most ``pulls_at_once`` engines read weights at a time, so that they do not starve the trainer's
  network.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from common.units import counted
from rlpost.engines.engine_phases import Phase, PhasedEngine
from rlpost.extensions.fleet.records import EngineRecord, EngineState, Orders

NEW_WEIGHTS = "new weights"
STEP_WAITS = "--min-engines is {}: the step waits"
DISMISS_AGAIN_S = 1.0
NO_ORDERS = Orders()


@dataclass(frozen=True, slots=True)
class FleetLimits:
    """Limits of the fleet.

    Attributes:
        lost_after_s: an engine whose beat did not grow for this time is lost.
        pulls_at_once: engines that read weights at the same time.
        max_failures: consecutive failures after which an incarnation is not tried again.
        retry_s: wait after the first failure; doubles with each further one.
        max_faults: requests that an engine may fail while it serves; then it is dismissed.
        pull_bytes_per_s: bound on the mean rate of all reads of weights; None without one.
    """

    lost_after_s: float = 30.0
    pulls_at_once: int = 4
    max_failures: int = 4
    retry_s: float = 5.0
    max_faults: int = 3
    pull_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Update:
    """Check the engine's secret, and bring it to ``version``; it stays paused."""

    record: EngineRecord
    version: int


@dataclass(frozen=True, slots=True)
class Admit:
    """Check the engine's version and let it generate; it gets requests afterwards."""

    record: EngineRecord
    version: int


@dataclass(frozen=True, slots=True)
class Dismiss:
    """Pause the engine and abort its requests, which resume elsewhere.

    No new requests have been sent to it since the ``step`` that returned this.
    ``answers``: whether the engine is expected to answer; False if it is lost or its server ended.
    """

    record: EngineRecord
    reason: str
    answers: bool


Action = Update | Admit | Dismiss


@dataclass(frozen=True, slots=True)
class EngineUsage:
    """Contribution of an engine: seconds in which it served, and these times its GPUs."""

    engine_s: float
    gpu_s: float


@dataclass(slots=True, kw_only=True)
class _Member(PhasedEngine):
    record: EngineRecord
    number: int
    """Grows in the order in which incarnations joined."""
    alive_at: float
    served_at: float = 0.0
    faults: int = 0
    """Requests that it failed since ``served_at``."""
    tried_at: float = -math.inf
    """Start of the last update; the engine that was updated longest ago is next."""
    failures: int = 0
    retry_at: float = 0.0
    problem: str = ""
    """The last failure, for the user."""
    is_sick: bool = False
    """A health check failed; true until the engine is dismissed."""


class Membership:
    """The engines of the fleet as the driver sees them.

    Call ``step`` at every poll and after every ``finished``.
    """

    def __init__(self, limits: FleetLimits, *, settings: str = "", waits: str = STEP_WAITS) -> None:
        """
        Args:
            settings: digest that an engine's server must have been started with.
            waits: for the user: what asks for engines, with ``{}`` for their number, and what waits
                while fewer serve.
        """
        self._limits = limits
        self._waits = waits
        self._settings = settings
        self._version: int | None = None
        self._orders = NO_ORDERS
        self._members: dict[str, _Member] = {}
        self._last_beats: dict[str, int] = {}
        self._num_joined = 0
        self._owners: dict[str, int] = {}
        """By address, the number of the member that joined with it last."""
        self._usage: dict[str, EngineUsage] = {}
        self._weight_bytes = 0
        self._reads_until = -math.inf
        """When the reads that have started would end at the rate of ``pull_bytes_per_s``."""

    # -- events ------------------------------------------------------------------------------------

    def set_version(self, version: int, *, num_bytes: int = 0) -> None:
        """Record that engines need the weights of ``version``, which have ``num_bytes`` bytes.

        ``step`` dismisses engines that serve with other weights.
        """
        self._version, self._weight_bytes = version, num_bytes

    def withdraw_version(self) -> None:
        """Record that no engine may serve: the next weights are about to be written."""
        self._version = None

    def step(
        self, records: Iterable[EngineRecord], now: float, orders: Orders = NO_ORDERS
    ) -> list[Action]:
        """Return the next actions, given the records in the engines' files.

        ``now``: seconds on the driver's monotonic clock.
        """
        self._orders = orders
        for record in records:
            self._absorb(record, now)
        actions: list[Action] = [*self._dismissals(now)]
        self._forget_those_gone(now)
        return [*actions, *self._updates(now), *self._admissions(now)]

    def end_action(self, action: Action, now: float, problem: str | None = None) -> None:
        """Record the end of an action; ``problem`` says why it failed."""
        member = self._members[action.record.engine]
        assert member.record.incarnation == action.record.incarnation, "a member in action changed"
        match action:
            case Update(version=version):
                self._end_update(member, version, now, problem)
            case Admit():
                self._end_admission(member, now, problem)
            case Dismiss(reason=reason):
                self._end_dismissal(member, reason, now, problem)

    def failed(self, engine: str, incarnation: str, problem: str) -> None:
        """Record that a serving engine failed a health check."""
        member = self._members.get(engine)
        if member is None or member.record.incarnation != incarnation:
            return
        if member.phase is Phase.SERVING:
            member.is_sick, member.problem = True, problem

    def request_failed(self, url: str) -> EngineRecord | None:
        """Record a failed request; return its engine if the engine's health must be checked now.

        None if the engine is about to be dismissed or does not serve.
        """
        member = next((one for one in self._members.values() if one.record.url == url), None)
        if member is None or member.phase is not Phase.SERVING or member.is_sick:
            return None
        member.faults += 1
        if member.faults < self._limits.max_faults:
            return member.record
        self.failed(
            member.record.engine, member.record.incarnation, f"{member.faults} requests failed"
        )
        return None

    # -- state -------------------------------------------------------------------------------------

    def serving(self) -> list[EngineRecord]:
        """Return the engines that may get requests."""
        return self._in_phase(Phase.SERVING)

    def serves_since(self, record: EngineRecord) -> float | None:
        """Return when an engine was admitted; None if this incarnation of it does not serve."""
        member = self._members.get(record.engine)
        if member is None or member.record.incarnation != record.incarnation:
            return None
        return member.served_at if member.phase is Phase.SERVING else None

    def in_use(self) -> tuple[str, ...]:
        """Return the incarnations that requests may be sent to."""
        used = (Phase.ADMITTING, Phase.SERVING, Phase.LEAVING)
        return tuple(
            member.record.incarnation for member in self._members.values() if member.phase in used
        )

    def phases(self) -> Mapping[str, Phase]:
        return {engine: member.phase for engine, member in self._members.items()}

    @property
    def is_settled(self) -> bool:
        """Whether no engine may generate with weights other than those of the current version."""
        return not any(
            member.phase in (Phase.ADMITTING, Phase.SERVING, Phase.LEAVING)
            and member.holds != self._version
            for member in self._members.values()
        )

    def shortage(self, needed: int, others: int = 0) -> str | None:
        """Return a message if fewer than ``needed`` engines serve; None if there are enough.

        ``others``: engines of the run's own job that serve.
        """
        number = len(self._in_phase(Phase.SERVING)) + others
        if number >= needed:
            return None
        counts = Counter(str(phase) for phase in self.phases().values() if phase != Phase.SERVING)
        rest = ", ".join(f"{count} {phase}" for phase, count in sorted(counts.items()))
        return (
            f"{counted(number, 'engine')} {'serves' if number == 1 else 'serve'}, but "
            f"{self._waits.format(needed)}; of the fleet: {rest or 'no further engine has joined'}"
        )

    def descriptions(self, now: float) -> dict[str, str]:
        """Return what the driver does with each engine, for the user."""
        return {engine: self._description(member, now) for engine, member in self._members.items()}

    def usage(self, now: float) -> dict[str, EngineUsage]:
        """Return what each engine has contributed so far; its name holds its job's id."""
        found = dict(self._usage)
        for member in self._members.values():
            if member.phase in (Phase.SERVING, Phase.LEAVING):
                _add(found, member, now)
        return found

    # -- decisions ---------------------------------------------------------------------------------

    def _absorb(self, record: EngineRecord, now: float) -> None:
        """Adopt a record if it is newer; a file system may return older ones again."""
        name = record.engine
        if record.beat <= self._last_beats.get(name, -1):
            return
        member = self._members.get(name)
        if member is not None and member.record.incarnation != record.incarnation:
            if member.phase is not Phase.IDLE:
                # The server that requests were sent to has ended. The record of its successor is
                # adopted when the action in progress, or the dismissal of the old one, is done.
                member.record = member.record.next(state=EngineState.GONE)
                return
            member = None
        self._last_beats[name] = record.beat
        if member is None:
            if record.state is EngineState.GONE:
                self._members.pop(name, None)
                return
            self._num_joined += 1
            member = self._members[name] = _Member(
                record=record, number=self._num_joined, alive_at=now
            )
        elif member.record.state is not EngineState.GONE:
            member.record, member.alive_at = record, now
        if (url := member.record.url) and member.number > self._owners.get(url, 0):
            self._owners[url] = member.number

    def _reason_to_leave(self, member: _Member, now: float) -> str | None:
        record = member.record
        if record.state is EngineState.GONE:
            return record.reason or "its server ended"
        if (silent_s := now - member.alive_at) > self._limits.lost_after_s:
            return f"lost: no sign of life for {silent_s:.0f} s"
        if record.state is EngineState.DRAINING:
            return record.reason or "draining"
        if self._orders.says_leave(record.engine):
            return "ordered to leave"
        if self._is_superseded(member):
            return "its port belongs to another engine now"
        return member.problem if member.is_sick else None

    def _answers(self, member: _Member, now: float) -> bool:
        is_alive = now - member.alive_at <= self._limits.lost_after_s
        is_there = member.record.state is not EngineState.GONE and not self._is_superseded(member)
        return is_alive and is_there and not member.is_sick

    def _dismissals(self, now: float) -> Iterable[Dismiss]:
        for member in self._sorted(Phase.SERVING):
            if now < member.retry_at:
                continue
            reason = self._reason_to_leave(member, now)
            if reason is None and member.holds != self._version:
                reason = NEW_WEIGHTS
            if reason is not None:
                member.change(Phase.LEAVING, member.holds)
                yield Dismiss(member.record, reason, self._answers(member, now))

    def remove_record(self, engine: str) -> None:
        """Forget the beat of an engine whose file is removed; a new file starts from zero."""
        self._last_beats.pop(engine, None)

    def _forget_those_gone(self, now: float) -> None:
        for name, member in list(self._members.items()):
            is_lost = now - member.alive_at > self._limits.lost_after_s
            is_gone = member.record.state is EngineState.GONE
            if member.phase is Phase.IDLE and (is_lost or is_gone):
                del self._members[name]
                if self._owners.get(member.record.url) == member.number:
                    del self._owners[member.record.url]

    def _updates(self, now: float) -> Iterable[Update]:
        free = self._limits.pulls_at_once - len(self._in_phase(Phase.UPDATING))
        in_use = self._addresses_in_use()
        in_turn = sorted(self._sorted(Phase.IDLE), key=lambda member: member.tried_at)
        for member in in_turn:
            if free <= 0 or self._version is None:
                return
            if member.holds != self._version and self._may_serve(member, now, in_use):
                if not self._may_read(now):
                    return
                member.change(Phase.UPDATING)
                member.tried_at = now
                free -= 1
                yield Update(member.record, self._version)

    def _may_read(self, now: float) -> bool:
        """Whether one more engine may read weights now; counts it if so."""
        rate = self._limits.pull_bytes_per_s
        if rate is None:
            return True
        if now < self._reads_until:
            return False
        # Steps are up to a second apart, so up to a second of unused time is credited.
        self._reads_until = max(self._reads_until, now - 1.0) + self._weight_bytes / rate
        return True

    def _admissions(self, now: float) -> Iterable[Admit]:
        in_use = self._addresses_in_use()
        for member in self._sorted(Phase.IDLE):
            if self._version is None:
                return
            if member.holds == self._version and self._may_serve(member, now, in_use):
                member.admit(self._version, Phase.ADMITTING)
                yield Admit(member.record, self._version)

    def _may_serve(self, member: _Member, now: float, in_use: Collection[str]) -> bool:
        """Whether an idle engine may be updated or admitted.

        ``in_use``: addresses that requests may still be sent to.
        """
        record = member.record
        return (
            record.state is EngineState.READY
            and record.settings == self._settings
            and member.failures < self._limits.max_failures
            and now >= member.retry_at
            and self._reason_to_leave(member, now) is None
            and member.record.url not in in_use
        )

    def _is_superseded(self, member: _Member) -> bool:
        """Whether an engine with the same address joined later: the server of this one has ended."""
        return self._owners.get(member.record.url, member.number) != member.number

    # -- ends of actions ---------------------------------------------------------------------------

    def _end_update(self, member: _Member, version: int, now: float, problem: str | None) -> None:
        is_current = version == self._version  # else they may have been removed while it read them
        member.change(Phase.IDLE, version if is_current and problem is None else None)
        if is_current and problem is not None:
            self._count_failure(member, now, problem)

    def _end_admission(self, member: _Member, now: float, problem: str | None) -> None:
        member.change(Phase.SERVING, member.holds)
        member.served_at, member.faults = now, 0
        if problem is not None:  # it may generate already, so it has to be dismissed
            member.is_sick, member.problem = True, problem

    def _end_dismissal(self, member: _Member, reason: str, now: float, problem: str | None) -> None:
        if problem is not None:  # requests may still reach it: ``step`` dismisses it again
            member.change(Phase.SERVING, member.holds)
            member.problem, member.retry_at = problem, now + DISMISS_AGAIN_S
            return
        _add(self._usage, member, now)
        member.change(Phase.IDLE)
        if member.is_sick:
            member.is_sick = False
            self._count_failure(member, now, member.problem)
        elif reason == NEW_WEIGHTS:  # it served to the end
            member.failures, member.problem = 0, ""

    def _count_failure(self, member: _Member, now: float, problem: str) -> None:
        member.retry_at = now + self._limits.retry_s * 2**member.failures
        member.failures += 1
        member.problem = problem

    # -- helpers -----------------------------------------------------------------------------------

    def _addresses_in_use(self) -> set[str]:
        return {
            member.record.url for member in self._members.values() if member.phase is not Phase.IDLE
        }

    def _in_phase(self, phase: Phase) -> list[EngineRecord]:
        return [member.record for member in self._sorted(phase)]

    def _sorted(self, phase: Phase) -> list[_Member]:
        found = [member for member in self._members.values() if member.phase is phase]
        return sorted(found, key=lambda member: member.record.engine)

    def _description(self, member: _Member, now: float) -> str:
        if member.phase is Phase.SERVING:
            return f"serves version {member.holds} for {now - member.served_at:.0f} s"
        if member.phase is not Phase.IDLE:
            return str(member.phase)
        if member.record.settings != self._settings and member.record.state is EngineState.READY:
            return "waits: its server has other settings"
        if member.failures >= self._limits.max_failures:
            return f"refused after {member.failures} failures: {member.problem}"
        if member.failures:
            return f"waits after {member.failures} failures: {member.problem}"
        reason = self._reason_to_leave(member, now)
        return reason or ("waits for weights" if member.record.url else "starts")


def _add(usage: dict[str, EngineUsage], member: _Member, now: float) -> None:
    """Add the time since the engine was admitted."""
    seconds = max(0.0, now - member.served_at)
    engine = member.record.engine
    before = usage.get(engine, EngineUsage(0.0, 0.0))
    usage[engine] = EngineUsage(
        before.engine_s + seconds, before.gpu_s + seconds * member.record.num_gpus
    )
