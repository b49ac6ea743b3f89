"""Rollout-only and train-only debug modes, and the choice of the mode of a run.

The modes are --debug-rollout-only and --debug-train-only. Input: that of ``RunStages``. Output:
stages with no-ops for the side that is not started. The placement is that of a full run.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from common.run_folder import RunFolder
from rlpost.config.checks.export_folder import name_weights
from rlpost.config.tree import Config
from rlpost.driver.engines.own_engines import OwnEngines
from rlpost.driver.run_stages import RunStages
from rlpost.driver.stages import ClusterStages
from rlpost.driver.worker_groups import Actor, remote
from rlpost.durable.state import RunState
from rlpost.engines.engine_client import EngineClient
from rlpost.observe.evaluation_answers import EVALUATION, write_answers
from rlpost.types import SampleGroup


def choose_mode(config: Config) -> type[RunStages]:
    """Return the stages of a run: full, rollout-only, evaluation-only or train-only."""
    if config.debug.debug_eval_only:
        return EvalOnly
    if config.debug.debug_rollout_only:
        return RolloutOnly
    return ClusterStages if config.generates else TrainOnly


class RolloutOnly(RunStages):
    """Generates with the weights of --hf-checkpoint; each step still increments the version."""

    async def start(self, checkpoint: Path | None) -> None:
        """Start the engines."""
        placement, ports = self.startup.layout()
        self._engines = OwnEngines(self.config, self.cluster, placement, ports)
        self.closing.callback(self._engines.close)
        self.create_groups(placement, ports)
        starting = self._engines.start([""] * len(placement.actors))
        await self.startup.within_deadline(starting, self.groups.start())
        await self.generation.connect(self._engines.serving)
        self.observation.groups = [*self.groups.engines.values()]
        await self.observation.attach(None, self._engines, None)
        await self.follow_engines(self._engines)

    async def train(self, groups: Sequence[SampleGroup], rollout: int) -> Mapping[str, float]:
        """Do nothing."""
        return {}

    async def sync(self, policy_version: int) -> None:
        """Set the version of the engines' weights."""
        clients = [
            EngineClient(address.url, self._engines.api_key) for address in self._engines.addresses
        ]
        await asyncio.gather(*(client.rename_weights(policy_version) for client in clients))

    async def evaluate(self) -> Mapping[str, float]:
        """Evaluate; an engine that dies ends the run, since no trainer can update its weights."""
        return await self.generation.evaluate()

    async def save(self, state: RunState, *, wait: bool) -> None:
        """Do nothing: the weights are those of --hf-checkpoint."""

    async def weights_hash(self) -> str:
        """Return an empty hash: there is no trainer. Engines in other jobs may leave."""
        self.groups.end()
        return ""


class EvalOnly(RolloutOnly):
    """Evaluates the weights of --hf-checkpoint and writes every answer."""

    async def evaluate(self) -> Mapping[str, float]:
        """Evaluate; write the answers of each set to RUN/report/evaluation. Raises OSError."""
        metrics = await self.generation.evaluate()
        folder = RunFolder(self.run_folder).report / EVALUATION
        weights = await asyncio.to_thread(name_weights, self.config.checkpoint.hf_checkpoint)
        decode = self.generation.tokenizer.decode
        for name, groups in self.generation.answered.items():
            write = partial(write_answers, folder, name, groups, decode, weights=weights)
            await asyncio.to_thread(write)
        return metrics


class TrainOnly(RunStages):
    """Trains on recorded groups or on the responses of the data; starts no engines."""

    async def start(self, checkpoint: Path | None) -> None:
        """Start the actors; load ``checkpoint``, or the Hugging Face weights without one."""
        placement, ports = self.startup.layout()
        await self.startup.within_deadline(self.create_ranks(placement))
        await self.startup.within_deadline(self.start_trainer(placement, ports, checkpoint))
        await self.observation.attach(self.ranks, None, None)

    async def train(self, groups: Sequence[SampleGroup], rollout: int) -> Mapping[str, float]:
        """Run the optimizer steps of a rollout."""
        training = self.training.train(groups, rollout, self.versions)
        return await self.observation.around(groups, training)

    async def sync(self, policy_version: int) -> None:
        """Do nothing: there are no engines."""

    async def evaluate(self) -> Mapping[str, float]:
        """Do nothing: there are no engines."""
        return {}

    async def save(self, state: RunState, *, wait: bool) -> None:
        """Commit."""
        await self.save_ranks(state, wait=wait, at_rest=contextlib.nullcontext())

    async def weights_hash(self) -> str:
        """Return a hash of the trainer's weights under their Hugging Face names."""
        return await self.ranks.first(remote(Actor.weights_hash))
