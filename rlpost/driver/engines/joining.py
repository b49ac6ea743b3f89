"""Engines in other jobs that join a run and leave it at any time.

Input: what a run has (``JoinParts``). Output: the engines of one group, the policy's or that of a
table [engines.NAME], as the driver uses them. An extension has them (``Extension.joining_engines``).

    policy:  before -> the run's own engines are updated -> write -> publish     (write: collective)
             or, while these already generate:   in_background -> wait_for_write
    others:  serve, once or for each snapshot

Invariants that an implementation keeps:
- ``places.set_joined`` names the engines that requests may be sent to. Each has the weights of the
  version that was published last; with ``before`` it generates no more.
- Requests of an engine that is lost are given up (``places.give_up``).
- An engine that fails never ends the run, unless the settings let steps wait for engines that join.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from common.cluster import Cluster
from common.fleet_name import POLICY
from rlpost.config import extensions
from rlpost.config.tree import Config
from rlpost.driver.ledger_lines import RecordEvent, not_recorded
from rlpost.engines.places import Places
from rlpost.errors import ConfigError

Export = Callable[[str, int], Awaitable[object]]
"""``export(folder, version)``"""


@dataclass(frozen=True, slots=True)
class JoinParts:
    """What the engines of a group get of a run.

    Attributes:
        places: where requests of the group go.
        hf: the policy's config.json.
        check: raises Fenced when another attempt owns the run.
        group: the name of the group.
        export: writes the weights of a version, as engines read them, to a folder; collective over
            the actors. None for a group that does not get each version.
    """

    cluster: Cluster
    places: Places
    hf: Mapping[str, object]
    check: Callable[[], None]
    group: str = POLICY
    export: Export | None = None
    record: RecordEvent = not_recorded


class JoiningEngines(ABC):
    """The engines of a group in other jobs. ``close`` last."""

    @abstractmethod
    async def serve(self, version: int, weights: Path | None = None) -> None:
        """Let engines serve ``version`` with the weights in a folder; None: those of their model.

        Raises ConfigError, Fenced, OSError.
        """

    @abstractmethod
    async def before(self) -> None:
        """Return when no engine that joined generates. Raises Fenced."""

    @abstractmethod
    async def write(self, version: int) -> None:
        """Write the weights of ``version`` for them. Call while the actors hold them."""

    @abstractmethod
    async def publish(self, version: int) -> None:
        """Let them serve ``version``, whose weights are written."""

    @abstractmethod
    def in_background(self, version: int) -> None:
        """Write and publish ``version`` in a task; ``wait_for_write`` waits for the writing."""

    @abstractmethod
    async def wait_for_write(self) -> None:
        """Return when no write is running in the background, so that the weights may change.

        Raises the error of the write if the run depends on these engines; TrainerDied if ranks
        died, and then the next call writes the weights.
        """

    @abstractmethod
    async def enough(self, others: int) -> None:
        """Return when enough engines serve, ``others`` of them of the run's own job.

        Raises RolloutError after the longest wait that the settings allow.
        """

    @abstractmethod
    def check_any(self, others: int) -> None:
        """Warn while no engine serves at all. Raises RolloutError after the longest wait.

        Call it repeatedly while answers are awaited.
        """

    @abstractmethod
    def end(self) -> None:
        """Record that the run is done: ``close`` tells the jobs to leave."""

    @abstractmethod
    async def close(self) -> None:
        """Stop; the jobs wait for the next attempt, or leave after ``end``."""


class NoEngines(JoiningEngines):
    """The engines of an installation without an extension for them: none joins."""

    async def serve(self, version: int, weights: Path | None = None) -> None:
        pass

    async def before(self) -> None:
        pass

    async def write(self, version: int) -> None:
        pass

    async def publish(self, version: int) -> None:
        pass

    def in_background(self, version: int) -> None:
        pass

    async def wait_for_write(self) -> None:
        pass

    async def enough(self, others: int) -> None:
        pass

    def check_any(self, others: int) -> None:
        pass

    def end(self) -> None:
        pass

    async def close(self) -> None:
        pass


def joining_engines(config: Config, parts: JoinParts) -> JoiningEngines:
    """Return the engines of a group that are in other jobs.

    Raises ConfigError without an extension for them, if the group has no others.
    """
    path = extensions.joining_engines()
    if path is None and parts.group == POLICY:
        return NoEngines()
    if path is None:
        raise ConfigError(f"[engines.{parts.group}] fleet = true: {extensions.NO_JOINING}")
    engines: JoiningEngines = extensions.load(path)(config, parts)
    return engines
