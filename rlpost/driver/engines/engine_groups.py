"""The groups of engines of a run beside the policy's: start, health, metrics.

Input: settings, the placement, the clients of the groups. Output: engines that serve under their
names. Each group is a ``OwnEngines`` with an ``EngineHealth``, as the policy's engines are, and with
``fleet = true`` ``JoiningEngines`` for those in other jobs. Only its settings differ
(``config.engine_groups.group_config``), and where its weights come from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from common.cluster import Cluster
from rlpost.config.engine_groups import group_config
from rlpost.config.tree import Config
from rlpost.driver.engines.engine_events import EngineEvents
from rlpost.driver.engines.engine_health import EngineHealth, EngineWeights, OwnWeights
from rlpost.driver.engines.joining import JoiningEngines, JoinParts, joining_engines
from rlpost.driver.engines.own_engines import OwnEngines
from rlpost.driver.ledger_lines import RecordEvent, not_recorded
from rlpost.driver.lost_nodes import LostNodes
from rlpost.driver.placement import Placement, Ports
from rlpost.driver.preemption import StopRequest
from rlpost.engines.connection import RunEngines
from rlpost.engines.group_client import EngineClients

T = TypeVar("T")


class EngineGroups:
    """The groups whose engines the job starts. Call ``start``, then ``watch``; ``close`` last."""

    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        placement: Placement,
        ports: Ports,
        clients: EngineClients,
        *,
        hf: Mapping[str, object],
        check: Callable[[], None],
        record: RecordEvent = not_recorded,
    ) -> None:
        """
        Args:
            clients: send requests to the engines as soon as these serve.
            hf: the policy's config.json.
            check: raises Fenced when another attempt owns the run.
        """
        self._record = record
        self._in_background = {config.eval.eval_engines}
        self._configs = {name: group_config(config, name) for name in config.engines.started}
        self.engines: Mapping[str, OwnEngines] = {
            name: OwnEngines(
                group,
                cluster,
                placement.of_group(name),
                ports.of_group(name),
                group=name,
                serving=RunEngines(places=clients[name].places),
            )
            for name, group in self._configs.items()
        }
        self.jobs: Mapping[str, JoiningEngines] = {
            name: joining_engines(
                config,
                JoinParts(
                    cluster,
                    self.engines[name].serving.places,
                    group=name,
                    hf=hf,
                    check=check,
                    record=record,
                ),
            )
            for name in self.engines
            if config.engines.groups[name].fleet
        }
        self._keep_weights = {
            name for name in self.jobs if not config.engines.groups[name].follows_policy
        }
        self.health: Mapping[str, EngineHealth] = {}

    async def start(self) -> None:
        """Start all engines of this job, and let others join. Raises what ``OwnEngines.start`` raises."""
        await asyncio.gather(
            *(engines.start(()) for engines in self.engines.values()),
            *(self.jobs[name].serve(0) for name in self._keep_weights),
        )

    def watch(
        self,
        *,
        stop: StopRequest,
        nodes: LostNodes | None = None,
        weights: Mapping[str, EngineWeights] | None = None,
    ) -> None:
        """Let ``over`` restart engines that die.

        ``weights``: by group, of those that follow the policy; the others keep their own.
        """
        nodes = LostNodes.none() if nodes is None else nodes
        weights = weights or {}
        self.health = {
            name: EngineHealth(
                self._configs[name],
                engines,
                weights.get(name) or OwnWeights(),
                stop=stop,
                check_others=self.jobs[name].check_any if name in self.jobs else lambda _: None,
                nodes=nodes.of_group(name),
                events=EngineEvents(self._record, group=name),
            )
            for name, engines in self.engines.items()
        }

    async def over(self, generating: Awaitable[T]) -> T:
        """Return the result of ``generating``; restart engines that die before it ends.

        Those of --eval-engines are restarted by the evaluations beside training.
        """
        for name, health in self.health.items():
            if name not in self._in_background:
                generating = health.over(generating)
        return await generating

    def forget_restarts(self) -> None:
        """Record that a batch is trained: restarts before it are no reason to give up.

        Those of --eval-engines are forgotten after each evaluation: a batch is no progress of theirs.
        """
        for name, health in self.health.items():
            if name not in self._in_background:
                health.forget_restarts()

    def end(self) -> None:
        """Record that the run is done: engines on other jobs leave."""
        for jobs in self.jobs.values():
            jobs.end()

    async def close(self) -> None:
        """Stop starts in progress; engines end with Ray, those in other jobs see ``JoiningEngines``."""
        for engines in self.engines.values():
            engines.close()
        await asyncio.gather(*(jobs.close() for jobs in self.jobs.values()))
