"""Harnesses that use the gateway: samples, turn rewards, failures and halts."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import Sequence
from typing import Any

import aiohttp
import numpy as np
import pytest

from rlpost.algorithm.turns import turns_of
from rlpost.engines.connection import Halted
from rlpost.errors import ConfigError, GradingLost, RolloutError
from rlpost.extensions.agents.env_names import parse_envs
from rlpost.extensions.agents.env_table import EnvConfig
from rlpost.extensions.agents.environments.episodes import EnvironmentSet, Episodes
from rlpost.extensions.agents.environments.harness import HarnessRunner
from rlpost.extensions.agents.environments.protocol import Episode, Outcome
from rlpost.rollout.response_builder import ResponseBuilder
from rlpost.tasks.tokenizer import PromptTokenizer
from rlpost.types import Prompt, Sample
from tests.unit.agents.chat_models import write_model
from tests.unit.agents.harness import TOOLS
from tests.unit.agents.test_gateway import SAMPLING, Setup, setup

PROMPT = Prompt(7, "How is the weather?", (), metadata={})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("qwen"), "qwen")


class Asks:
    """Asks the given questions in order, in one conversation."""

    def __init__(self, questions: Sequence[str], given: Any = 1.0) -> None:
        self.questions, self.given = questions, given
        self.keys: list[str] = []
        self.began = self.closed = 0

    def start(self) -> None:
        self.began += 1

    def close(self) -> None:
        self.closed += 1

    async def run(self, episode: Episode) -> Any:
        self.keys.append(episode.api_key)
        messages: list[dict[str, Any]] = []
        for question in self.questions:
            messages.append({"role": "user", "content": question})
            messages.append(await ask(episode, messages))
        return self.given


async def ask(
    episode: Episode, messages: Sequence[dict[str, Any]], **fields: Any
) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {episode.api_key}"}
    body = {"model": episode.model, "messages": list(messages), **fields}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{episode.base_url}/chat/completions", json=body, headers=headers) as answer,
    ):
        answer.raise_for_status()
        return (await answer.json())["choices"][0]["message"]


def episodes(
    made: Setup, harness: Any, record: Any = None, limit_reward: float = 0.0, **settings: Any
) -> Episodes:
    config = EnvConfig(env=("pkg.mod:Talk",), **settings)
    runner = HarnessRunner(
        "pkg.mod:Talk",
        harness,
        made.gateway,
        4,
        max_requests=4,
        limit_reward=limit_reward,
        trains_side_requests=config.env_train_side_requests,
    )
    environments = EnvironmentSet(parse_envs(config.env), {"Talk": runner}, config)
    return Episodes(environments, seed=1, record=record, pause_s=0.001)


def builder(made: Setup, folder: str) -> ResponseBuilder:
    codec = PromptTokenizer(folder, apply_chat_template=False, template_kwargs={})
    return ResponseBuilder(made.connection, PROMPT, SAMPLING, index=3, codec=codec)


def play(
    folder: str,
    harness: Any,
    answers: Sequence[str],
    context_length: int | None = None,
    **settings: Any,
) -> tuple[Sequence[Sample], list[dict[str, Any]]]:
    records: list[dict[str, Any]] = []

    async def played() -> Sequence[Sample]:
        async with setup(folder, answers) as made:
            made.gateway.policy.longest_request = context_length
            function = episodes(made, harness, records.append, **settings)
            found = await function(builder(made, folder), PROMPT, SAMPLING)
            await function._environments.close()
            return found

    return asyncio.run(asyncio.wait_for(played(), 60)), records


def test_a_conversation_of_a_harness_is_one_sample_with_the_rewards_of_its_turns(
    folder: str,
) -> None:
    harness = Asks(["first?", "second?"], Outcome(1.0, (0.25, 0.5), {"kind": "test"}))
    (sample,), (record,) = play(folder, harness, ["one", "two"], env_reward="turn")
    assert (sample.prompt_id, sample.index) == (7, 3)
    assert sample.extra["reward"] == 1.75 and sample.extra["num_turns"] == 2
    first, second = turns_of(sample.extra) or ()
    assert (first.reward, second.reward) == (0.25, 1.5)
    trained = {at for turn in (first, second) for at in range(turn.start, turn.end)}
    assert trained == {at for at, mask in enumerate(sample.mask) if mask}
    assert [turn["text"] for turn in record["turns"]] == ["one", "two"]
    assert "second?" in record["turns"][0]["said"] and record["info"] == {"kind": "test"}
    assert (harness.began, harness.closed) == (1, 1)


class Titled(Asks):
    """Asks for a title, works with tools, and has its work summarised without them."""

    async def run(self, episode: Episode) -> Any:
        await ask(episode, [{"role": "user", "content": "Write a title."}])
        messages: list[dict[str, Any]] = [{"role": "user", "content": "How is the weather?"}]
        for question in self.questions:
            messages.append(await ask(episode, messages, tools=TOOLS))
            messages.append({"role": "user", "content": question})
        await ask(episode, [*messages[:-1], {"role": "user", "content": "Summarise."}])
        return self.given


@pytest.mark.parametrize(
    ("train", "given", "questions", "trained"),
    [
        (False, 1.0, ["a", "b"], ["one", "two", "summary"]),
        (True, 1.0, ["a", "b"], ["title", "one", "two", "summary"]),
        (False, Outcome(0.0, (0.5,)), ["a", "b"], ["title", "one", "two", "summary"]),
        (False, 1.0, [], ["title", "summary"]),  # nothing has tools
    ],
)
def test_requests_beside_the_task_are_left_out_of_training_and_recorded(
    folder: str, train: bool, given: Any, questions: list[str], trained: list[str]
) -> None:
    harness = Titled(questions, given)
    answers = ["title", *["one", "two"][: len(questions)], "summary"]
    samples, (record,) = play(folder, harness, answers, env_train_side_requests=train)
    texts = [turn["text"] for turn in record["turns"]]
    assert texts == trained
    assert sorted("\n".join(sample.text for sample in samples).split("\n")) == sorted(trained)
    left_out = record.get("side_requests", [])
    assert sorted(texts + [each["text"] for each in left_out]) == sorted(answers)
    assert all(each["tokens"] > 0 for each in left_out)


@pytest.mark.parametrize(
    ("rewards", "message", "error"),
    [
        ((0.5, float("nan")), r"turn_rewards\[1\] of run is nan", GradingLost),
        ((0.5, None), r"turn_rewards\[1\] of run is None", ConfigError),
        ((1, 2, 3), "3 turn_rewards for 2 answered requests", ConfigError),
    ],
)
def test_turn_rewards_are_finite_and_at_most_as_many_as_answers(
    folder: str, rewards: Sequence[Any], message: str, error: type[Exception]
) -> None:
    harness = Asks(["first?", "second?"], Outcome(1.0, rewards))
    with pytest.raises(error, match=message):
        play(folder, harness, ["one", "two"], env_retries=0)


def test_turn_rewards_of_numpy_become_numbers_of_json(folder: str) -> None:
    rewards = Outcome(np.float32(1.0), (np.float32(0.25),))
    (sample,), (record,) = play(folder, Asks(["a?"], rewards), ["one"], env_reward="turn")
    assert json.loads(json.dumps(dict(sample.extra)))["reward"] == 1.25
    assert json.loads(json.dumps(record))["reward"] == 1.25


@pytest.mark.parametrize(
    ("limit", "answer", "num_turns"), [("requests", "one", 4), ("context", "Fine. " * 60, 1)]
)
def test_an_episode_that_its_policy_drives_into_a_limit_is_scored_and_not_repeated(
    folder: str, limit: str, answer: str, num_turns: int
) -> None:
    """The client raises at the refusal; aiohttp's as those of OpenAI and Anthropic."""
    harness = Asks(["again?"] * 5)
    samples, (record,) = play(folder, harness, [answer] * 9, limit_reward=-0.5, context_length=99)
    assert len(harness.keys) == 1
    assert [sample.extra["reward"] for sample in samples] == [-0.5]
    assert [sample.finish_reason for sample in samples] == ["length"]
    assert (record["outcome"], record["limit"]) == ("scored", limit)
    assert len(record["turns"]) == num_turns and "400" in record["info"]["error"]


