"""The run itself: settings for one process, and one step at a time.

Input: a recipe and changed settings. Output: the metrics and the groups of each step. The loop, the
collector, the graders and the trainer's rank are those of a run; the engine and the transport
between driver and rank are replaced (``engine``, ``ranks``). Nothing is saved.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import tempfile
import threading
import warnings
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch.distributed as dist

from common.garbage import paused_for_imports
from rlpost.config import extensions
from rlpost.config.tree import Config
from rlpost.driver.calls import Calls
from rlpost.driver.checkpoints import Checkpoints
from rlpost.driver.generation import Generation
from rlpost.driver.loop import Loop, Stages
from rlpost.driver.model_flops import model_break_even
from rlpost.driver.preemption import StopRequest
from rlpost.driver.role_environment import trainer_environment
from rlpost.driver.run_stages import policy_versions
from rlpost.driver.startup import make_actor
from rlpost.driver.training import Training
from rlpost.driver.worker_groups import ActorGroup
from rlpost.durable.journal import Journal
from rlpost.durable.state import RunState
from rlpost.engines.connection import RunEngines
from rlpost.errors import ConfigError
from rlpost.extensions.in_process.engine import Decode, InProcessConnection, InProcessEngine
from rlpost.extensions.in_process.ranks import InProcessWorker
from rlpost.extensions.in_process.settings import one_process_config
from rlpost.models.config_file import read_config
from rlpost.observe.writer import MetricsWriter
from rlpost.rollout.policy_versions import PolicyVersions
from rlpost.tasks.reward.grader import InlineGrader
from rlpost.tasks.reward.registry import RewardFunction
from rlpost.types import SampleGroup, ScoredSample

if TYPE_CHECKING:
    from rlpost.trainer.actor import Actor

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """A step of a run: its number from 1, its metrics by name, and the groups it trained on."""

    number: int
    metrics: Mapping[str, float]
    groups: Sequence[SampleGroup]

    @property
    def samples(self) -> list[ScoredSample]:
        """All samples, group by group; ``samples[0].sample.text`` and ``samples[0].reward``."""
        return [scored for group in self.groups for scored in group.samples]

    def __repr__(self) -> str:
        reward = self.metrics.get("reward/mean", float("nan"))
        return f"<step {self.number}: {len(self.samples)} samples, reward {reward:.3f}>"


class InProcessRun:
    """A run of a recipe in this process.

    >>> run = InProcessRun("tiny", lr=1e-3)  # doctest: +SKIP
    >>> step = run.step()  # doctest: +SKIP
    >>> step.metrics["reward/mean"], step.samples[0].sample.text  # doctest: +SKIP

    Only one can be open in a process, because Megatron-core's groups are global; ``close`` it, or
    use it as a context manager.
    """

    def __init__(
        self, recipe: str | Path = "tiny", *, reward: RewardFunction | None = None, **settings: Any
    ) -> None:
        """Load model and prompts.

        Args:
            recipe: a file, or a name in ``jobs/recipes``. Its layout is replaced by one device.
            reward: (text, label, metadata) -> reward, in place of that of the settings; called on
                the event loop, without a time limit.
            settings: flags with underscores, as in ``lr=1e-3, advantage_estimator="rloo"``.

        Raises:
            ConfigError: a setting is unknown, wrong, or not for one process.
            DataError, WeightError: prompts or model cannot be read.
        """
        self.config = one_process_config(recipe, settings, has_reward=reward is not None)
        if dist.is_initialized():
            raise ConfigError("another run is open in this process; close() it first")
        self._groups: Sequence[SampleGroup] = ()
        self._running: Future[Mapping[str, float]] | None = None
        self._is_closed = False
        # What the event loop closes, and then what this thread closes.
        self._async_closing, self._closing = AsyncExitStack(), ExitStack()
        try:
            self._start_thread()
            self._begin(self._start(reward)).result()
        except BaseException:
            self.close()
            raise

    def step(self) -> TrainedStep:
        """Generate, grade, train and update the engine's weights once.

        An interrupt (Ctrl-C) does not end the step: the next call returns it.

        Raises:
            ConfigError: all steps of --num-rollout are trained.
            RlpostError: as a run would end; the run can only be closed afterwards.
        """
        self._check_open()
        if self._running is None:
            num_steps = self.config.rollout.num_rollout
            if self._loop.state.step == num_steps:
                raise ConfigError(f"all {num_steps} steps are trained; give a larger num_rollout")
            self._running = self._begin(self._loop.step())
        metrics = self._wait(self._running)
        self._running = None
        return TrainedStep(self._loop.state.step, metrics, self._groups)

    def evaluate(self) -> Mapping[str, float]:
        """Return metrics on the recipe's held-out prompts, as ``eval/SET/NAME``.

        A step that was interrupted is completed first.
        """
        self._check_open()
        if self._running is not None:
            wait_for([self._running])
        return self._begin(self._generation.evaluate()).result()

    def close(self) -> None:
        """End graders, process groups and the thread, and free the weights; can be called again.

        A step that was interrupted is completed first: its kernels use the process groups.
        """
        if self._is_closed:
            return
        if self._running is not None:
            wait_for([self._running])
        self._begin(self._async_closing.aclose()).result()
        self._is_closed = True
        self._events.call_soon_threadsafe(self._events.stop)
        self._thread.join()
        self._events.close()
        self._closing.close()
        # The engine's weights, although a notebook keeps this object.
        self._running = None  # after a step that failed, its frames
        for name in ("_loop", "_generation"):
            vars(self).pop(name, None)
        gc.collect()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start_thread(self) -> None:
        """Start the event loop in a thread: a notebook runs one in its main thread already."""
        self._events = asyncio.new_event_loop()
        # Of several answers that fail for one reason, the first is raised by ``step``.
        self._events.set_exception_handler(lambda _, context: logger.debug("%s", context))
        self._thread = threading.Thread(
            target=self._events.run_forever, name="rlpost-run", daemon=True
        )
        self._thread.start()

    def _wait(self, future: Future[T]) -> T:
        return future.result()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConfigError("the run is closed; make another InProcessRun")

    def _begin(self, work: Coroutine[object, None, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._events)

    async def _start(self, reward: RewardFunction | None) -> None:
        """Load the rank, the engine and the prompts, and bring the loop to its first step."""
        config, closing = self.config, self._async_closing
        folder = Path(self._closing.enter_context(tempfile.TemporaryDirectory(prefix="rlpost-")))
        stop = StopRequest(folder / "STOP")
        extensions.register_adapters()
        rank = await asyncio.to_thread(_ready_rank, config)
        # Frames of a step that failed may refer to the rank in cycles, and gc does not collect what
        # autograd's nodes refer to: the weights would stay for the life of the process.
        self._closing.callback(vars(rank).clear)
        self._closing.callback(rank.close)
        engine = _engine_of(config, decode=lambda ids: self._generation.tokenizer.decode(ids))
        self._generation = Generation(
            config,
            stop,
            run_folder=folder,
            connection=partial(InProcessConnection, engine),
            grader=None if reward is None else InlineGrader(reward),
        )
        closing.push_async_callback(self._generation.close)
        await asyncio.to_thread(self._generation.read_prompts)
        await self._generation.connect(RunEngines())
        state, versions = RunState(), policy_versions(config, start=0, kept=None)
        checkpoints = Checkpoints(config.checkpoint, folder, committed=lambda step, path: None)
        metrics = MetricsWriter(folder / "metrics.jsonl", show=self._show)
        closing.callback(metrics.close)
        await metrics.begin(0)
        actors = ActorGroup(InProcessWorker(rank))
        training = Training(
            config,
            actors,
            [0],
            calls=Calls(actors, stop),
            is_fresh=config.checkpoint.ref_load is None,
            break_even=model_break_even(read_config(config.checkpoint.hf_checkpoint)),
        )
        stages = InProcessStages(training, rank, engine, self._generation, versions)
        rollouts = self._generation.rollouts(state, Journal.off(), versions)
        closing.push_async_callback(rollouts.stop)
        self._loop = Loop(
            stages,
            config,
            checkpoints=checkpoints,
            rollouts=rollouts,
            journal=Journal.off(),
            metrics=metrics,
            stop=stop,
            versions=versions,
        )
        await self._loop.begin(state, saved=True)

    def _show(self, step: int, groups: Sequence[SampleGroup]) -> None:
        del step
        self._groups = groups


class InProcessStages(Stages):
    """The stages of the loop, on one rank and one engine."""

    def __init__(
        self,
        training: Training,
        rank: Actor,
        engine: InProcessEngine,
        generation: Generation,
        versions: PolicyVersions,
    ) -> None:
        self._training, self._rank, self._engine = training, rank, engine
        self._generation, self._versions = generation, versions

    async def train(self, groups: Sequence[SampleGroup], rollout: int) -> Mapping[str, float]:
        return await self._training.train(groups, rollout, self._versions)

    async def sync(self, policy_version: int) -> None:
        if policy_version != self._engine.version:
            await asyncio.to_thread(self._copy_weights, policy_version)

    def _copy_weights(self, policy_version: int) -> None:
        exporter = self._rank.exporter
        buckets = exporter.plan(self._rank.piece_bytes)
        self._engine.update(map(exporter.gather, buckets), policy_version)

    async def evaluate(self) -> Mapping[str, float] | None:
        return await self._generation.evaluate()

    async def measure(self, step: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """See ``Stages``: nothing beyond the phases is measured."""
        return {}

    async def save(self, state: RunState, *, wait: bool) -> None:
        """See ``Stages``: nothing is saved."""


def _ready_rank(config: Config) -> Actor:
    """Return the trainer's only rank with its initial weights. Blocks."""
    os.environ.update(trainer_environment(config, os.environ))
    with paused_for_imports(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Megatron-core, about packages that it does without
        rank: Actor = make_actor(config)
    rank.setup(0, 1, "127.0.0.1", 0)  # a world of one rank opens no port
    rank.import_weights()
    return rank


def _engine_of(config: Config, *, decode: Decode) -> InProcessEngine:
    from rlpost.trainer import device  # after the rank's environment is set

    folder = Path(config.checkpoint.hf_checkpoint)
    dtype = device.weight_dtype(config.perf.bf16)
    return InProcessEngine(folder, decode=decode, dtype=dtype, device=device.current())
