"""Parts of the rollout's benchmarks: an engine, prompts, prescribed lengths, a loop without a trainer.

The lengths of answers are log-normal, like those of reasoning models: most are short, and a few are
very long. A length depends on prompt and index only, so that all methods have the same work.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpost.config.tree import Config
from rlpost.driver.checkpoints import Checkpoints
from rlpost.driver.generation import rules
from rlpost.driver.loop import Loop
from rlpost.driver.preemption import StopRequest
from rlpost.durable.journal import Journal
from rlpost.durable.state import RunState
from rlpost.engines.answer import Answer
from rlpost.engines.connection import Connection, RunEngines
from rlpost.engines.engine import Engine
from rlpost.observe.writer import MetricsWriter
from rlpost.rollout.buffer import RolloutBuffer
from rlpost.rollout.collector import Choices, Collector
from rlpost.rollout.generate import GroupWriter
from rlpost.rollout.policy_versions import PolicyVersions
from rlpost.rollout.sampling import SamplingParams
from rlpost.tasks.reward.grader import InlineGrader
from rlpost.types import Backlog, EngineAddress, Prompt, SampleGroup
from tests.ports import free_ports

KEY = "bench"
DEADLINE_S = 600.0
TINY = Path(__file__).parents[1] / "assets/tiny"
FIRST_ID, LAST_ID = 4, 60  # ordinary tokens of the tiny tokenizer


@dataclass(frozen=True)
class Served:
    """One engine with ``concurrency`` requests at a time."""

    engine: EngineAddress
    engines: RunEngines
    concurrency: int


@asynccontextmanager
async def serving(folder: Path, *, concurrency: int) -> AsyncIterator[Served]:
    """Serve the tiny model by one engine with ``concurrency`` requests at a time."""
    (engine_port,) = free_ports(1)
    settings = {"max_running_requests": concurrency, "max_total_tokens": 512 * concurrency}
    engine = Engine(
        model_path=str(TINY), api_key=KEY, server_args=settings, log_path=folder / "engine.log"
    )
    try:
        address = await asyncio.to_thread(
            engine.start, "127.0.0.1", engine_port, deadline_s=DEADLINE_S
        )
        engines = RunEngines.of([address.url], KEY, capacity=concurrency)
        yield Served(address, engines, concurrency)
    finally:
        engine.stop()


def make_prompt(number: int) -> Prompt:
    """Return a prompt of 8 to 16 random tokens."""
    draw = random.Random(number)
    return Prompt(
        number, "", tuple(draw.randint(FIRST_ID, LAST_ID) for _ in range(draw.randint(8, 16)))
    )


class Prompts:
    """An endless cursor over prompts."""

    def __init__(self) -> None:
        self.at = 0

    def take(self, n: int) -> list[Prompt]:
        """Return the next ``n`` prompts."""
        self.at += n
        return [make_prompt(number) for number in range(self.at - n, self.at)]

    def state(self) -> Mapping[str, int]:
        """Return the position."""
        return {"offset": self.at}


@dataclass(frozen=True)
class Lengths:
    """Log-normal lengths of this median, in tokens, and sigma, at most ``most``. Sigma 0: all equal."""

    median: int
    sigma: float
    most: int = 400

    def of(self, prompt_id: int, index: int) -> int:
        """Tokens of an answer."""
        drawn = random.Random(f"{prompt_id} {index}").lognormvariate(0.0, self.sigma)
        return max(1, min(self.most, round(self.median * drawn)))

    def remaining(self, what: str, input_ids: Sequence[int]) -> int:
        """Tokens that an answer still lacks; ``what`` names its prompt and index."""
        prompt_id, index = map(int, re.findall(r"\d+", what))
        written = len(input_ids) - len(make_prompt(prompt_id).token_ids)
        return self.of(prompt_id, index) - written


class Forced(Connection):
    """A connection that prescribes the length of each answer, also after aborts."""

    def __init__(self, engines: RunEngines, remaining: Callable[[str, Sequence[int]], int]) -> None:
        """``remaining``: tokens to generate, by a request's name and its token ids."""
        super().__init__(engines)
        self._remaining = remaining

    async def generate(
        self,
        what: str,
        input_ids: Sequence[int],
        sampling_params: Mapping[str, object],
        **more: Any,
    ) -> Answer:
        """See ``Connection``."""
        length = self._remaining(what, input_ids)
        forced = {"max_new_tokens": length, "ignore_eos": True, "stop_token_ids": None}
        return await super().generate(what, input_ids, {**sampling_params, **forced}, **more)


def writer_over(connection: Connection, sampling: SamplingParams, *, n: int) -> GroupWriter:
    """Return a writer of groups of ``n`` answers whose reward costs almost nothing."""
    grader = InlineGrader(lambda text, label, metadata: float(len(text) % 2))
    return GroupWriter(connection, sampling, n=n, grader=grader)


class WaitingStages:
    """Stages of the loop with a trainer that only waits; nothing is sent, evaluated or saved."""

    def __init__(self, train_s: float) -> None:
        self._train_s = train_s

    async def train(self, groups: Sequence[SampleGroup], rollout: int) -> Mapping[str, float]:
        """Wait instead of training."""
        await asyncio.sleep(self._train_s)
        return {"train/loss": 0.0, "train/grad_norm": 0.0}

    async def sync(self, policy_version: int) -> None:
        """Nothing."""

    async def evaluate(self) -> Mapping[str, float] | None:
        """Return no metrics."""
        return {}

    async def measure(self, step: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Return no further metrics."""
        return {}

    async def save(self, state: RunState, *, wait: bool) -> None:
        """Nothing."""


async def run_loop(
    stages: WaitingStages,
    config: Config,
    writer: GroupWriter,
    *,
    folder: Path,
    metrics: MetricsWriter,
    journal: Journal | None = None,
) -> None:
    """Run the loop over an endless supply of prompts."""
    collector = Collector(
        RolloutBuffer(rules(config, PolicyVersions()), Backlog(), step=0),
        Prompts(),
        writer,
        choices=Choices(ahead=config.rollout.rollout_mode == "one_step_off"),
        stop_requested=lambda: False,
    )
    loop = Loop(
        stages,
        config,
        checkpoints=Checkpoints(config.checkpoint, folder, committed=lambda *_: None),
        rollouts=collector,
        journal=journal or Journal.off(),
        metrics=metrics,
        stop=StopRequest(folder / "STOP"),
        versions=PolicyVersions(),
    )
    await loop.run(RunState(), saved=False)
