"""Groups are complete, ordered and scored; a stop leaves no request running."""

import asyncio
import gc
import itertools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from rlpost.algorithm.evaluation_statistics import pass_at_k
from rlpost.durable import journal_format
from rlpost.durable.group_records import group_from, group_record
from rlpost.durable.journal_format import group_content
from rlpost.engines import connection
from rlpost.engines.connection import Connection, Halted, RunEngines
from rlpost.errors import ConfigError, GradingLost, Preempted, RolloutError
from rlpost.rollout import generate
from rlpost.rollout.evaluate import evaluate
from rlpost.rollout.generate import MAX_GENERATIONS, GroupWriter
from rlpost.rollout.sampling import SamplingParams
from rlpost.tasks.reward.grader import InlineGrader
from rlpost.types import Prompt, Sample, SampleGroup, ScoredSample, Unfinished
from tests.unit.rollout.fake_engine import KEY, FakeEngine, generate_groups, generated, serving

NO_CONNECTION = SimpleNamespace(routes=None)
SAMPLING = SamplingParams(max_new_tokens=8, stop_token_ids=(1,))


def prompts(*ids: int) -> list[Prompt]:
    return [Prompt(i, f"p{i}", (i, 50, 60), label=f"60 50 {i}", metadata={"id": i}) for i in ids]


def score(text: str, label: str | None, metadata: Mapping[str, Any]) -> float:
    return float(text == label) + metadata["id"]


def engines_of(engine: FakeEngine, concurrency: int = 64) -> RunEngines:
    return RunEngines.of([engine.url], KEY, capacity=concurrency, patience_s=0.5)


async def run(
    engine: FakeEngine, given: list[Prompt], *, n: int = 3, concurrency: int = 64, **more
) -> Any:
    async with serving(engine):
        options = {"grader": InlineGrader(score), "stop_requested": lambda: False, **more}
        return await generate_groups(
            given, SAMPLING, n=n, engines=engines_of(engine, concurrency), **options
        )


def test_groups_are_complete_ordered_and_scored() -> None:
    engine = FakeEngine(version="12")
    groups: list[SampleGroup] = asyncio.run(run(engine, prompts(9, 2, 5)))
    assert [group.prompt_id for group in groups] == [2, 5, 9]
    for group in groups:
        assert [scored.sample.index for scored in group.samples] == [0, 1, 2]
        for scored in group.samples:
            sample = scored.sample
            assert sample.prompt_ids == (group.prompt_id, 50, 60)
            assert sample.response_ids == (60, 50, group.prompt_id)
            assert sample.rollout_logprobs == (-0.5, -1.0, -1.5)
            assert (sample.policy_version, sample.finish_reason) == (12, "stop")
            assert scored.reward == 1.0 + group.prompt_id
    body = engine.bodies[0]
    assert body["return_logprob"] is True
    assert body["sampling_params"]["stop_token_ids"] == [1]


def deterministic(body: dict[str, Any]) -> dict[str, Any]:
    """Draw by seed and position alone, as SGLang with --enable-deterministic-inference."""
    seed = body["sampling_params"].get("sampling_seed", 42)
    first = len(body["input_ids"])
    ids = [random.Random(f"{seed}/{at}").randrange(64) for at in range(first, first + 8)]
    return generated(ids, text=" ".join(map(str, ids)))


def answers_of_a_deterministic_engine(seed: int) -> list[tuple[int, ...]]:
    engine = FakeEngine(answer=deterministic)
    sampling = replace(SAMPLING, seed=seed)

    async def whole() -> list[SampleGroup]:
        async with serving(engine):
            return await generate_groups(
                prompts(1, 2),
                sampling,
                n=16,
                engines=engines_of(engine),
                grader=InlineGrader(score),
                stop_requested=lambda: False,
            )

    groups = asyncio.run(whole())
    return [tuple(scored.sample.response_ids) for group in groups for scored in group.samples]


def test_the_answers_of_a_deterministic_engine_differ_and_can_be_repeated() -> None:
    """verl-project/verl#6857: without seeds all answers to a prompt are the same one."""
    first = answers_of_a_deterministic_engine(7)
    assert len(set(first)) == 32
    assert answers_of_a_deterministic_engine(7) == first
    assert not set(answers_of_a_deterministic_engine(8)) & set(first)


