"""Episodes of plain environments: play, retries, exclusion, halts and records."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from rlpost.config.groups.grpo import GrpoConfig
from rlpost.config.groups.rollout import RolloutConfig
from rlpost.driver.batches import rollout_advantages
from rlpost.engines.connection import Connection, Halted, RunEngines
from rlpost.errors import ConfigError, GradingLost, RolloutError
from rlpost.extensions.agents.env_names import parse_envs
from rlpost.extensions.agents.env_table import EnvConfig
from rlpost.extensions.agents.environments.episodes import EnvironmentSet, Episodes
from rlpost.extensions.agents.environments.plain import PlainRunner
from rlpost.extensions.agents.environments.protocol import Step, Turn
from rlpost.extensions.agents.examples.calculator import Calculator
from rlpost.extensions.agents.examples.guess import Guess
from rlpost.rollout.episode_metrics import episode_metrics
from rlpost.rollout.generate import GroupWriter
from rlpost.rollout.response_builder import ResponseBuilder
from rlpost.rollout.sampling import SamplingParams
from rlpost.tasks.reward.given import GivenRewards
from rlpost.tasks.reward.grader import InlineGrader
from rlpost.types import Prompt, SampleGroup, Unfinished
from tests.unit.rollout.fake_engine import KEY, FakeEngine, generated, serving

SAMPLING = SamplingParams(max_new_tokens=40, stop_token_ids=(1,))
CHARACTERS = "\x00\x01" + "0123456789abcdefghijklmnopqrstuvwxyz+-*=?:. !"


class Letters:
    """A codec with one token per character."""

    def encode(self, text: str) -> list[int]:
        return [CHARACTERS.index(letter) for letter in text]

    def decode(self, ids: Any) -> str:
        return "".join(CHARACTERS[number] for number in ids if number > 1)


CODEC = Letters()


def prompt(text: str = "q", prompt_id: int = 5, **metadata: Any) -> Prompt:
    return Prompt(prompt_id, text, CODEC.encode(text), label="12", metadata=metadata)


class Script(FakeEngine):
    """An engine that generates the given turns in order."""

    def __init__(self, *turns: str) -> None:
        super().__init__(answer=self._next)
        self.turns, self.asked = list(turns), []

    def _next(self, body: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(CODEC.decode(body["input_ids"]))
        text = self.turns.pop(0)
        stops = body["sampling_params"].get("stop") or ()
        stop = next((each for each in stops if text.endswith(each)), None)
        ids = CODEC.encode(text) if stop else [*CODEC.encode(text), 1]
        made = generated(ids, version="3", text=text.removesuffix(stop) if stop else text)
        made["meta_info"]["finish_reason"]["matched"] = stop or 1
        return made


def environments(make: Any, **settings: Any) -> EnvironmentSet:
    config = EnvConfig(env=("pkg.mod:Game",), **settings)
    runner = PlainRunner("pkg.mod:Game", make, config.env_max_turns)
    return EnvironmentSet(parse_envs(config.env), {"Game": runner}, config)


@asynccontextmanager
async def connected(engine: FakeEngine):
    async with (
        serving(engine),
        Connection(RunEngines.of([engine.url], KEY, capacity=64)) as connection,
    ):
        yield connection


async def play(engine: FakeEngine, make: Any, *, given: Prompt | None = None, **settings: Any):
    """Play one episode; returns its samples, the function and the records."""
    records: list[dict[str, Any]] = []
    given = given or prompt()
    async with connected(engine) as connection:
        function = Episodes(
            environments(make, **settings), seed=1, record=records.append, pause_s=0.001
        )
        builder = ResponseBuilder(connection, given, SAMPLING, index=2, codec=CODEC)
        return await function(builder, given, SAMPLING), function, records


def test_a_tool_episode_is_one_sample_whose_tool_text_is_masked() -> None:
    engine = Script("=", "")
    (made,), _, (record,) = asyncio.run(play(engine, Calculator, given=prompt("q:07+05")))
    assert engine.asked == ["q:07+05", "q:07+05=12"]
    assert CODEC.decode(made.response_ids) == "=12"
    assert list(made.mask) == [1, 0, 0, 1]
    assert made.extra == {"env": "Game", "reward": 1.0, "num_turns": 2}
    assert (made.prompt_id, made.index, made.policy_version) == (5, 2, 3)
    assert record["outcome"] == "scored" and record["reward"] == 1.0
    assert [turn["text"] for turn in record["turns"]] == ["", ""]
    assert record["turns"][0]["said"] == "12" and record["turns"][0]["tool"] == "calculator"
    assert (record["tokens"], record["trained_tokens"]) == (4, 2)
    assert record["versions"] == [(3, 4)] and record["env"] == "Game"


def test_rewards_of_turns_are_kept_with_their_tokens() -> None:
    class Steps:
        def reset(self, prompt):
            return "a="

        async def step(self, turn):
            return Step("+", reward=turn.number + 0.5, done=turn.number == 1)

        async def score(self):
            return 10.0

    (made,), _, _ = asyncio.run(play(Script("1", "22"), Steps, env_reward="turn"))
    assert CODEC.decode(made.response_ids) == "a=1+22"
    assert list(made.mask) == [0, 0, 1, 1, 0, 1, 1, 1]
    assert made.extra["turn_rewards"] == [[2, 4, 0.5, 0], [5, 8, 11.5, 1]]
    assert made.extra["reward"] == 12.0


def test_guesses_end_at_the_secret_and_each_wrong_one_costs_reward() -> None:
    secret = Guess()
    secret.reset(prompt())
    wanted = next(
        number
        for number in range(10)
        if secret.step(Turn(0, str(number), (), "stop", 1)).reward == 1.0
    )
    wrong = (wanted + 5) % 10
    (made,), _, (record,) = asyncio.run(play(Script(str(wrong), str(wanted)), Guess))
    hint = "+" if wrong < wanted else "-"
    assert CODEC.decode(made.response_ids) == f"={wrong}{hint}={wanted}"
    assert made.extra["reward"] == pytest.approx(0.9) and len(record["turns"]) == 2


def test_an_episode_ends_at_the_limit_of_its_turns() -> None:
    class Endless:
        def reset(self, prompt):
            return None

        def step(self, turn):
            return Step("+")

    (made,), _, _ = asyncio.run(play(Script("1", "2", "3"), Endless, env_max_turns=3))
    assert made.extra["num_turns"] == 3


@pytest.mark.parametrize(
    ("said", "done", "finish_reason"),
    [("+" * 99, False, "length"), ("+" * 38, False, "length"), ("+" * 99, True, "stop")],
)
def test_an_episode_that_leaves_no_token_for_another_turn_is_truncated(
    said: str, done: bool, finish_reason: str
) -> None:
    """OpenRLHF#1327, tinker-cookbook#506: the last turn ended by itself, the episode did not."""

    class Talks:
        def reset(self, prompt):
            return None

        def step(self, turn):
            return Step(said, done=done)

    (made,), _, (record,) = asyncio.run(play(Script("1", "2"), Talks))
    assert (made.finish_reason, record["finish"]) == (finish_reason, [finish_reason])


