"""Base class of the stages of a run, shared by all modes."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from pathlib import Path

from common.cluster import Cluster
from common.fleet_name import POLICY
from common.local_gpus import read_local_gpus
from common.run_folder import RunFolder
from rlpost.config import extensions
from rlpost.config.checks.context_length import with_pool
from rlpost.config.checks.prefix import with_prefix_sharing
from rlpost.config.tree import Config
from rlpost.driver.checkpoints import Checkpoints, wait_until_written
from rlpost.driver.engines.engine_groups import EngineGroups
from rlpost.driver.engines.own_engines import OwnEngines
from rlpost.driver.generation import Generation
from rlpost.driver.hf_export import HuggingFaceExport
from rlpost.driver.ledger_lines import RecordEvent, not_recorded
from rlpost.driver.loop import Rollouts, Stages
from rlpost.driver.model_flops import model_break_even
from rlpost.driver.observation import Observation
from rlpost.driver.placement import Placement, Ports
from rlpost.driver.preemption import StopRequest
from rlpost.driver.startup import Startup
from rlpost.driver.worker_groups import Actor, ActorGroup, remote
from rlpost.durable.journal import Journal
from rlpost.durable.state import RunState
from rlpost.errors import CheckpointError, Fenced
from rlpost.models.config_file import read_config
from rlpost.rollout.policy_versions import PolicyVersions

logger = logging.getLogger(__name__)


def policy_versions(config: Config, *, start: int, kept: int | None) -> PolicyVersions:
    """Return the versions of an attempt whose ranks have ``start`` and perhaps ``kept``."""
    interval, of_reference = config.rollout.update_weights_interval, config.grpo.ref_update_interval
    return PolicyVersions(interval, start, kept, of_reference)


class RunStages(Stages):
    """Implements ``loop.Stages`` for one mode. Call ``start`` first, ``close`` last.

    A mode registers everything that it starts with ``closing``; ``close`` ends it in reverse order.
    """

    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        *,
        checkpoints: Checkpoints,
        stop: StopRequest,
        record: RecordEvent = not_recorded,
    ) -> None:
        self.cluster = cluster
        self.checkpoints = checkpoints
        self.stop = stop
        self.record = record
        hf = read_config(config.checkpoint.hf_checkpoint)
        self.hf = hf
        has_gpus = bool(read_local_gpus())
        config, reason = with_prefix_sharing(config, hf, has_gpus=has_gpus)
        if reason is not None:
            logger.info("--share-prefix is off: %s", reason)
        self.config = config
        self.run_folder = run = Path(cluster.attempt_dir).parents[1]
        self.startup = Startup(
            config, cluster, stop=stop, break_even=model_break_even(hf), record=record
        )
        self.observation = Observation(config, hf, checkpoints=checkpoints, traces=run / "traces")
        self.generation = Generation(
            with_pool(config, has_gpus=has_gpus),  # it bounds requests; engines know their pool
            stop,
            check=checkpoints.check_owner,
            episodes=RunFolder(run).episodes,
            run_folder=run,
        )
        self.versions = policy_versions(config, start=0, kept=None)
        """Versions of the policy in this attempt; those of the ranks, once a trainer has started."""
        self.closing = AsyncExitStack()
        self.ranks: ActorGroup
        """The ranks that train; a mode that trains creates them."""
        attempt = Path(cluster.attempt_dir).name
        self._hf_export = HuggingFaceExport(
            config.checkpoint, run, attempt=attempt, check=checkpoints.check_owner
        )

    @abstractmethod
    async def start(self, checkpoint: Path | None) -> None:
        """Start the workers; load ``checkpoint`` or, without one, the Hugging Face weights."""

    @abstractmethod
    async def weights_hash(self) -> str:
        """Return a hash of the weights under their Hugging Face names; empty without a trainer."""

    async def resume_evaluations(
        self, step: int, done: Callable[[int, Mapping[str, float]], Awaitable[None]]
    ) -> None:
        """Carry out what an earlier attempt owes of evaluations beside training, up to ``step``.

        ``done`` records metrics of a step, now and later. No-op without --eval-engines.
        """

    def rollouts(self, state: RunState, journal: Journal) -> Rollouts:
        """Return the source of batches, resumed from ``state``."""
        self.observation.step = state.step
        return self.generation.rollouts(state, journal, self.versions)

    def create_groups(self, placement: Placement, ports: Ports) -> None:
        """Create the groups of engines beside the policy's; ``groups.start`` starts them."""
        clients = self.generation.engines
        self.groups = EngineGroups(
            self.config,
            self.cluster,
            placement,
            ports,
            clients,
            hf=self.hf,
            check=self.checkpoints.check_owner,
            record=self.record,
        )
        self.closing.push_async_callback(self.groups.close)

    async def create_ranks(self, placement: Placement) -> None:
        """Create the worker of each rank that trains."""
        self.ranks = await self.startup.workers(placement)

    async def start_trainer(
        self, placement: Placement, ports: Ports, checkpoint: Path | None
    ) -> None:
        """Set up the ranks that train; load ``checkpoint`` or, without one, the initial weights."""
        # ``Checkpoints.newest`` has compared it.
        self.training = await self.startup.trainer(
            self.ranks, placement, ports, checkpoint, is_compared=True
        )
        start, kept = await self.ranks.first(remote(Actor.versions))
        self.versions = policy_versions(self.config, start=start, kept=kept)

    async def save_ranks(
        self,
        state: RunState,
        *,
        wait: bool,
        at_rest: AbstractAsyncContextManager[None],
    ) -> None:
        """Save the ranks that train, as ``save`` describes.

        ``at_rest`` keeps weights and optimizer on the trainer's devices.
        """
        in_background = self.config.checkpoint.async_save and not wait

        async def write(folder: Path) -> None:
            self.stop.saves.begin()
            step = state.step
            save = remote(Actor.save, str(folder), step, in_background=in_background)
            await self.ranks.all(save)

        async with at_rest:
            try:
                if in_background:
                    begun = await self.checkpoints.start(
                        state, write, partial(wait_until_written, self._save_is_done)
                    )
                else:
                    begun = await self.checkpoints.commit(state, write)
            except (CheckpointError, OSError) as error:
                if wait or isinstance(error, Fenced):
                    raise
                logger.error(
                    "saving step %d failed, the previous checkpoint is kept: %s", state.step, error
                )
                return
            if begun and not self.stop.requested():
                await self._hf_export.export(state.step, self._export)

    async def follow_engines(self, engines: OwnEngines) -> None:
        """Let extensions follow the engines until the end of the attempt. Raises Fenced.

        ``engines`` are those of the policy; those of the groups follow.
        """
        groups = {POLICY: engines, **self.groups.engines}
        for follow in extensions.engine_followers():
            owned = self.checkpoints.check_owner
            close = await follow(self.config, groups, self.run_folder, owned)
            if close is not None:
                self.closing.push_async_callback(close)

    async def _save_is_done(self) -> list[bool]:
        return await self.ranks.aside(remote(Actor.save_is_done))

    async def _export(self, folder: str) -> None:
        """Write policy and, in a subfolder, critic."""
        await self.ranks.all(remote(Actor.export, folder))
        if self.config.use_critic:
            await self.ranks.all(remote(Actor.export_critic, f"{folder}/critic"))

    async def measure(self, step: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Return metrics of throughput, weight sync, checkpoints and memory."""
        return await self.observation.measure(step, metrics)

    async def close(self) -> None:
        """Stop graders; trainer ranks end with the driver, engines with Ray."""
        await self.observation.close(is_leaving=self.stop.requested())
        await self.generation.close()
        await self.closing.aclose()