def test_no_more_requests_are_in_flight_than_allowed() -> None:
    engine = FakeEngine()
    asyncio.run(run(engine, prompts(*range(20)), n=4, concurrency=5))
    assert engine.log.count("generate") == 80
    assert 1 <= engine.most_under_way <= 5


async def test_a_stop_aborts_everything_and_is_preempted() -> None:
    async with asyncio.timeout(20):
        engine = FakeEngine(holds=asyncio.Event())
        with pytest.raises(Preempted, match="0 of 2 groups"):
            await run(engine, prompts(1, 2), stop_requested=lambda: engine.under_way == 6)
    assert engine.log[-1] == "abort_request"
    assert engine.bodies[-1] == {"abort_all": True}
    assert engine.under_way == 0


def test_a_stop_that_the_grader_notices_first_is_a_preemption_as_well() -> None:
    """The grader polls for the stop request too, and may notice it before the waiting caller."""

    class Stopped(InlineGrader):
        async def grade(self, prompt: Prompt, samples: Any) -> list[float]:
            if prompt.prompt_id == 2:
                raise Halted
            return await super().grade(prompt, samples)

    with pytest.raises(Preempted, match="1 of 2 groups"):
        asyncio.run(run(FakeEngine(), prompts(1, 2), grader=Stopped(score)))


def test_a_stop_before_the_start_sends_nothing() -> None:
    engine = FakeEngine()
    with pytest.raises(Preempted):
        asyncio.run(run(engine, prompts(1), stop_requested=lambda: True))
    assert "generate" not in engine.log


@pytest.mark.parametrize("status", [503, 499], ids=["no engine", "aborted before it began"])
def test_a_request_that_no_engine_started_is_retried(
    monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(connection, "FIRST_PAUSE_S", 0.001)
    engine = FakeEngine(unavailable=3, unavailable_status=status)
    assert len(asyncio.run(run(engine, prompts(1), n=1))) == 1
    assert engine.log.count("generate") == 4


def test_retries_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "FIRST_PAUSE_S", 0.001)
    engine = FakeEngine(unavailable=10**6)
    with pytest.raises(RolloutError, match=r"prompt 4, .*503"):
        asyncio.run(run(engine, prompts(4), n=1))
    assert engine.log.count("generate") > 3