class Unlucky:
    """An environment that raises the given failures, one per episode."""

    def __init__(self, failures: list[Exception], closed: list[int]) -> None:
        self._failures, self._closed = failures, closed

    def reset(self, prompt: Prompt) -> None:
        return None

    def step(self, turn: Turn) -> Step:
        if self._failures:
            raise self._failures.pop(0)
        return Step(reward=1.0, done=True)

    def close(self) -> None:
        self._closed.append(1)


FAILURES = [GradingLost("the sandbox is gone"), ConnectionRefusedError("no"), KeyError("a bug")]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda each: type(each).__name__)
def test_a_failure_outside_the_answer_restarts_the_episode(failure: Exception) -> None:
    closed: list[int] = []
    failures = [failure, failure]
    engine = Script("1", "2", "3")
    (made,), function, records = asyncio.run(play(engine, lambda: Unlucky(failures, closed)))
    assert CODEC.decode(made.response_ids) == "3", "no token of a failed attempt is left"
    assert function.counters() == {
        "env/episodes_failed": 2.0,
        "env/episodes_masked": 0.0,
        "env/episodes_timed_out": 0.0,
    }
    assert [record["outcome"] for record in records] == ["failed", "failed", "scored"]
    assert len(closed) == 3


def test_the_first_failure_for_a_reason_is_named_and_later_ones_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each is a line on the user's terminal."""
    failures = [*(GradingLost(f"node {number} is gone") for number in range(5)), KeyError("a bug")]
    engine = Script(*map(str, range(7)))
    asyncio.run(play(engine, lambda: Unlucky(failures, []), env_retries=6))
    assert [each.getMessage() for each in caplog.records] == [
        "prompt 5: an episode of Game failed: node 0 is gone",
        "prompt 5: an episode of Game failed (2 times for this reason): node 1 is gone",
        "prompt 5: an episode of Game failed (4 times for this reason): node 3 is gone",
        "prompt 5: an episode of Game failed: KeyError: 'a bug'",
    ]


