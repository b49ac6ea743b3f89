"""Own membership: decides what happens to the engines of a group in the run's job. Pure.

Input: results of actions, health checks, lost nodes, the version of the policy. Output: the next
action for the driver to carry out (``next_action``), for several engines together: the weights go
to all engines in one collective call.

    DOWN -> Start -> IDLE -> SendWeights -> IDLE with the weights -> Admit -> SERVING
     ^                                                                          |
     +--------------------------------- Stop <-- a health check fails ----------+

The phases are those of ``rlpost.engines.engine_phases``.

Invariants:
- An engine is admitted only with the weights that this attempt sent to all engines last.
- Weights are sent only when no engine that gets them is down or has failed.
- An engine is restarted at most ``MAX_RESTARTS`` times between two calls of ``forget_restarts``: after
  a trained batch, or an evaluation if it only evaluates. What others cause does not count: a lost
  node, or a broadcast that a peer has left.
- At most ``MAX_ABANDONED`` broadcasts are abandoned in that time, however many engines there are.
- An engine that is lent gets neither requests nor weights of the policy. It serves the policy again
  with the current version, at once or after the next weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rlpost.engines.engine_phases import Phase, PhasedEngine

MAX_RESTARTS = 3
"""Restarts of one engine since the last ``forget_restarts``; another one would change nothing."""
MAX_ABANDONED = 2 * MAX_RESTARTS
"""Broadcasts since then that a peer has left: each restarts all engines, whichever it was."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the processes of engines that failed; their requests in flight are sent again elsewhere."""

    engines: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Start:
    """Start the processes of engines."""

    engines: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SendWeights:
    """Send the weights of ``version`` to all engines that are not lent.

    ``connect``: first connect the trainer with them: a process is new, or one is lent or is back.
    """

    version: int
    connect: bool


@dataclass(frozen=True, slots=True)
class Admit:
    """Let engines that have the weights get requests. ``restarted``: those with a new process."""

    engines: tuple[int, ...]
    restarted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Another restart would not help. ``problem``: the reason, if it is not one engine's restarts."""

    engine: int
    problem: str


Action = Stop | Start | SendWeights | Admit | GiveUp


@dataclass(slots=True)
class _Engine(PhasedEngine):
    is_new: bool = False
    """Its process has been restarted and has not been admitted yet."""
    has_failed: bool = False
    """It must be stopped."""
    is_lent: bool = False
    restarts: int = 0
    """Since the last ``forget_restarts``."""
    problem: str = ""