def test_generation_time_does_not_count_against_the_patience(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A long answer whose engine dies is retried as patiently as a short one."""
    monkeypatch.setattr(connection, "FIRST_PAUSE_S", 0.01)

    class DiesLate(FakeEngine):
        async def generate(self, body: dict[str, Any]) -> Any:
            if self.unavailable:
                await asyncio.sleep(0.7)  # longer than ``patience_s``
            return await super().generate(body)

    groups = asyncio.run(run(DiesLate(unavailable=1), prompts(1), n=1))
    assert len(groups[0].samples) == 1


def test_an_unreachable_engine_is_finally_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "FIRST_PAUSE_S", 0.001)
    nowhere = RunEngines.of(["http://127.0.0.1:9"], KEY, capacity=4, patience_s=0.05)
    with pytest.raises(RolloutError, match=r"127\.0\.0\.1:9: prompt 1, .*does not answer"):
        asyncio.run(
            generate_groups(
                prompts(1),
                SAMPLING,
                n=1,
                engines=nowhere,
                grader=InlineGrader(score),
                stop_requested=lambda: False,
            )
        )


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        (
            generated([], reason="abort"),
            "aborted prompt 3, sample 0 100 times before the first token",
        ),
        (generated([1], version="default"), "version 'default'"),
    ],
)
def test_an_answer_that_cannot_be_trained_on_is_refused(
    answer: dict[str, Any], wanted: str
) -> None:
    with pytest.raises(RolloutError, match=wanted):
        asyncio.run(run(FakeEngine(answer=lambda body: answer), prompts(3), n=1))


@pytest.mark.parametrize("kind", ["text/html", "application/json"])
def test_an_answer_of_another_server_is_reported(kind: str) -> None:
    class Proxy(FakeEngine):
        async def generate(self, body: dict[str, Any]) -> Any:
            return web.Response(text="<html>", content_type=kind)

    with pytest.raises(
        RolloutError, match=r"engine http://.*: prompt 3, sample 0 .*without a valid answer"
    ):
        asyncio.run(run(Proxy(), prompts(3), n=1))


def test_one_failure_aborts_the_others() -> None:
    def answer(body: dict[str, Any]) -> dict[str, Any]:
        return generated([1], version="bad" if body["input_ids"][0] == 2 else "0")

    engine = FakeEngine(answer=answer)
    with pytest.raises(RolloutError, match="version 'bad'"):
        asyncio.run(run(engine, prompts(*range(50)), n=1, concurrency=1))
    assert engine.log[-1] == "abort_request"
    assert engine.log.count("generate") < 50


async def test_no_unretrieved_exceptions_are_left_in_the_event_loop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Neither a stop nor several failures at once leave an unretrieved exception."""
    with pytest.raises(Preempted):
        engine = FakeEngine(holds=asyncio.Event())
        await run(engine, prompts(1, 2), stop_requested=lambda: engine.under_way == 6)
    with pytest.raises(RolloutError):
        await run(FakeEngine(answer=lambda body: generated([1], version="bad")), prompts(1, 2))
    gc.collect()
    assert [record for record in caplog.records if record.name == "asyncio"] == []


def test_evaluation_is_the_mean_over_all_samples() -> None:
    def answer(body: dict[str, Any]) -> dict[str, Any]:
        return (
            generated([1] * 4, text="right")
            if body["input_ids"][0] == 1
            else generated([1] * 8, reason="length")
        )

    shown: list[tuple[int, list[str]]] = []

    def show(groups: Sequence[SampleGroup]) -> None:
        for group in groups:
            shown.append((group.prompt_id, [one.sample.text for one in group.samples]))

    async def evaluated() -> dict[str, float]:
        engine = FakeEngine(answer=answer)
        grader = InlineGrader(lambda text, label, metadata: float(text == "right"))
        async with serving(engine), Connection(engines_of(engine)) as connection:
            return await evaluate(
                GroupWriter(connection, SAMPLING, n=2, grader=grader),
                prompts(0, 1, 2, 3),
                lambda: False,
                show,
            )

    means = {"reward_mean": 0.25, "response_length_mean": 7.0, "truncated_frac": 0.75}
    assert asyncio.run(evaluated()) == {**means, "pass@1": 0.25, "pass@2": 0.25}
    assert [prompt_id for prompt_id, _ in shown] == [0, 1, 2, 3]
    assert shown[1] == (1, ["right", "right"])


class Losing:
    """A grader that returns 1 and loses the gradings chosen by ``lost``."""

    def __init__(self, lost: Callable[[int, Sample], bool]) -> None:
        self.lost, self.turn = lost, 0

    async def grade(self, prompt: Prompt, samples: Sequence[Sample]) -> list[float | None]:
        turn, self.turn = self.turn, self.turn + 1
        return [None if self.lost(turn, sample) else 1.0 for sample in samples]

    def grades_singly(self, prompt: Prompt) -> bool:
        return False

    def counters(self) -> dict[str, float]:
        return {}

    async def close(self) -> None:
        pass


def written(
    lost: Callable[[int, Sample], bool], *, n: int
) -> tuple[Any, list[Mapping[str, float]], int]:
    """Return a group, its writer's counters read twice, and the number of requests."""

    async def work() -> tuple[Any, list[Mapping[str, float]], int]:
        engine = FakeEngine()
        async with serving(engine), Connection(engines_of(engine)) as connection:
            writer = GroupWriter(connection, SAMPLING, n=n, grader=Losing(lost))
            group = await writer.write(Unfinished(prompts(7)[0]))
            return group, [writer.counters(), writer.counters()], engine.log.count("generate")

    return asyncio.run(work())


def test_an_answer_whose_grading_was_lost_is_left_out_of_its_group() -> None:
    group, _, num_requests = written(lambda turn, sample: sample.index == 1, n=3)
    assert [scored.sample.index for scored in group.samples] == [0, 2]
    assert group.rewards == (1.0, 1.0) and num_requests == 3


@pytest.mark.parametrize("lost_at", ["grading", "teacher"])
def test_an_answer_of_which_one_sample_is_lost_is_left_out_whole(lost_at: str) -> None:
    """Its other samples alone would be another answer: other tokens, reward and length."""
    lost_text = "second"

    async def function(builder: Any, prompt: Prompt, sampling: SamplingParams) -> list[Sample]:
        await builder.write()
        texts = ["first", lost_text if builder.index == 1 else "last"]
        return [replace(builder.sample(), text=text) for text in texts]

    async def finish(graded: Sequence[ScoredSample]) -> tuple[ScoredSample, ...]:
        return tuple(each for each in graded if each.sample.text != lost_text)

    async def work() -> tuple[Any, Mapping[str, float]]:
        engine, is_teacher = FakeEngine(), lost_at == "teacher"
        grader = Losing(lambda turn, sample: not is_teacher and sample.text == lost_text)
        async with serving(engine), Connection(engines_of(engine)) as connection:
            writer = GroupWriter(
                *(connection, SAMPLING),
                n=3,
                grader=grader,
                function=function,
                finish=finish if is_teacher else None,
            )
            return await writer.write(Unfinished(prompts(7)[0])), writer.counters()

    group, counted = asyncio.run(work())
    assert [scored.sample.index for scored in group.samples] == [0, 0, 2, 2]
    assert counted["rollout/answers_lost"] == (lost_at == "teacher")


@pytest.mark.parametrize(
    ("n", "num_lost", "again"), [(4, 2, 0), (4, 3, 1), (4, 4, 1), (2, 1, 1), (1, 0, 0), (1, 1, 1)]
)
def test_a_group_with_fewer_than_two_answers_left_is_generated_again(
    n: int, num_lost: int, again: int
) -> None:
    """A group of size one is complete with one answer."""
    found = written(lambda turn, sample: turn == 0 and sample.index < num_lost, n=n)
    group, (counted, after), num_requests = found
    assert len(group.samples) == (n if again else n - num_lost) and num_requests == n * (1 + again)
    wasted = {"rollout/num_regenerated": again, "rollout/wasted_tokens": 3 * n * again}
    assert counted == {"rollout/answers_lost": 0} | wasted
    assert set(after.values()) == {0}


def test_a_prompt_whose_gradings_are_always_lost_is_given_up() -> None:
    """The server may fail on this prompt's metadata; the run continues with other prompts."""
    group, _, num_requests = written(lambda turn, sample: True, n=2)
    assert group == SampleGroup(7, ()) and num_requests == 2 * MAX_GENERATIONS


class GradesSingly:
    """A grader of slow rewards; index 0 is graded when ``may_end`` is set."""

    def __init__(self) -> None:
        self.begun, self.may_end = asyncio.Event(), asyncio.Event()
        self.log = list[str]()

    def grades_singly(self, prompt: Prompt) -> bool:
        return True

    async def grade(self, prompt: Prompt, samples: Sequence[Sample]) -> list[float]:
        (sample,) = samples
        if sample.index == 0:
            self.begun.set()
            try:
                await self.may_end.wait()
            finally:
                self.log.append("ended" if self.may_end.is_set() else "cancelled")
        return [0.5 + sample.index]


@pytest.mark.parametrize("finish_reason", ["stop", "abort"])
async def test_an_answer_is_graded_while_others_are_generated(finish_reason: Any) -> None:
    """If one of them is aborted, the group is left with what it has, without waiting for rewards."""
    grader = GradesSingly()

    async def function(builder: Any, prompt: Prompt, sampling: SamplingParams) -> Sample:
        if builder.index == 0:
            return Sample(prompt.prompt_id, 0, (1,), (2,), (-0.5,), "", "stop", 0)
        await grader.begun.wait()  # the other answer is being graded
        if finish_reason == "stop":
            grader.may_end.set()
        return Sample(prompt.prompt_id, 1, (1,), (2,), (-0.5,), "", finish_reason, 0)

    writer = GroupWriter(NO_CONNECTION, SAMPLING, n=2, grader=grader, function=function)
    group = await writer.write(Unfinished(prompts(7)[0]))
    if finish_reason == "stop":
        assert group.rewards == (0.5, 1.5) and grader.log == ["ended"]
    else:
        assert [sample.finish_reason for sample in group.samples] == ["stop", "abort"]
        assert grader.log == ["cancelled"]


def test_finish_adds_to_graded_answers_and_leaves_out_those_that_it_drops() -> None:
    async def finish(graded: Sequence[ScoredSample]) -> tuple[ScoredSample, ...]:
        return tuple(
            replace(each, sample=replace(each.sample, teacher_logprobs=(-0.5, -0.25, 0.0)))
            for each in graded
            if each.sample.index != 1
        )

    async def work() -> tuple[Any, Mapping[str, float]]:
        engine, grader = FakeEngine(), Losing(lambda turn, sample: False)
        async with serving(engine), Connection(engines_of(engine)) as connection:
            writer = GroupWriter(connection, SAMPLING, n=3, grader=grader, finish=finish)
            return await writer.write(Unfinished(prompts(7)[0])), writer.counters()

    group, counted = asyncio.run(work())
    assert [scored.sample.index for scored in group.samples] == [0, 2]
    assert all(list(each.sample.teacher_logprobs) == [-0.5, -0.25, 0.0] for each in group.samples)
    assert counted["rollout/answers_lost"] == 1


def with_extra(extra: Mapping[Any, Any], **changes: object) -> SampleGroup:
    """Generate a group with a function that puts these values into its answers."""

    async def my_function(builder: Any, prompt: Prompt, sampling: SamplingParams) -> Sample:
        await builder.write()
        return replace(builder.sample(), extra=extra, **changes)

    async def work() -> Any:
        engine = FakeEngine()
        async with serving(engine), Connection(engines_of(engine)) as connection:
            grader = InlineGrader(lambda text, label, metadata: 1.0)
            writer = GroupWriter(connection, SAMPLING, n=2, grader=grader, function=my_function)
            return await writer.write(Unfinished(prompts(7)[0]))

    return asyncio.run(work())


@pytest.mark.parametrize(
    "extra",
    [
        {"x": {1: 0.5}},
        {"x": (1, 2)},
        {2: None},
        {"x": np.float64(0.1), "y": "\ud800"},
        {"x": float("inf"), "y": [{"z": True}]},
    ],
)
def test_what_a_function_adds_has_the_values_that_a_resumed_run_reads(extra: Any) -> None:
    """A reward or filter would otherwise see other values after a preemption."""
    group = with_extra(extra)
    text = json.dumps(group_record(group))
    assert group_from(json.loads(text)) == group
    body = group_content(group, is_kept=True)
    assert repr(journal_format._group(memoryview(body)[1:])) == repr(group)
    assert set(group.samples[0].sample.extra) == {str(key) for key in extra}


@pytest.mark.parametrize(
    ("value", "kind"),
    [(np.float32(0.5), "float32"), (np.zeros(2), "ndarray"), (b"x", "bytes"), ({1}, "set")],
)
def test_what_is_no_json_names_function_key_and_type(value: Any, kind: str) -> None:
    wanted = rf"my_function put extra\['score'\] of type {kind} .*prompt 7, .*float\(\)"
    with pytest.raises(ConfigError, match=wanted):
        with_extra({"fine": 1, "score": value})


@pytest.mark.parametrize(
    "changes", [{"rollout_logprobs": (-1.0, float("nan"), 0.0)}, {"reward": float("inf")}]
)
def test_an_answer_with_a_number_that_is_not_finite_names_function_and_field(changes: Any) -> None:
    (name,) = changes
    with pytest.raises(ConfigError, match=rf"my_function answers prompt 7 with Sample\.{name}"):
        with_extra({}, **changes)


def with_sandbox(is_lost: Callable[[int, int], bool], *, n: int) -> tuple[Any, Mapping[str, float]]:
    """Return a group and its counters; ``is_lost``: (index, number of the call) -> sandbox lost."""
    calls = itertools.count()

    async def function(builder: Any, prompt: Prompt, sampling: SamplingParams) -> Sample:
        if is_lost(builder.index, next(calls)):
            raise GradingLost("the sandbox is gone")
        await builder.write()
        return builder.sample()

    async def work() -> tuple[Any, Mapping[str, float]]:
        engine = FakeEngine()
        async with serving(engine), Connection(engines_of(engine)) as connection:
            grader = InlineGrader(lambda text, label, metadata: 1.0)
            writer = GroupWriter(connection, SAMPLING, n=n, grader=grader, function=function)
            return await writer.write(Unfinished(prompts(7)[0])), writer.counters()

    return asyncio.run(work())


def test_an_answer_whose_sandbox_is_lost_is_left_out_too() -> None:
    group, counted = with_sandbox(lambda index, call: index == 1, n=3)
    assert [scored.sample.index for scored in group.samples] == [0, 2]
    assert counted["rollout/answers_lost"] == 1 and counted["rollout/num_regenerated"] == 0
    group, counted = with_sandbox(lambda index, call: call < 3, n=3)
    assert len(group.samples) == 3
    assert counted["rollout/answers_lost"] == 3 and counted["rollout/num_regenerated"] == 1


def test_consecutive_lost_sandboxes_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "MAX_LOST_IN_A_ROW", 5)
    with pytest.raises(
        RolloutError, match="5 consecutive answers were lost; the last: the sandbox is gone"
    ):
        with_sandbox(lambda index, call: True, n=4)