def test_retries_are_bounded_and_the_episode_is_left_out_of_its_group() -> None:
    """The remaining answers have the advantages that they would have without it."""
    failing = 2

    class Sometimes:
        def info(self) -> str:  # not that of an episode's record
            return ""

        def reset(self, given: Prompt) -> None:
            return None

        def step(self, turn: Turn) -> Step:
            if turn.text.startswith("lost"):
                raise GradingLost("the node of the sandbox is gone")
            return Step(reward=float(len(turn.text)), done=True)

    def answers(body: dict[str, Any]) -> dict[str, Any]:
        number = next(numbers)
        text = "lost" if number == failing or number >= 4 else "x" * (number + 1)
        return generated([*CODEC.encode(text), 1], text=text)

    numbers = iter(range(100))

    async def write() -> tuple[SampleGroup | Unfinished, dict[str, float]]:
        async with connected(FakeEngine(answer=answers)) as connection:
            function = Episodes(
                environments(Sometimes, env_retries=1), seed=1, record=lambda _: None, pause_s=0.001
            )
            grader = GivenRewards(InlineGrader(lambda *_: 99.0), RolloutConfig())
            writer = GroupWriter(
                connection, SAMPLING, n=4, grader=grader, function=function, codec=CODEC
            )
            return await writer.write(Unfinished(prompt())), function.counters()

    group, counts = asyncio.run(write())
    assert isinstance(group, SampleGroup)
    assert sorted(group.rewards) == [1.0, 2.0, 4.0], "neither the grader's reward nor a 0"
    assert counts["env/episodes_masked"] == 1.0 and counts["env/episodes_failed"] == 2.0
    without = SampleGroup(group.prompt_id, group.samples)
    assert (
        rollout_advantages([group], GrpoConfig())
        == rollout_advantages([without], GrpoConfig())
        == [pytest.approx(expected_advantages(group.rewards))]
    )
    assert episode_metrics([group]) == {
        "env/task_tokens": 10.0,
        "env/side_tokens": 0.0,
        "env/Game/episodes": 3.0,
        "env/Game/reward_mean": pytest.approx(7 / 3),
        "env/Game/turns_mean": 1.0,
        "env/Game/tokens_mean": pytest.approx((2 + 3 + 5) / 3),
    }


def expected_advantages(rewards: tuple[float, ...]) -> tuple[float, ...]:
    mean = sum(rewards) / len(rewards)
    std = (sum((each - mean) ** 2 for each in rewards) / (len(rewards) - 1)) ** 0.5
    return tuple((each - mean) / (std + 1e-6) for each in rewards)


def test_an_episode_that_takes_too_long_is_left_out_at_once() -> None:
    class Slow:
        def reset(self, given: Prompt) -> None:
            return None

        async def step(self, turn: Turn) -> Step:
            await asyncio.sleep(60)
            return Step()

    engine = Script("1")
    with pytest.raises(GradingLost, match=r"--env-timeout-s 0\.05"):
        asyncio.run(play(engine, Slow, env_timeout_s=0.05, env_retries=5))
    assert len(engine.asked) == 1


def test_a_timeout_inside_the_environment_is_not_an_episode_timeout() -> None:
    failures: list[Exception] = [TimeoutError("its server")]
    (made,), function, _ = asyncio.run(play(Script("1", "2"), lambda: Unlucky(failures, [])))
    counts = function.counters()
    assert counts["env/episodes_failed"] == 1.0 and counts["env/episodes_timed_out"] == 0.0
    assert made.extra["reward"] == 1.0


def test_a_halt_cancels_a_working_environment_and_closes_it(monkeypatch) -> None:
    monkeypatch.setattr("rlpost.extensions.agents.environments.calls.POLL_S", 0.02)
    closed: list[int] = []
    at_work = threading.Event()

    class Working:
        def reset(self, given: Prompt) -> None:
            return None

        async def step(self, turn: Turn) -> Step:
            at_work.set()
            await asyncio.sleep(60)
            return Step()

        def close(self) -> None:
            closed.append(1)

    async def halted() -> Any:
        async with connected(Script("1")) as connection:
            function = Episodes(environments(Working), seed=1, record=records.append)
            given = InlineGrader(lambda *_: 0.0)
            grader = GivenRewards(given, RolloutConfig())
            writer = GroupWriter(
                connection, SAMPLING, n=1, grader=grader, function=function, codec=CODEC
            )
            task = asyncio.ensure_future(writer.write(Unfinished(prompt())))
            while not at_work.is_set():
                await asyncio.sleep(0.01)
            began = time.monotonic()
            await connection.halt([task], must_leave=lambda: True)
            return task.result(), time.monotonic() - began

    records: list[dict[str, Any]] = []
    left, seconds = asyncio.run(asyncio.wait_for(halted(), 30))
    assert left == Unfinished(prompt()), "it is generated again from its prompt"
    assert closed == [1] and records == [] and seconds < 20.0