class OwnMembership:
    """The engines of a group in the run's job, by number; all serve at first."""

    def __init__(self, num_engines: int = 0) -> None:
        self._engines = [_Engine(Phase.SERVING) for _ in range(num_engines)]
        self._version = 0
        self._sent: int | None = None
        """The version of the last weights that all engines got; those that serve have it."""
        self._must_send = False
        self._connected = {*range(num_engines)}
        """The engines of the trainer's process groups."""
        self._abandoned = 0
        """Broadcasts since the last ``forget_restarts``."""

    # -- events ------------------------------------------------------------------------------------

    def set_version(self, version: int) -> None:
        """Record the version that the trainer has for the engines; a batch has been trained."""
        self._version = version
        self.forget_restarts()

    def forget_restarts(self) -> None:
        """Count the restarts of each engine and the abandoned broadcasts from 0 again."""
        self._abandoned = 0
        for engine in self._engines:
            engine.restarts = 0

    def request_weights(self, version: int) -> None:
        """Record that all engines need the weights of ``version``, even those that had them."""
        self._version, self._must_send = version, True

    def failed(self, engines: Iterable[int]) -> None:
        """Record that engines failed a health check: they have to be stopped."""
        for number in self._must_stop(engines):
            self._engines[number].restarts += 1

    def blocked(self, engines: Iterable[int]) -> None:
        """Record that engines are blocked in a broadcast that a peer has left: they have to be stopped."""
        self._abandoned += bool(self._must_stop(engines))

    def _must_stop(self, engines: Iterable[int]) -> list[int]:
        new = []
        for number in engines:
            engine = self._engines[number]
            if engine.phase is not Phase.DOWN and not engine.has_failed:
                engine.has_failed, engine.problem = True, ""
                new.append(number)
        return new

    def stopped(self, number: int) -> None:
        """Record that an engine gets no requests and its process is ended."""
        self.failed([number])
        self._go_down(number)

    def lost(self, engines: Iterable[int]) -> None:
        """Record that the nodes of engines are lost."""
        for number in engines:
            self._go_down(number)

    def _go_down(self, number: int) -> None:
        engine = self._engines[number]
        self._connected.discard(number)
        engine.change(Phase.DOWN)
        engine.is_new = engine.has_failed = engine.is_lent = False

    def started(self, number: int, problem: str | None = None) -> None:
        """Record the end of a start; ``problem``: its process ended by itself."""
        engine = self._engines[number]
        self._connected.discard(number)
        engine.change(Phase.IDLE)
        engine.is_new = True
        if problem is not None:
            self.failed([number])
            engine.problem = problem

    def connected(self) -> None:
        """Record that the trainer is connected with the engines that get its weights."""
        self._connected = {*self.receivers}

    def disconnected(self) -> None:
        """Record that the trainer is connected with no engine."""
        self._connected.clear()

    def sent(self, version: int) -> None:
        """Record that all engines that are not lent have the weights of ``version``."""
        self._sent, self._must_send = version, False
        for engine in self._engines:
            if not engine.is_lent:
                engine.holds = version

    def admitted(self, engines: Iterable[int]) -> None:
        """Record that engines get requests."""
        for number in engines:
            engine = self._engines[number]
            engine.admit(self._sent)
            engine.is_new = False

    def lend(self, most: int) -> list[int]:
        """Lend up to ``most`` engines, first those that lack weights, but not the last that serves."""
        behind = [
            number
            for number, engine in enumerate(self._engines)
            if engine.phase is Phase.IDLE and not engine.is_new and not engine.is_lent
        ]
        free = [*behind, *reversed(self.serving[1:])]
        chosen = [number for number in free if not self._engines[number].has_failed][:most]
        for number in chosen:
            engine = self._engines[number]
            engine.change(Phase.UPDATING)
            engine.is_lent = True
        return chosen

    def evaluates(self, engines: Iterable[int], version: int) -> None:
        """Record that lent engines have the weights of ``version``, and get requests for it."""
        for number in engines:
            engine = self._engines[number]
            if engine.is_lent:
                engine.change(Phase.IDLE, version)
                engine.admit(version)

    def give_back(self, engines: Iterable[int], version: int | None) -> None:
        """Record that engines are lent no more, and hold ``version``; None: it is unknown."""
        for number in engines:
            engine = self._engines[number]
            if engine.is_lent:
                engine.change(Phase.IDLE, version)
                engine.is_lent = False
                if version is not None and version == self._sent:
                    engine.admit(version)

    # -- state -------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The version that the engines got last, or get next before the first."""
        return self._version if self._sent is None else self._sent

    def __len__(self) -> int:
        return len(self._engines)

    @property
    def serving(self) -> list[int]:
        """The engines that get requests of the policy."""
        return self._where(lambda engine: engine.phase is Phase.SERVING and not engine.is_lent)

    @property
    def lent(self) -> list[int]:
        return self._where(lambda engine: engine.is_lent)

    @property
    def receivers(self) -> list[int]:
        """The engines that get the policy's weights."""
        return self._where(lambda engine: not engine.is_lent)

    @property
    def connections(self) -> list[int]:
        """The engines that take part in the trainer's broadcasts."""
        return sorted(self._connected)

    @property
    def down(self) -> list[int]:
        """The engines without a process."""
        return self._where(lambda engine: engine.phase is Phase.DOWN)

    @property
    def dismissed(self) -> set[int]:
        """The engines that were stopped or lost and are not admitted again yet."""
        return {*self._where(lambda engine: engine.phase is Phase.DOWN or engine.is_new)}

    @property
    def needs_repair(self) -> bool:
        """Whether to act before the next update of the weights.

        Not for engines that were lent and only lack weights, as long as others serve: they get them
        with the next update.
        """
        has_failed = self._where(lambda engine: engine.has_failed)
        none_serves = bool(self._engines) and not self.serving
        return bool(has_failed or self.dismissed or none_serves) and self.next_action() is not None

    @property
    def checked(self) -> list[int]:
        """The engines whose health is checked: those with a process that reads no other weights."""
        return self._where(lambda engine: engine.phase not in (Phase.DOWN, Phase.UPDATING))

    def _where(self, holds: Callable[[_Engine], bool]) -> list[int]:
        return [number for number, engine in enumerate(self._engines) if holds(engine)]

    # -- decisions ---------------------------------------------------------------------------------

    def next_action(self, *, may_start: bool = True) -> Action | None:
        """Return what to do next; None when there is nothing.

        ``may_start``: whether processes can start and get weights now.
        """
        failed = self._where(lambda engine: engine.has_failed)
        if may_start:
            for number in (*failed, *self.down):
                if self._abandoned > MAX_ABANDONED:
                    return GiveUp(number, _too_many_abandoned(self._abandoned))
                if self._engines[number].restarts > MAX_RESTARTS:
                    return GiveUp(number, self._engines[number].problem)
        if failed:
            return Stop(tuple(failed))
        if not may_start:
            return None
        if self.down:
            return Start(tuple(self.down))
        idle = self._where(lambda engine: engine.phase is Phase.IDLE)
        lacks = [number for number in idle if self._engines[number].holds != self._sent]
        if self._must_send or lacks:
            return SendWeights(self._version, connect=self._connected != {*self.receivers})
        if idle:
            return Admit(tuple(idle), tuple(one for one in idle if self._engines[one].is_new))
        return None


def _too_many_abandoned(number: int) -> str:
    return (
        f"{number} broadcasts of weights were abandoned since the last trained batch, or since the last "
        "evaluation of --eval-engines: each lost a peer. See the ends of engine-*-server.log in the "
        "attempt's folder; if engines are killed for memory, lower --sglang-mem-fraction-static"
    )