def test_evaluation_leaves_out_answers_that_were_not_graded() -> None:
    async def evaluated(lost: Callable[[int, Sample], bool]) -> dict[str, float]:
        engine = FakeEngine()
        async with serving(engine), Connection(engines_of(engine)) as connection:
            writer = GroupWriter(connection, SAMPLING, n=4, grader=Losing(lost))
            return await evaluate(writer, prompts(0, 1, 2), lambda: False)

    found = asyncio.run(
        evaluated(
            lambda turn, sample: sample.prompt_id == 0 or sample.prompt_id == sample.index == 1
        )
    )
    assert found["reward_mean"] == 1 and [found[f"pass@{k}"] for k in (1, 2, 4)] == [1, 1, 1]
    with pytest.raises(RolloutError, match="gradings of all 3 prompts were lost"):
        asyncio.run(evaluated(lambda turn, sample: True))


def test_pass_at_k_is_the_fraction_of_draws_with_a_right_answer() -> None:
    """Compare with an enumeration of all subsets."""
    for num_samples, num_right, k in [
        (5, 2, 1),
        (5, 2, 2),
        (6, 1, 3),
        (4, 0, 2),
        (4, 4, 4),
        (7, 3, 5),
    ]:
        draws = list(
            itertools.combinations([True] * num_right + [False] * (num_samples - num_right), k)
        )
        assert pass_at_k(num_samples, num_right, k) == pytest.approx(
            sum(map(any, draws)) / len(draws)
        )


async def test_groups_that_start_together_do_not_block_the_event_loop() -> None:
    """1,024 groups of 8 used to start in one iteration of the event loop and blocked it for 4 s."""
    begun, most_in_a_turn = 0, 0

    async def function(builder: Any, prompt: Prompt, sampling: SamplingParams) -> Sample:
        nonlocal begun
        begun += 1
        await asyncio.sleep(0.01)
        return Sample(
            prompt.prompt_id, builder.index, prompt.token_ids, (1,), (-0.5,), "", "stop", 0
        )

    async def watch() -> None:
        nonlocal most_in_a_turn
        before = begun
        while begun < 100 * 2:
            await asyncio.sleep(0)
            most_in_a_turn, before = max(most_in_a_turn, begun - before), begun

    writer = GroupWriter(
        NO_CONNECTION, SAMPLING, n=2, grader=InlineGrader(score), function=function
    )  # type: ignore
    watching = asyncio.create_task(watch())
    groups = await asyncio.gather(
        *(writer.write(Unfinished(prompt)) for prompt in prompts(*range(100)))
    )
    await watching
    assert [group.prompt_id for group in groups if isinstance(group, SampleGroup)] == list(
        range(100)
    )
    assert most_in_a_turn <= 2, "answers of one group alone"