async def test_no_more_episodes_run_at_once_than_allowed() -> None:
    most = now = 0

    class Counted:
        async def reset(self, given: Prompt) -> None:
            nonlocal most, now
            now += 1
            most = max(most, now)

        async def step(self, turn: Turn) -> Step:
            await asyncio.sleep(0.001)
            return Step(done=True)

        def close(self) -> None:
            nonlocal now
            now -= 1

    async with connected(FakeEngine()) as connection:
        function = Episodes(environments(Counted, env_concurrency=3), seed=1)
        await asyncio.gather(
            *(
                function(
                    ResponseBuilder(connection, prompt(), SAMPLING, index=n, codec=CODEC),
                    prompt(),
                    SAMPLING,
                )
                for n in range(12)
            )
        )
    assert most == 3 and now == 0


@pytest.mark.parametrize(
    ("given", "told", "error"),
    [
        ("text", "step returned 'text'", ConfigError),
        (Step(reward="much"), "the reward of step is 'much'", ConfigError),
        (Step(reward=float("nan")), "the reward of step is nan", GradingLost),
        (Step(reward=10**400), "the reward of step is 1000", GradingLost),
    ],
)
def test_an_invalid_result_of_an_environment_ends_the_run_and_no_finite_reward_the_episode(
    given: Any, told: str, error: type[Exception]
) -> None:
    """A policy may bring an environment to divide 0 by 0."""

    class Wrong:
        def reset(self, prompt):
            return None

        def step(self, turn):
            return given

    with pytest.raises(error, match=r"--env pkg.mod:Game") as caught:
        asyncio.run(play(Script("1", "1", "1"), Wrong))
    assert told in str(caught.value)


def test_a_failed_engine_ends_the_run_and_is_not_retried() -> None:
    engine = FakeEngine(unavailable=100, unavailable_status=400)
    with pytest.raises(RolloutError):
        asyncio.run(play(engine, Calculator))
    assert len(engine.bodies) == 1


async def test_a_halted_connection_is_noticed_before_the_first_request() -> None:
    with pytest.raises(Halted):
        async with connected(FakeEngine()) as connection:
            connection.halted = True
            builder = ResponseBuilder(connection, prompt(), SAMPLING, codec=CODEC)
            await Episodes(environments(Calculator), seed=1)(builder, prompt(), SAMPLING)


def test_answers_without_episodes_have_no_episode_metrics() -> None:
    plain = SimpleNamespace(extra={}, index=0, response_ids=())
    group = SimpleNamespace(prompt_id=1, samples=[SimpleNamespace(sample=plain, reward=1.0)])
    assert episode_metrics([group]) == {}  # type: ignore[list-item]


@pytest.mark.parametrize("hangs", [False, True])
def test_an_environment_that_cannot_be_closed_keeps_its_result(monkeypatch, hangs: bool) -> None:
    monkeypatch.setattr("rlpost.extensions.agents.environments.calls.CLOSE_S", 0.05)

    class Sticky:
        def reset(self, given: Prompt) -> str:
            return "a="

        def step(self, turn: Turn) -> Step:
            return Step(reward=1.0, done=True)

        async def close(self) -> None:
            if hangs:
                await asyncio.sleep(60)
            raise OSError("the server is gone")

    (made,), function, (record,) = asyncio.run(play(Script("1"), Sticky))
    assert made.extra["reward"] == 1.0
    assert function.counters()["env/episodes_failed"] == 0.0
    assert record["turns"][0]["before"] == "a="


def test_a_runner_whose_start_failed_is_started_again() -> None:
    class Late(PlainRunner):
        failures: ClassVar[list[int]] = [1]

        async def start(self) -> None:
            if self.failures:
                self.failures.pop()
                raise ConnectionRefusedError("not yet")

    async def played() -> Any:
        async with connected(Script("=", "")) as connection:
            config = EnvConfig(env=("pkg.mod:Game",))
            late = Late("pkg.mod:Game", Calculator, 4)
            function = Episodes(
                EnvironmentSet(parse_envs(config.env), {"Game": late}, config),
                seed=1,
                pause_s=0.001,
            )
            given = prompt("q:07+05")
            builder = ResponseBuilder(connection, given, SAMPLING, codec=CODEC)
            return await function(builder, given, SAMPLING), function.counters()

    (made,), counts = asyncio.run(played())
    assert made.extra["reward"] == 1.0 and counts["env/episodes_failed"] == 1.0
