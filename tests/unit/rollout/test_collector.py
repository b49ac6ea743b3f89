"""Filters, surplus groups, partial answers and stops with a real collector and fake engines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rlpost.durable.journal import Journal
from rlpost.durable.recorded import write_groups
from rlpost.engines import connection
from rlpost.engines.connection import Connection, RunEngines
from rlpost.errors import ConfigError, DataError, Preempted, RolloutError
from rlpost.extensions.slime.arguments import Arguments
from rlpost.extensions.slime.filters import SlimeFilter
from rlpost.extensions.slime.filters import (
    check_reward_nonzero_std_with_fallback as slimes_with_fallback,
)
from rlpost.rollout.buffer import RolloutBuffer, Rules
from rlpost.rollout.collector import Choices, Collector, Replay
from rlpost.rollout.filters import (
    check_reward_nonzero_std,
    check_reward_nonzero_std_with_fallback,
    group_filter,
)
from rlpost.rollout.generate import MAX_GENERATIONS, GroupWriter
from rlpost.rollout.sampling import SamplingParams
from rlpost.tasks.reward.grader import InlineGrader
from rlpost.types import Backlog, Prompt, SampleGroup, Unfinished
from tests.unit.rollout.fake_engine import KEY, FakeEngine, generated, serving

NOTHING = Backlog()
SAMPLING = SamplingParams(max_new_tokens=8, stop_token_ids=(1,))


class Counter:
    """An endless cursor; prompt i has the ids (i, 50)."""

    def __init__(self, at: int = 0) -> None:
        self.at = at

    def take(self, n: int) -> list[Prompt]:
        self.at += n
        return [Prompt(i, f"p{i}", (i, 50), label=str(i)) for i in range(self.at - n, self.at)]

    def state(self) -> dict[str, int]:
        return {"offset": self.at}

    def copy(self) -> Counter:
        return Counter(self.at)


class LongTail(FakeEngine):
    """An engine that generates prompts of ``slow`` until they are aborted, and the rest at once.

    A token of a slow answer is the number of tokens before it, which reveals gaps and repetitions.
    """

    def __init__(self, slow: Callable[[int], bool], **fields: Any) -> None:
        super().__init__(**fields)
        self.slow, self.aborted = slow, asyncio.Event()

    async def generate(self, body: dict[str, Any]) -> Any:
        from aiohttp import web

        prompt_id, *rest = body["input_ids"]
        if not self.slow(prompt_id):
            return await super().generate(body)
        self.log.append("generate")
        self.bodies.append(body)
        written, room = len(rest) - 1, body["sampling_params"]["max_new_tokens"]
        ids = [written + at for at in range(min(3, room))]
        reason = "length" if len(ids) == room else "abort"
        self.under_way += 1
        if reason == "abort":
            await self.aborted.wait()
        self.under_way -= 1
        return web.json_response(
            generated(ids, version=self.version, text="".join(map(str, ids)), reason=reason)
        )

    async def handle(self, request: Any) -> Any:
        if request.path == "/abort_request":
            self.aborted.set()
            self.aborted = asyncio.Event()
        return await super().handle(request)


@asynccontextmanager
async def collecting(
    engine: FakeEngine, rules: Rules, backlog: Backlog = NOTHING, **more: Any
) -> AsyncIterator[tuple[Collector, RolloutBuffer]]:
    """A collector whose cursor is after the backlog."""
    n, stop = more.pop("n", 2), more.pop("stop_requested", lambda: False)
    async with (
        serving(engine),
        Connection(RunEngines.of([engine.url], KEY, capacity=64)) as connection,
    ):
        grader = InlineGrader(
            more.pop("score", lambda text, label, metadata: float(text[:1] == label[:1]))
        )
        writer = GroupWriter(connection, SAMPLING, n=n, grader=grader)
        buffer = RolloutBuffer(rules, backlog, step=more.pop("step", 0))
        collector = Collector(
            buffer,
            Counter(backlog.newest_id + 1),
            writer,
            choices=Choices(**more),
            stop_requested=stop,
        )
        async with asyncio.timeout(30):
            yield collector, buffer


def ids(groups: list[SampleGroup]) -> list[int]:
    return [group.prompt_id for group in groups]


async def test_unwanted_groups_are_replaced_until_the_batch_is_full() -> None:
    """Only for odd ids is exactly one of the two samples right, so only these groups are kept."""
    turn = iter(range(10**6))

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        prompt_id = body["input_ids"][0]
        return generated([1], text=str(prompt_id) if next(turn) % 2 or prompt_id % 2 == 0 else "no")

    engine = FakeEngine(answer=answer)
    async with collecting(engine, Rules(3, 3, 9), wanted=check_reward_nonzero_std) as (
        collector,
        _,
    ):
        assert ids(await collector.batch()) == [1, 3, 5]
        counts = collector.counts()
        assert (counts["rollout/num_filtered"], counts["rollout/wasted_tokens"]) == (3, 6)
    assert engine.log.count("generate") == 12


class LosingGrader(InlineGrader):
    """A grader that loses prompt 1 entirely, and the first answer of prompt 2."""

    async def grade(self, prompt: Prompt, samples: Any) -> list[float | None]:
        is_lost = {1: {0, 1, 2}, 2: {0}}.get(prompt.prompt_id, set())
        return [None if sample.index in is_lost else float(sample.index) for sample in samples]


async def batch_with_journal(
    folder: Path, grader: Any, *, size: int = 2
) -> tuple[list[SampleGroup], Mapping[str, float], int]:
    """The first batch of a run, its counts, and the number of requests to the engine."""
    engine = FakeEngine(answer=lambda body: generated([1, 1], text="x"))
    async with (
        serving(engine),
        Connection(RunEngines.of([engine.url], KEY, capacity=64)) as connection,
    ):
        journal = Journal.resume(folder, 0, step=0, settings="same")
        writer = GroupWriter(connection, SAMPLING, n=3, grader=grader, journal=journal)
        collector = Collector(
            RolloutBuffer(Rules(size, size, 4), NOTHING, step=0),
            Counter(1),
            writer,
            choices=Choices(counters=writer.counters, wanted=check_reward_nonzero_std),
            stop_requested=lambda: False,
            journal=journal,
        )
        try:
            async with asyncio.timeout(30):
                groups = await collector.batch()
        finally:
            await collector.stop()
            journal.close()
        return groups, collector.counts(), engine.log.count("generate")


def test_a_prompt_whose_gradings_are_lost_is_replaced_even_after_a_crash(
    tmp_path: Path,
) -> None:
    """Prompt 1 is given up; one answer of prompt 2 is left out.

    The journal replays the same batch and counts.
    """

    def batch(grader: Any) -> Any:
        return asyncio.run(batch_with_journal(tmp_path, grader))

    groups, counts, num_requests = batch(LosingGrader(lambda *_: 0.0))
    assert [(group.prompt_id, group.rewards) for group in groups] == [
        (2, (1.0, 2.0)),
        (3, (0.0, 1.0, 2.0)),
    ]
    again = MAX_GENERATIONS  # times that the answers to prompt 1 were discarded
    assert (
        counts["rollout/num_regenerated"] == again and counts["rollout/wasted_tokens"] == again * 6
    )
    assert counts["rollout/num_filtered"] == 1 and num_requests == 3 * (again + 2)
    assert batch(None) == (groups, counts, 0)


class SlowGrader(InlineGrader):
    """A grader that grades each answer singly; the driver dies with those of ``dies_at``."""

    def __init__(self, dies_at: Collection[int] = ()) -> None:
        super().__init__(lambda *_: 0.0)
        self.dies_at, self.graded = dies_at, list[int]()

    def grades_singly(self, prompt: Prompt) -> bool:
        return True

    async def grade(self, prompt: Prompt, samples: Any) -> list[float]:
        (sample,) = samples
        if sample.index in self.dies_at:
            raise RolloutError("the driver dies here")
        self.graded.append(sample.index)
        return [0.5 * sample.index]


def test_answers_that_were_graded_before_a_crash_are_not_graded_again(tmp_path: Path) -> None:
    first, second = SlowGrader(dies_at={2}), SlowGrader()
    with pytest.raises(RolloutError, match="the driver dies here"):
        asyncio.run(batch_with_journal(tmp_path, first, size=1))
    groups, _, num_requests = asyncio.run(batch_with_journal(tmp_path, second, size=1))
    assert (first.graded, second.graded, num_requests) == ([0, 1], [2], 0)
    assert [group.rewards for group in groups] == [(0.0, 0.5, 1.0)]


async def test_a_filter_that_drops_nearly_everything_is_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with collecting(
        FakeEngine(), Rules(1, 1, 9), wanted=lambda group: group.prompt_id == 40
    ) as (collector, _):
        assert ids(await collector.batch()) == [40]
    said = [
        record.getMessage()
        for record in caplog.records
        if record.name == "rlpost.rollout.collector"
    ]
    assert [int(line.split(" groups")[0].split()[-1]) for line in said] == [8, 16, 32]


async def test_surplus_groups_are_trained_in_the_next_step_without_a_new_generation() -> None:
    engine = FakeEngine()
    async with collecting(engine, Rules(2, 8, 9)) as (collector, buffer):
        assert len(await collector.batch()) == 2
        collector.mark_trained()
        await collector.prepare_update()
        collector.mark_synced(1)
        held, sent = buffer.num_finished, engine.log.count("generate")
        assert held >= 2
        await collector.batch()
        assert engine.log.count("generate") == sent


@pytest.mark.parametrize(
    "choose",
    [
        lambda waiting, n: [*waiting[:1], *waiting[:1]],
        lambda waiting, n: [Unfinished(Prompt(99, "no", (1,)))],
    ],
    ids=["twice", "another"],
)
async def test_a_buffer_filter_that_returns_groups_that_do_not_wait_is_named(choose: Any) -> None:
    held = Backlog(
        unfinished=tuple(Unfinished(p) for p in Counter().take(2)), num_fetched=2, newest_id=1
    )
    async with collecting(FakeEngine(), Rules(2, 2, 9), held, first=choose) as (collector, _):
        with pytest.raises(
            ConfigError, match=r"--buffer-filter-path: .*prompt_id=(0|99),.*each once"
        ):
            await collector.batch()


@pytest.mark.parametrize("keep_partial", [True, False])
async def test_an_aborted_answer_is_resumed_or_started_again(keep_partial: bool) -> None:
    """Prompt 0 is slow: aborted in step 0 after 3 tokens, resumed by version 1 up to 8 tokens."""

    def finish(body: dict[str, Any]) -> dict[str, Any]:
        before = len(body["input_ids"]) - 2
        made = list(range(before, before + body["sampling_params"]["max_new_tokens"]))
        return generated(
            made, version=engine.version, text="".join(map(str, made)), reason="length"
        )

    engine = LongTail(lambda prompt_id: prompt_id == 0, answer=finish)
    async with collecting(engine, Rules(2, 3, 9, keep_partial=keep_partial)) as (collector, buffer):
        assert ids(await collector.batch()) == [1, 2]
        collector.mark_trained()
        (waiting,) = buffer.waiting
        assert waiting.prompt.prompt_id == 0
        assert [sample.response_ids for sample in waiting.samples] == (
            [(0, 1, 2)] * 2 if keep_partial else []
        )
        engine.version = "1"
        collector.mark_synced(1)
        engine.slow = lambda prompt_id: prompt_id > 1000
        batch = await collector.batch()
        assert ids(batch)[0] == 0
        group = batch[0]
    for scored in group.samples:
        sample = scored.sample
        assert sample.response_ids == tuple(range(8))
        assert sample.text == "01234567"
        assert (sample.finish_reason, sample.policy_version) == ("length", 1)
        assert sample.version_spans == (((0, 3), (1, 5)) if keep_partial else ())
        assert sample.rollout_logprobs[3:4] == ((-0.5,) if keep_partial else (-2.0,))


async def test_tokens_of_older_weights_can_be_left_out_of_the_loss() -> None:
    engine = LongTail(
        lambda prompt_id: prompt_id == 0,
        answer=lambda body: generated([9] * 2, version=engine.version),
    )
    rules = Rules(1, 2, 9, keep_partial=True)
    async with collecting(engine, rules, mask_older=True) as (collector, _):
        await collector.batch()
        collector.mark_trained()
        engine.version = "1"
        collector.mark_synced(1)
        engine.slow = lambda prompt_id: False
        group = (await collector.batch())[0]
    assert [scored.sample.mask for scored in group.samples] == [(0, 0, 0, 1, 1)] * 2


async def test_an_abort_by_an_engine_for_new_weights_does_not_end_an_answer() -> None:
    """An unexpected abort: the answer is resumed immediately and has one span per version."""
    first = {"at": True}

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        if first.pop("at", False):
            return generated([5, 6], version="3", text="ab", reason="abort")
        return generated([7, 1], version="4", text="c")

    engine = FakeEngine(answer=answer)
    async with collecting(engine, Rules(1, 1, 9), n=1) as (collector, _):
        result = (await collector.batch())[0]
    (scored,) = result.samples
    assert engine.bodies[1]["input_ids"] == [0, 50, 5, 6]
    assert engine.bodies[1]["sampling_params"]["max_new_tokens"] == 6
    assert (scored.sample.text, scored.sample.response_ids) == ("abc", (5, 6, 7, 1))
    assert scored.sample.version_spans == ((3, 2), (4, 2))


async def test_a_stop_keeps_finished_groups_and_a_resume_continues_from_them() -> None:
    stop = asyncio.Event()
    engine = LongTail(lambda prompt_id: prompt_id == 1)
    rules = Rules(3, 3, 9, keep_partial=True)
    async with collecting(engine, rules, stop_requested=stop.is_set) as (collector, buffer):
        asking = asyncio.create_task(collector.batch())
        while buffer.num_finished < 2:
            await asyncio.sleep(0)
        stop.set()
        with pytest.raises(Preempted):
            await asking
        backlog = collector.pending()[1]
    assert sorted(group.prompt_id for group in backlog.finished) == [0, 2]
    assert [len(sample.response_ids) for sample in backlog.unfinished[0].samples] == [3, 3]
    assert engine.under_way == 0

    again = FakeEngine()
    async with collecting(again, rules, backlog) as (collector, _):
        assert ids(await collector.batch()) == [0, 1, 2]
    assert again.log.count("generate") == 2


async def test_a_preempted_run_does_not_wait_for_a_hanging_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "LEAVE_S", 0.1)
    monkeypatch.setattr(connection, "ABORT_AGAIN_S", 0.05)
    stop = asyncio.Event()
    engine = FakeEngine(holds=asyncio.Event())  # an abort changes nothing
    async with collecting(engine, Rules(2, 2, 9), stop_requested=stop.is_set) as (collector, _):
        asking = asyncio.create_task(collector.batch())
        while not engine.under_way:
            await asyncio.sleep(0)
        stop.set()
        with pytest.raises(Preempted):
            await asking
        backlog = collector.pending()[1]
    assert sorted(entry.prompt.prompt_id for entry in backlog.unfinished) == [0, 1]


async def test_a_run_preempted_while_surplus_is_aborted_does_not_wait_for_a_hanging_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "LEAVE_S", 0.1)
    monkeypatch.setattr(connection, "ABORT_AGAIN_S", 0.05)
    stop = asyncio.Event()

    class HangsFor0(FakeEngine):
        async def generate(self, body: dict[str, Any]) -> Any:
            if body["input_ids"][0] == 0:
                self.under_way += 1
                await asyncio.Event().wait()
            return await super().generate(body)

    engine = HangsFor0()
    async with collecting(engine, Rules(2, 3, 9), stop_requested=stop.is_set) as (collector, _):
        asking = asyncio.create_task(collector.batch())
        while "abort_request" not in engine.log:
            await asyncio.sleep(0.01)
        stop.set()
        assert ids(await asking) == [1, 2]
        backlog = collector.pending()[1]
    assert [entry.prompt.prompt_id for entry in backlog.unfinished] == [0]


async def test_a_resume_with_a_stricter_bound_replaces_groups_that_are_too_old() -> None:
    async with collecting(FakeEngine(), Rules(2, 8, 9)) as (collector, _):
        await collector.batch()
        collector.mark_trained()
        backlog = collector.pending()[1]
    assert len(backlog.finished) >= 2
    stricter = Rules(2, 2, 9, max_staleness=1)
    async with collecting(FakeEngine(version="5"), stricter, backlog, step=5) as (collector, _):
        assert min(ids(await collector.batch())) > max(
            group.prompt_id for group in backlog.finished
        )
        assert collector.counts()["rollout/num_filtered"] == len(backlog.finished)
        await collector.stop()


async def test_engines_are_health_checked_while_surplus_groups_are_aborted() -> None:
    """An engine that hangs then would never finish its requests; health checks end it."""
    seen = []

    async def watched(generating: Awaitable[None]) -> None:
        await generating
        seen.append(engine.under_way)

    engine = LongTail(lambda prompt_id: prompt_id == 2)
    async with collecting(engine, Rules(2, 3, 9), watched=watched) as (collector, _):
        assert ids(await collector.batch()) == [0, 1]
    assert seen == [0]


async def test_in_asynchronous_mode_generation_continues_while_no_batch_is_awaited() -> None:
    engine = FakeEngine()
    async with collecting(engine, Rules(2, 2, 9, max_staleness=2)) as (collector, buffer):
        assert len(await collector.batch()) == 2
        while buffer.num_finished < 4:  # training would run during this time
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        assert engine.log.count("generate") == 2 * 6
        await collector.stop()


async def test_a_failure_ends_all_requests_and_is_raised_by_the_awaited_batch() -> None:
    def answer(body: dict[str, Any]) -> dict[str, Any]:
        return generated([1], version="bad" if body["input_ids"][0] == 1 else "0")

    engine = LongTail(lambda prompt_id: prompt_id == 0, answer=answer)
    async with collecting(engine, Rules(2, 2, 9)) as (collector, _):
        with pytest.raises(RolloutError, match="version 'bad'"):
            await collector.batch()
    assert engine.log[-1] == "abort_request" and engine.under_way == 0


def test_paths_of_slimes_filters_name_ours() -> None:
    path = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
    assert group_filter(path) is check_reward_nonzero_std
    assert group_filter(f"{path}_with_fallback") is check_reward_nonzero_std_with_fallback


OF_SLIME = SlimeFilter(
    slimes_with_fallback, Arguments({"n_samples_per_prompt": 2, "reward_key": None})
)


@pytest.mark.parametrize("wanted", [check_reward_nonzero_std_with_fallback, OF_SLIME])
@pytest.mark.parametrize(("start_size", "num_dropped"), [(3, 0), (5, 2)])
async def test_a_filter_with_fallback_keeps_equal_rewards_rather_than_start_more_prompts(
    start_size: int, num_dropped: int, wanted: Callable[[SampleGroup], bool]
) -> None:
    """All groups have equal rewards; only surplus groups are dropped."""
    async with collecting(FakeEngine(), Rules(3, start_size, 9), wanted=wanted) as (
        collector,
        buffer,
    ):
        assert len(await collector.batch()) == 3
        assert buffer.newest_id == start_size - 1
        assert collector.counts()["rollout/num_filtered"] == num_dropped


def recorded(engine: FakeEngine, rules: Rules, template: str) -> None:
    async def work() -> None:
        async with collecting(engine, rules) as (collector, _):
            for step in range(2):
                write_groups(template, step, await collector.batch())
                collector.mark_trained()
                collector.mark_synced(step + 1)

    asyncio.run(work())


def test_recorded_batches_are_replayed_for_their_own_prompts_only(tmp_path: Any) -> None:
    template, rules = str(tmp_path / "{rollout_id}.jsonl"), Rules(2, 2, 9)
    recorded(FakeEngine(), rules, template)

    async def replay(start: int) -> list[list[int]]:
        buffer = RolloutBuffer(rules, Backlog(), step=0)
        source, found = Replay(buffer, Counter(start), template, stop_requested=lambda: False), []
        for step in range(2):
            found.append(ids(await source.batch()))
            source.mark_trained()
            source.mark_synced(step + 1)
        assert source.pending() == (
            {"offset": 4},
            Backlog(num_fetched=4, num_trained=4, newest_id=3),
        )
        assert source.counts()["rollout/num_held"] == 0
        return found

    assert asyncio.run(replay(0)) == [[0, 1], [2, 3]]
    with pytest.raises(DataError, match=r"recording of step 0 has 2 groups, of prompts 0\.\.1"):
        asyncio.run(replay(1))


async def test_images_are_read_ahead_in_a_thread_before_groups_begin() -> None:
    engine, calls = FakeEngine(answer=lambda body: generated([1], text="0")), []

    def read() -> None:
        calls.append((threading.current_thread(), engine.log.count("generate")))

    async with collecting(engine, Rules(1, 1, 2), read_ahead=read) as (collector, _):
        await collector.batch()
    ((thread, num_requests),) = calls
    assert thread is not threading.main_thread() and num_requests == 0


async def test_a_stop_request_leaves_while_storage_of_images_hangs() -> None:
    began, mends = threading.Event(), threading.Event()

    def read() -> None:
        began.set()
        mends.wait(30)

    engine = FakeEngine()
    try:
        async with collecting(
            engine, Rules(1, 1, 2), read_ahead=read, stop_requested=began.is_set
        ) as (collector, _):
            with pytest.raises(Preempted):
                await collector.batch()
    finally:
        mends.set()
    assert "generate" not in engine.log
