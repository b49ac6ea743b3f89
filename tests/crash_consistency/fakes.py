"""Fake engines and a fake trainer whose results depend only on weights, prompt and order.

They replace the parts of ``ClusterStages`` and ``Generation`` and start no processes. Weights are
the head of a hash chain over all trained batches; a token is a hash of weights, prompt, sample and
position. So two runs have equal weights if and only if they trained the same samples in the same
order.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlpost.columns import FloatColumn, IntColumn
from rlpost.driver.loop import Loop
from rlpost.driver.placement import Placement, Ports, Slot
from rlpost.durable.journal import Journal
from rlpost.engines.answer import Answer
from rlpost.engines.connection import Watch
from rlpost.engines.routes import RouteFormat
from rlpost.errors import RlpostError
from rlpost.types import Prompt, Sample, SampleGroup
from tests.crash_consistency.interception import ROOM

SHARD = "shard-0.json"
TOKEN_S, TRAIN_S, SYNC_S, GRADE_S = 0.01, 0.05, 0.01, 0.005
INITIAL = hashlib.sha256(b"initial weights").hexdigest()
EOS = 2
SECOND_TURN = 3  # tokens that an environment and the turn after it add (``bell``)
LONGEST_ANSWER = 16  # --rollout-max-response-len


def digest(text: str) -> str:
    """SHA-256 of a text in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def token(weights: str, prompt_id: int, index: int, position: int) -> int:
    """The token that these weights generate at a position of an answer other than the last."""
    return 3 + int(digest(f"{weights}/{prompt_id}/{index}/{position}")[:4], 16) % 90


