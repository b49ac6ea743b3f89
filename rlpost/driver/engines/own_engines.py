"""The engines of a group: health checks, restarts, admission.

Input: settings of the group (``config.engine_groups.group_config``), a placement, ports. Output:
addresses that answer. An *admitted* engine receives requests (``rlpost.engines.places``). Only
engines with the current weights are admitted, so a restarted one first receives a weight update.

    dismiss (no requests, process killed; its requests finish elsewhere) -> start -> [weights]
    -> admit
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from common.addresses import http_url
from common.bounded import for_each
from common.cluster import Cluster
from common.fleet_name import POLICY
from rlpost.config.engine_args import IMAGE_ARGS
from rlpost.config.keys import EXTERNAL_ENGINES
from rlpost.config.tree import Config
from rlpost.driver.engines.adoption import ANSWER_S, is_adopted
from rlpost.driver.engines.engine_life import EngineLife, check_engine, failure
from rlpost.driver.engines.engine_settings import num_slots, settings_of_engine
from rlpost.driver.placement import Placement, Ports
from rlpost.driver.role_environment import engine_environment
from rlpost.driver.worker_groups import EngineWorkers
from rlpost.driver.workers import StandbyWorker, WorkerGroup, kill_workers, left_workers
from rlpost.engines.connection import RunEngines
from rlpost.engines.engine import Engine
from rlpost.engines.engine_client import EngineClient
from rlpost.engines.engine_side_weights import PauseMode
from rlpost.engines.external import external_addresses
from rlpost.engines.features import check_servers
from rlpost.engines.own_membership import OwnMembership
from rlpost.engines.places import Place
from rlpost.engines.shard_mover import SLICES
from rlpost.errors import EngineDied
from rlpost.observe.spans import SPANS, ProcessSpans, clock_offset
from rlpost.types import EngineAddress

logger = logging.getLogger(__name__)

STOP_S = 10.0  # deadline for an engine's workers to end on those of its nodes that are not lost


class OwnEngines:
    """The engines of one group in the run's job. Call ``start`` first, ``close`` last."""

    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        placement: Placement,
        ports: Ports,
        *,
        group: str = POLICY,
        serving: RunEngines | None = None,
    ) -> None:
        """
        Args:
            config, placement, ports: those of the group.
            serving: receives the engines that serve, for requests.
        """
        self.group = group
        self._config = config
        self._cluster = cluster
        self._placement = placement
        self._ports = ports
        self._log_dir = Path(cluster.attempt_dir)
        self._deadline_s = float(config.cluster.bringup_deadline_s)
        self._external = config.sglang.rollout_external_engine_addrs
        self.api_key = os.environ.get(EXTERNAL_ENGINES, "") if self._external else cluster.secret
        self.serving = RunEngines() if serving is None else serving
        self._slots: dict[int, int] = {}  # requests at once, by engine
        self._num_ranks: dict[int, int] = {}  # data-parallel ranks, by engine
        self.addresses: tuple[EngineAddress, ...] = ()
        self.visible_gpus: Sequence[str] = ()  # by trainer rank, for engines that share the GPUs
        self._workers: list[EngineWorkers] = []
        self._starting: dict[int, asyncio.Task[None]] = {}  # tasks of ``begin_restart``
        self._released: dict[int, set[str]] = {}
        self._lives: dict[int, EngineLife] = {}
        self.members = OwnMembership()
        """Decides what happens to them."""

    async def start(self, visible_gpus: Sequence[str]) -> None:
        """Start the engines and admit them. ``visible_gpus`` becomes the attribute.

        Raises EngineDied or RolloutError, naming the engine, with the end of its log.
        """
        self.visible_gpus = visible_gpus
        if self._external:
            required = IMAGE_ARGS if self._config.takes_images else {}
            self.addresses = await external_addresses(self._external, self.api_key, required)
        else:
            every = range(len(self._placement.engines))
            self.addresses = tuple(self._address(index) for index in every)
            adopted = await self._adopt()
            self._workers = [
                adopted.get(index) or self._group(index, visible_gpus) for index in every
            ]
            await asyncio.gather(
                *(self._start_engine(index) for index in every if index not in adopted)
            )
        await self._check_versions()
        self.members = OwnMembership(len(self.addresses))
        self._place()

    def _place(self) -> None:
        """Let requests go to the engines that serve."""
        self.serving.places.set_own(self.places_of(self.members.serving))

    def places_of(self, indices: Sequence[int]) -> list[Place]:
        """Return the places of requests of engines."""
        places = []
        for index in indices:
            most = self._config.sglang.sglang_server_concurrency
            slots = self._slots.get(index, most)
            url, ranks = self.addresses[index].url, self._num_ranks.get(index, 1)
            places.append(Place(url, self.api_key, slots, num_ranks=ranks))
        return places

    @property
    def receivers(self) -> tuple[EngineAddress, ...]:
        """The engines that get weights: all that are not lent."""
        return tuple(self.addresses[index] for index in self.members.receivers)

    def lend(self, most: int) -> list[int]:
        """Lend up to ``most`` engines; see ``OwnMembership``."""
        chosen = self.members.lend(most)
        self._place()
        return chosen

    def give_back(self, indices: Sequence[int], version: int | None) -> None:
        """Take engines back that were lent and hold ``version``; None: it is unknown."""
        self.members.give_back(indices, version)
        self._place()

    async def _adopt(self) -> dict[int, EngineWorkers]:
        """Take over engines of an earlier driver of this attempt; return them by index.

        Its other engines are ended.
        """
        if not self._outlives_driver or not self._cluster.incarnation:
            return {}
        # engines wait for a group of the dead driver as long as its folder exists
        groups = Path(self._cluster.attempt_dir) / SLICES
        await asyncio.to_thread(shutil.rmtree, groups, ignore_errors=True)
        left = left_workers()

        async def adopt(index: int) -> EngineWorkers | None:
            names = self._names(index)
            standbys = {part: left[name] for part, name in enumerate(names) if name in left}
            if len(standbys) < len(names):
                kill_workers(standbys.values())
                return None
            workers = self._group(index, (), standbys)
            expected = [
                (http_url(slot.ip, self._ports.engines[index]), settings)
                for slot, settings in zip(
                    self._placement.engines[index], self._settings(index), strict=True
                )
            ]
            client = EngineClient(self.addresses[index].url, self.api_key, timeout_s=ANSWER_S)
            fits = await is_adopted(
                workers,
                client,
                expected,
                incarnation=self._cluster.incarnation,
                num_stages=len(self._ports.sync_groups),
            )
            if fits:
                return workers
            await workers.kill()
            return None

        adopted = await asyncio.gather(*map(adopt, range(len(self.addresses))))
        return {index: workers for index, workers in enumerate(adopted) if workers is not None}

    async def _check_versions(self) -> None:
        """Learn the slots of all engines. Raise RolloutError naming those whose SGLang is too old."""
        infos = await for_each(
            lambda index: self._client(index).server_info(), range(len(self.addresses))
        )
        most = self._config.sglang.sglang_server_concurrency
        self._slots = {index: num_slots(info, most) for index, info in enumerate(infos)}
        self._num_ranks = {
            index: max(1, len(info.get("internal_states") or ()))
            for index, info in enumerate(infos)
        }
        urls = [address.url for address in self.addresses]
        versions = {url: str(info.get("version")) for url, info in zip(urls, infos, strict=True)}
        check_servers(versions)

    @property
    def pause_mode(self) -> PauseMode:
        """How to pause engines for new weights while they generate.

        "retract" keeps requests in the engine, which recomputes their KV cache. "abort" and a retry
        take SGLang a second, so it is only used where "retract" does not work:
        when engines return routes, because "retract" would replace the routes of all earlier tokens
        by those of the new weights, while an abort returns them first; and with adapters, because a
        request cannot change its adapter.
        """
        grpo, sends_adapters = self._config.grpo, self._config.sends_adapters
        must_abort = grpo.use_rollout_routing_replay or sends_adapters
        return "abort" if must_abort else "retract"

    async def unhealthy(self, *, generating: bool) -> list[int]:
        """Return dead engines, of those with a process that reads no other weights.

        ``generating``: the engines are not paused, so the check generates a token, and one that is
        busy is not dead (``engine_life``). Otherwise an engine is dead that does not answer.
        """
        sglang = self._config.sglang
        timeout_s = sglang.rollout_health_check_timeout
        interval_s = sglang.rollout_health_check_interval

        async def is_healthy(index: int) -> bool:
            client = replace(self._client(index), timeout_s=timeout_s)
            if generating:
                life = self._lives.setdefault(index, EngineLife(client.url, interval_s))
                problem = await check_engine(client, life)
            else:
                problem = await failure(client, "/health")
            if problem is not None:
                logger.warning("%s", problem)
            return problem is None

        checked = self.members.checked
        healthy = await for_each(is_healthy, checked)
        return [index for index, fine in zip(checked, healthy, strict=True) if not fine]

    async def dismiss(self, index: int) -> None:
        """Send no more requests to an engine and stop its process; those in flight go elsewhere.

        Raises EngineDied for an external engine.
        """
        address = self.addresses[index]
        if self._external:
            raise EngineDied(
                f"engine {address.url} does not answer; rlpost cannot restart an external engine: repair it and resume"
            )
        logger.warning("engine %s is dead or hangs; stopping it", address.url)
        self.members.stopped(index)
        self._place()
        await self._workers[index].stop()
        self._released.pop(index, None)

    async def lose(self, indices: Sequence[int]) -> None:
        """Send no more requests to engines of a lost node; ``move`` assigns another node.

        Those in flight are sent again elsewhere at once: a silent node does not even close
        connections.
        """
        lost = [index for index in indices if index not in self.members.down]
        self.members.lost(lost)
        self._place()
        for index in lost:
            self._released.pop(index, None)
            self.serving.places.give_up(self.addresses[index].url)

    async def move(self, placement: Placement) -> None:
        """Create workers for engines with other slots in ``placement``; ``restart`` starts them."""
        before, self._placement = self._placement, placement
        for index, parts in enumerate(placement.engines):
            earlier = before.engines[index]
            if parts != earlier:
                self._forget_start(index)
                left = [part for part, slot in enumerate(parts) if slot == earlier[part]]
                await self._workers[index].abandon(left, within_s=STOP_S)
                self._workers[index] = self._group(index, self.visible_gpus)
        if self._workers:
            self.addresses = tuple(self._address(index) for index in range(len(self._workers)))

    def begin_restart(self, index: int) -> None:
        """Begin the start that ``restart`` waits for; do nothing if it has begun."""
        if index not in self._starting:
            self._starting[index] = asyncio.create_task(self._start_engine(index))
            self._starting[index].add_done_callback(_retrieve_error)

    async def restart(self, index: int) -> None:
        """Restart a dismissed engine with the weights of its model folder; ``admit`` lets it serve.

        Raises what ``start`` raises.
        """
        begun = self._starting.get(index)
        if index in self._lives:
            self._lives[index].forget_silence()
        try:
            await (self._start_engine(index) if begun is None else begun)
        finally:
            self._forget_start(index)
        self.members.started(index)

    def _forget_start(self, index: int) -> None:
        begun = self._starting.pop(index, None)
        if begun is not None:
            begun.cancel()

    async def admit(self, indices: Sequence[int]) -> None:
        """Send requests to these engines again. Raises EngineDied when one has ended."""
        if self._workers:
            await asyncio.gather(*(self._workers[index].check_alive() for index in indices))
        self.members.admitted(indices)
        self._place()

    async def release_memory(self, *tags: str) -> None:
        """Release ``kv_cache``, ``cuda_graph`` or ``weights`` of all engines; they stay paused.

        This includes engines that have restarted and are not admitted yet. An engine that is dead
        or hangs is dismissed.
        """

        async def release(index: int) -> None:
            if held := [tag for tag in tags if tag not in self._released.get(index, ())]:
                await self._client(index).release_memory(held)
                self._released.setdefault(index, set()).update(held)

        await self._of_those_alive(release)

    async def restore_memory(self, *tags: str) -> None:
        """Restore released memory of all engines; weights are undefined until the next update.

        Memory that was never released is skipped, because SGLang fails on it. An engine that is
        dead or hangs is dismissed.
        """

        async def restore(index: int) -> None:
            released = self._released.get(index, set())
            if to_restore := [tag for tag in tags if tag in released]:
                await self._client(index).restore_memory(to_restore)
                released.difference_update(to_restore)

        await self._of_those_alive(restore)

    def is_released(self, tag: str) -> bool:
        """Return whether an engine has released ``tag``."""
        return any(tag in released for released in self._released.values())

    def engine_on_gpu_of(self, rank: int) -> str | None:
        """Return the name of the engine on a trainer rank's GPU, as in its log; None without one."""
        for index, ranks in enumerate(self._placement.ranks_of_engines):
            if rank in ranks:
                return self.name(index)
        return None

    def name(self, index: int) -> str:
        """Return the name of an engine, as in its log."""
        return f"engine-{index}" if self.group == POLICY else f"engine-{self.group}-{index}"

    async def resume(self) -> None:
        """Let paused engines generate again; an engine that is dead or hangs is dismissed."""
        await self._of_those_alive(lambda index: self._client(index).resume())

    async def _of_those_alive(self, ask: Callable[[int], Awaitable[None]]) -> None:
        """Call ``ask`` for each engine that has a process; dismiss those that do not answer."""

        async def ask_or_dismiss(index: int) -> None:
            try:
                await ask(index)
            except EngineDied as error:
                logger.warning("%s", error)
                await self.dismiss(index)

        down = {*self.members.down}
        running = [index for index in range(len(self.members)) if index not in down]
        await asyncio.gather(*(ask_or_dismiss(index) for index in running))

    async def memory_use(self) -> list[dict[str, float]]:
        """Return the memory use of each process of our engines, by metric name."""
        found = await asyncio.gather(*(workers.memory_use() for workers in self._workers))
        return [one for of_engine in found for one in of_engine]

    async def spans(self, since: float) -> list[ProcessSpans]:
        """Return the spans of engine workers and servers after ``since`` on the driver's clock."""

        async def of_server(index: int) -> ProcessSpans:
            client = self._client(index)
            sent = SPANS.now()
            theirs, _ = await client.request("GET", "/spans?since=inf", None)
            ahead = clock_offset(sent, theirs, SPANS.now())
            _, found = await client.request("GET", f"/spans?since={since + ahead}", None)
            return ProcessSpans(f"{self.name(index)} server", [tuple(one) for one in found], ahead)

        of_workers = await asyncio.gather(*(workers.spans(since) for workers in self._workers))
        indices = self.members.checked if self._workers else ()
        of_servers = await asyncio.gather(*(of_server(index) for index in indices))
        return [*(one for found in of_workers for one in found), *of_servers]

    def close(self) -> None:
        """Stop starts in progress; engines end with Ray."""
        for index in [*self._starting]:
            self._forget_start(index)

    def _client(self, index: int) -> EngineClient:
        return EngineClient(self.addresses[index].url, self.api_key, timeout_s=self._deadline_s)

    def _address(self, index: int) -> EngineAddress:
        parts = self._placement.engines[index]
        url = http_url(parts[0].ip, self._ports.engines[index])
        return EngineAddress(url=url, num_gpus=sum(part.num_gpus for part in parts))

    @property
    def _outlives_driver(self) -> bool:
        """Whether engines stay when the driver dies.

        Engines on the trainer's GPUs end with it: their memory has to be free when new ranks start.
        """
        return not self._config.cluster.colocate

    def _names(self, index: int) -> list[str]:
        """Name of the worker of each part of an engine."""
        parts = range(len(self._placement.engines[index]))
        return [f"{self.name(index)}{f'-{part}' if part else ''}" for part in parts]

    def _settings(self, index: int) -> list[dict[str, Any]]:
        parts = self._placement.engines[index]
        return settings_of_engine(self._config, parts, self._ports.engine_groups[index])

    def _group(
        self,
        index: int,
        visible_gpus: Sequence[str],
        standbys: Mapping[int, StandbyWorker] | None = None,
    ) -> EngineWorkers:
        """Create the workers of one engine, one per node, or use those in ``standbys``."""
        parts, names = self._placement.engines[index], self._names(index)
        makes = [
            partial(
                Engine,
                api_key=self.api_key,
                log_path=self._log_dir / f"{name}-server.log",
                **settings,
            )
            for name, settings in zip(names, self._settings(index), strict=True)
        ]
        env = engine_environment(self._config, os.environ)
        envs = [env | part.gpu_variables(visible_gpus) for part in parts]
        return EngineWorkers(
            WorkerGroup(
                makes,
                parts,
                names=names,
                log_dir=self._log_dir,
                envs=envs,
                standbys=standbys,
                outlive_driver=self._outlives_driver,
            )
        )

    async def _start_engine(self, index: int) -> None:
        places = [(part.ip, self._ports.engines[index]) for part in self._placement.engines[index]]
        cluster = self._config.cluster
        gpus_per_node = cluster.num_gpus_per_node if cluster.bind_cpus else None
        await self._workers[index].start(
            places, deadline_s=self._deadline_s, gpus_per_node=gpus_per_node
        )


def _retrieve_error(task: asyncio.Future[None]) -> None:
    # asyncio logs an error that is never retrieved; whatever awaits the task still gets it.
    if not task.cancelled():
        task.exception()