def test_a_prompt_that_exceeds_the_context_before_any_answer_is_left_out(folder: str) -> None:
    with pytest.raises(GradingLost, match="400"):
        play(folder, Asks(["long " * 99]), [], context_length=99, env_retries=0)


class Branches(Asks):
    """Two conversations with one key."""

    async def run(self, episode: Episode) -> Any:
        await ask(episode, [{"role": "user", "content": "a?"}])
        await ask(episode, [{"role": "user", "content": "b?"}])
        return 0.5


def test_branches_are_samples_of_one_answer_with_one_reward(folder: str) -> None:
    samples, (record,) = play(folder, Branches([]), ["one", "two"])
    assert [sample.index for sample in samples] == [3, 3]
    assert [sample.extra["reward"] for sample in samples] == [0.5, 0.5]
    assert [turn.get("branch", 0) for turn in record["turns"]] == [0, 1]
    causes = [turn.get("cause") for turn in record["turns"]]
    assert causes == [None, "message 0 (user) differs from that of an earlier request"]


class Plain:
    """A synchronous harness."""

    def run(self, episode: Episode) -> float:
        body = {"model": "any", "messages": [{"role": "user", "content": "a?"}]}
        request = urllib.request.Request(
            f"{episode.base_url}/chat/completions",
            json.dumps(body).encode(),
            {"Authorization": f"Bearer {episode.api_key}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            said = json.load(answer)["choices"][0]["message"]["content"]
        return float(said == "one")


def test_a_blocking_harness_runs_outside_the_event_loop(folder: str) -> None:
    (sample,), _ = play(folder, Plain(), ["one"])
    assert sample.extra["reward"] == 1.0


class Fails(Asks):
    """Fails after its first question in the first ``times`` runs."""

    def __init__(self, times: int) -> None:
        super().__init__(["a?"])
        self.times = times

    async def run(self, episode: Episode) -> Any:
        reward = await super().run(episode)
        if len(self.keys) <= self.times:
            raise OSError("the container is gone")
        return reward


def test_a_failed_harness_is_restarted_with_a_new_key(folder: str) -> None:
    harness = Fails(2)
    (sample,), records = play(folder, harness, ["one", "two", "three"], env_retries=2)
    assert sample.text == "three" and len(set(harness.keys)) == 3
    assert [record["outcome"] for record in records] == ["failed", "failed", "scored"]
    with pytest.raises(GradingLost, match="the container is gone"):
        play(folder, Fails(9), ["one", "two"], env_retries=1)


def test_a_harness_without_requests_or_without_a_reward_is_reported(folder: str) -> None:
    with pytest.raises(GradingLost, match="without a request to the model"):
        play(folder, Asks([]), [], env_retries=0)
    with pytest.raises(ConfigError, match="run is None; it must be a finite number"):
        play(folder, Asks(["a?"], None), ["one"])


async def test_a_failed_engine_ends_the_run_although_the_harness_hides_it(folder: str) -> None:
    class Hides(Asks):
        async def run(self, episode: Episode) -> float:
            try:
                return await super().run(episode)
            except aiohttp.ClientError:
                return 0.0

    with pytest.raises(RolloutError):
        async with asyncio.timeout(60):
            async with setup(folder) as made:
                made.engine.unavailable, made.engine.unavailable_status = 99, 400
                function = episodes(made, Hides(["a?"]))
                await function(builder(made, folder), PROMPT, SAMPLING)


def test_a_halt_cancels_a_waiting_harness(folder: str) -> None:
    ended: list[int] = []

    class Waits(Asks):
        async def run(self, episode: Episode) -> float:
            await super().run(episode)
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(1)
            return 1.0

    async def halted() -> float:
        async with setup(folder, ["one"]) as made:
            harness = Waits(["a?"])
            function = episodes(made, harness)
            task = asyncio.ensure_future(function(builder(made, folder), PROMPT, SAMPLING))
            while not harness.keys or made.engine.under_way or not made.engine.bodies:
                await asyncio.sleep(0.01)
            began = time.monotonic()
            await made.connection.halt([task], must_leave=lambda: True)
            with pytest.raises(Halted):
                task.result()
            return time.monotonic() - began

    assert asyncio.run(asyncio.wait_for(halted(), 60)) < 5.0
    assert ended == [1]


def test_a_key_is_invalid_after_its_episode(folder: str) -> None:
    async def again() -> int:
        async with setup(folder, ["one"]) as made:
            seen: list[Episode] = []

            class Keeps(Asks):
                async def run(self, episode: Episode) -> Any:
                    seen.append(episode)
                    return await super().run(episode)

            await episodes(made, Keeps(["a?"]))(builder(made, folder), PROMPT, SAMPLING)
            with pytest.raises(aiohttp.ClientResponseError) as caught:
                await ask(seen[0], [{"role": "user", "content": "a?"}])
            return caught.value.status

    assert asyncio.run(asyncio.wait_for(again(), 60)) == 401