def experts(weights: str, prompt_id: int, index: int, position: int) -> list[list[int]]:
    """Routes of the token at a position of prompt and answer: 2 of 4 experts in 2 layers."""
    number = int(digest(f"{weights}/{prompt_id}/{index}/{position}/experts")[:4], 16)
    return [[number % 4, (number + 1) % 4], [number // 4 % 4, (number // 4 + 3) % 4]]


def answer_length(prompt_id: int, index: int) -> int:
    """Number of tokens of an answer; it does not depend on the weights."""
    return 2 + int(digest(f"{prompt_id}/{index}")[:4], 16) % 3


def reward(token_ids: Sequence[int]) -> float:
    """Reward of an answer."""
    return float(sum(token_ids) % 2)


def trained_on(groups: Sequence[SampleGroup]) -> list[dict[str, Any]]:
    """Everything of a batch that a trainer sees, as JSON values."""
    return [
        {
            "prompt_id": group.prompt_id,
            "samples": [
                {
                    "index": scored.sample.index,
                    "prompt": list(scored.sample.prompt_ids),
                    "answer": list(scored.sample.response_ids),
                    "logprobs": list(scored.sample.rollout_logprobs),
                    "label": scored.sample.label,
                    "versions": _versions(scored.sample),
                    "mask": list(scored.sample.mask),
                    "routes": None
                    if scored.sample.routes is None
                    else scored.sample.routes.array.tolist(),
                    "reward": scored.reward,
                }
                for scored in group.samples
            ],
        }
        for group in groups
    ]


def _versions(sample: Sample) -> list[int]:
    """The weight version that generated each token."""
    spans = sample.version_spans or ((sample.policy_version, len(sample.response_ids)),)
    return [version for version, count in spans for _ in range(count)]


def next_weights(weights: str, batch: Any) -> str:
    """The weights after training a batch."""
    return digest(weights + json.dumps(batch, sort_keys=True))


@dataclass
class Engine:
    """The weights of the engine's process, and their version."""

    weights: str = digest("the model folder")
    version: int = -1


class Observed:
    """Records for the oracle of what the fakes of one attempt did."""

    def __init__(self, *, save_s: float) -> None:
        self.save_s = save_s  # duration of a background save
        self.trained: list[tuple[int, str]] = []  # (step from 0, digest of the batch), in order
        self.durable: list[tuple[int, str]] = []  # those of them that the journal called durable
        self.journal: Journal | None = None
        self.graded: list[int] = []  # prompts whose group was complete
        self.history: list[Any] = []  # the batches behind the trainer's weights
        self.weights = INITIAL
        self.engine = Engine()
        self.old_policy = (0, INITIAL)  # version and weights of the engines' last update


class Tokenizer:
    """A tokenizer whose tokens are bytes."""

    end_ids = frozenset({EOS})

    def __init__(self, folder: object, **settings: Any) -> None:
        pass

    def __call__(self, content: Any, tools: Any = None) -> tuple[str, tuple[int, ...]]:
        return str(content), tuple(str(content).encode())

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids."""
        return bytes(token_ids).decode(errors="replace")


class Grader:
    """Grades immediately; records which training groups are complete."""

    def __init__(self, config: Any, engines: Any) -> None:
        self._observed: Observed = ROOM.attempt.observed

    async def grade(self, prompt: Prompt, samples: Sequence[Sample]) -> list[float]:
        """Rewards, in order."""
        await asyncio.sleep(GRADE_S)
        if not prompt.text.startswith("held"):
            self._observed.graded.append(prompt.prompt_id)
        return [reward(sample.response_ids) for sample in samples]

    def grades_singly(self, prompt: Prompt) -> bool:
        """Whether the rewards of a group's answers are recorded one by one."""
        return prompt.prompt_id % 2 == 1

    def counters(self) -> dict[str, float]:
        """Return no failures."""
        return {}

    async def close(self) -> None:
        """Do nothing."""


class EngineProcess:
    """The process of the engine (``WorkerGroup``), which starts with other weights than any run's."""

    def __init__(self, makes: Any, parts: Any, **named: Any) -> None:
        self._observed: Observed = ROOM.attempt.observed

    async def call_each(self, method: str, *given: Any, **named: Any) -> None:
        """Start it."""
        self._observed.engine = Engine()

    async def call_aside(self, method: str) -> list[Any]:
        """Return no measurements; the process lives."""
        return []


@dataclass(frozen=True)
class EngineClient:
    """Control requests to the engine."""

    url: str
    api_key: str
    timeout_s: float
    selector: str = "all"

    async def server_info(self) -> dict[str, str]:
        """Return SGLang's version."""
        return {"version": "0.5.21"}


async def no_failure(*given: Any) -> None:
    """A health check that passes."""


class Connection:
    """Requests to the engine; the real class is in ``rlpost.engines.connection``."""

    def __init__(
        self, engines: Any, *, routes: RouteFormat | None = None, images: None = None
    ) -> None:
        self.engines, self.routes, self.images, self.halted = engines, routes, images, False
        self.newest_version: int | None = None
        self._observed: Observed = ROOM.attempt.observed

    async def __aenter__(self) -> Connection:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def generate(
        self,
        what: str,
        input_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        *,
        images: Sequence[object] = (),
        fields: Any = None,
        watch: Watch | None = None,
        **where: object,
    ) -> Any:
        """Return the rest of one answer, or an aborted part of it when generation is halted.

        ``watch`` gets the tokens one by one, without routes, as from a real engine.
        """
        from rlpost.engines.answer import parse
        from rlpost.engines.connection import Halted

        if self.halted:
            raise Halted
        prompt_id, index = map(int, re.findall(r"\d+", what))
        engine, length = self._observed.engine, answer_length(prompt_id, index)
        start = LONGEST_ANSWER - sampling_params["max_new_tokens"]
        if start >= length:
            length += SECOND_TURN  # an environment has added to the first turn
        ids: list[int] = []
        spans: list[dict[str, int]] = []
        if watch is not None:
            watch.begin()
        while start + len(ids) < length and not self.halted:
            await asyncio.sleep(TOKEN_S * (1 + prompt_id % 3))
            position = start + len(ids)
            is_last = position == length - 1
            # routes of all tokens are those of the newest weights, as recomputed after a retraction
            weights = engine.weights
            newest = self.newest_version
            assert newest is None or engine.version <= newest, "the real connection refuses it"
            if not spans or spans[-1]["version"] != engine.version:
                spans.append({"version": engine.version, "start": len(ids), "end": len(ids)})
            spans[-1]["end"] += 1
            ids.append(EOS if is_last else token(engine.weights, prompt_id, index, position))
            if watch is not None and not is_last:
                watch.add(_streamed(ids[-1], engine.version))
        is_done = start + len(ids) == length
        meta = {
            "finish_reason": {"type": "stop", "matched": EOS} if is_done else {"type": "abort"},
            "output_token_logprobs": [(-one / 97, one, None) for one in ids],
            "weight_versions": spans,
            "weight_version": str(engine.version),
        }
        if self.routes is not None and ids:
            read = range(fields["routed_experts_start_len"], len(input_ids) + len(ids) - 1)
            chosen = [experts(weights, prompt_id, index, position) for position in read]
            meta["routed_experts"] = base64.b64encode(
                np.array(chosen, dtype=np.int32).tobytes()
            ).decode()
        text = "".join(map(chr, (33 + one for one in ids)))
        return parse(
            json.dumps({"output_ids": ids, "text": text, "meta_info": meta}).encode(), self.routes
        )

    async def halt(
        self, running: Sequence[asyncio.Task[Any]], *, must_leave: Callable[[], bool]
    ) -> None:
        """Stop generating; return when all ``running`` tasks are done."""
        self.halted = True
        await asyncio.gather(*running, return_exceptions=True)

    def resume(self) -> None:
        """Allow requests again."""
        self.halted = False


def _streamed(one: int, version: int) -> Answer:
    """A token in progress."""
    text, reason = chr(33 + one), {"type": "abort"}
    return Answer(IntColumn([one]), FloatColumn([-one / 97]), text, reason, ((version, 1),), {})


class Actors:
    """A trainer of one rank."""

    def __init__(self, makes: Any, slots: Any, **named: Any) -> None:
        self.observed: Observed = ROOM.attempt.observed
        self._saving: tuple[float, Path, str] | None = None

    def __len__(self) -> int:
        return 1

    async def processes(self) -> list[Any]:
        """Return no processes: ranks are functions here."""
        return []

    async def dead(self, within_s: float) -> list[int]:
        """Return no ranks: the rank lives as long as the attempt."""
        return []

    async def reorder(self, order: Sequence[int]) -> None:
        """Do nothing: one rank has only one order."""

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call the trainer's ``method``."""
        return await self.call_each(method, [arguments])

    async def call_each(
        self, method: str, arguments: Sequence[Sequence[Any]], **keywords: Any
    ) -> list[Any]:
        """Call it with arguments per rank; an OSError becomes RlpostError, as through Ray."""
        found = getattr(self, f"_{method.replace('.', '_')}", None)
        try:
            return [None if found is None else await found(*arguments[0], **keywords)]
        except OSError as error:
            raise RlpostError(f"actor-0 failed:\n{error}") from None

    call_aside = call

    async def _data_parallel_rank(self) -> int:
        return 0

    async def _memory_use(self) -> dict[str, float]:
        return {}

    async def _weights_hash(self) -> str:
        return self.observed.weights

    async def _versions(self) -> tuple[int, int | None]:
        step, (kept, _) = len(self.observed.history), self.observed.old_policy
        return step, None if kept == step else kept

    async def _load(self, folder: str, *, is_compared: bool = False) -> None:
        state = json.loads((Path(folder) / SHARD).read_text())
        self.observed.weights, self.observed.history = state["weights"], state["history"]
        self.observed.old_policy = tuple(state["old_policy"])

    async def _save(self, folder: str, step: int, *, in_background: bool) -> None:
        seen = self.observed
        state = {"weights": seen.weights, "history": seen.history, "old_policy": seen.old_policy}
        text = json.dumps(state)
        if in_background:
            self._saving = (
                asyncio.get_running_loop().time() + self.observed.save_s,
                Path(folder) / SHARD,
                text,
            )
        else:
            await asyncio.sleep(0.02)
            (Path(folder) / SHARD).write_text(text)

    async def _save_is_done(self) -> bool:
        if self._saving is None:
            return True
        when, path, text = self._saving
        if asyncio.get_running_loop().time() < when:
            return False
        self._saving = None
        path.write_text(text)
        return True


class Calls:
    """Knows of a stop request before a call only."""

    def __init__(self, ranks: Any, stop: Any, hangs: Any = None) -> None:
        self.stop = stop


class Training:
    """Trains on all groups of a rollout in one call."""

    def __init__(
        self, config: Any, actors: Any, data_ranks: Sequence[int], *, calls: Calls, **more: Any
    ) -> None:
        self._observed, self._stop = ROOM.attempt.observed, calls.stop

    async def train(
        self, groups: Sequence[SampleGroup], rollout: int, versions: Any
    ) -> dict[str, float]:
        """Train a step and return its metrics; raises Preempted before it on a stop request."""
        self._stop.check()
        await asyncio.sleep(TRAIN_S)
        seen, batch = self._observed, trained_on(groups)
        seen.trained.append((len(seen.history), digest(json.dumps(batch, sort_keys=True))))
        if seen.journal is not None and seen.journal.is_durable:
            seen.durable.append(seen.trained[-1])
        seen.history = [*seen.history, batch]
        seen.weights = next_weights(seen.weights, batch)
        assert len(seen.history) == rollout, f"rollout {rollout} is trained as another one"
        if versions.engines(rollout) == rollout:
            seen.old_policy = (rollout, seen.weights)
        return {
            "train/loss": 0.5,
            "train/grad_norm": 1.0,
            "train/weights": float(int(seen.weights[:8], 16)),
        }


class WeightCoordinator:
    """Gives the engine the weights of the trainer's last update."""

    num_bytes, engines_are_stuck = 0, False

    def __init__(self, config: Any, engines: Any, actors: Any, *, stop: Any, **more: Any) -> None:
        self.observed: Observed = ROOM.attempt.observed
        self.stop = stop

    async def connect(self) -> None:
        """Do nothing."""

    async def update(
        self, version: int, *, pause: str, ready: Callable[[], Awaitable[None]]
    ) -> None:
        """Send the weights."""
        await asyncio.sleep(SYNC_S)
        self.stop.check()
        kept, weights = self.observed.old_policy
        assert kept == version, f"version {version} is asked for, the trainer has {kept}"
        self.observed.engine.weights, self.observed.engine.version = weights, version
        await ready()

    async def close(self) -> None:
        """Do nothing."""


class WatchedLoop(Loop):
    """The loop; the oracle asks its journal what is durable."""

    def __init__(self, *given: Any, journal: Journal, **named: Any) -> None:
        ROOM.attempt.observed.journal = journal
        super().__init__(*given, journal=journal, **named)


class LoopLag:
    """A watchdog that does nothing.

    Virtual time has no lag, and a thread that never ends would block its starter.
    """

    async def __aenter__(self) -> LoopLag:
        return self

    async def __aexit__(self, *error: object) -> None:
        """Do nothing."""

    def take(self) -> float:
        """Return 0: there is no lag."""
        return 0.0


SLOT = Slot("n", "127.0.0.1", 0)


def layout(*given: Any, **named: Any) -> Placement:
    """Return a placement of one rank and one engine."""
    return Placement((SLOT,), ((SLOT,),))


def ports(*given: Any, **named: Any) -> Ports:
    """Return their ports."""
    return Ports((1,), (2,), 3, (4,))
