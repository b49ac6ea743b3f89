"""The real loop with in-process stages: order, preemption in every stage, and exact resumes."""

import asyncio
import hashlib
import json
import sys
import time
from dataclasses import replace

import pytest

from rlpost.config.groups.debug import DebugConfig
from rlpost.config.load import load
from rlpost.driver.generation import rules
from rlpost.driver.loop import Loop
from rlpost.driver.preemption import EXIT_S, StopRequest
from rlpost.driver.run_stages import policy_versions
from rlpost.durable.journal import Journal
from rlpost.durable.state import RunState
from rlpost.errors import CheckpointError, Fenced, Preempted, RlpostError
from rlpost.observe.writer import MetricsWriter, read_metrics
from rlpost.rollout.buffer import RolloutBuffer
from rlpost.rollout.collector import Choices, Collector
from rlpost.tasks.cursor import PromptCursor
from rlpost.types import Backlog, Prompt, Sample, SampleGroup, ScoredSample


class Prompts:
    """Ten prompts without a file; those in ``bad`` are bad rows."""

    def __init__(self, bad=()):
        self.bad, self.num_skipped = bad, 0

    def __len__(self):
        return 10

    def counters(self):
        found, self.num_skipped = {"rollout/bad_prompts": float(self.num_skipped)}, 0
        return found

    def prompt(self, position, prompt_id):
        if position in self.bad:
            self.num_skipped += 1
            return None
        return Prompt(prompt_id, f"p{position}", (position,), str(position))


class FakeEngines:
    """Engines whose answers are a function of weights and prompt.

    They yield to the event loop in between, so that groups overlap.
    """

    def __init__(self, stages):
        self.stages, self.connection, self.halted = stages, self, False

    async def write(self, entry):
        prompt, version = entry.prompt, self.stages.versions[-1]
        for _ in range(1 + prompt.prompt_id % 3):
            await asyncio.sleep(0)
            if self.halted:
                return entry
        rewards = [
            int(
                hashlib.sha256(f"{self.stages.weights}{prompt.prompt_id}{i}".encode()).hexdigest(),
                16,
            )
            % 2
            for i in (0, 1)
        ]
        samples = [
            Sample(prompt.prompt_id, i, (1,), (2, 3), (-0.1, -0.2), "", "stop", version)
            for i in (0, 1)
        ]
        return SampleGroup(prompt.prompt_id, tuple(map(ScoredSample, samples, map(float, rewards))))

    async def keep_states(self, states):
        assert not states, "none of these groups has an environment"

    async def halt(self, running, *, must_leave):
        self.halted = True
        await asyncio.gather(*running)

    def resume(self):
        self.halted = False


class Watched(Collector):
    """The real collector, which may request a stop in the n-th batch when some groups are done."""

    def __init__(self, stages, *given, **named):
        super().__init__(*given, **named)
        self.stages = stages

    async def batch(self):
        if self.stages.stop_at == ("generate", self.stages.calls.get("generate", 0) + 1):
            self._open()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            self.stages.request_stop()
        self.stages.calls["generate"] = self.stages.calls.get("generate", 0) + 1
        return await super().batch()


class FakeStages:
    """Stages whose weights are a hash of all trained batches in order.

    ``stop_at`` is (stage, n): a stop is requested in the n-th call of that stage.
    """

    def __init__(self, stop=None, stop_at=None):
        self.weights, self.saved, self.versions, self.seen, self.staleness = "", None, [], [], []
        self.stop, self.stop_at, self.calls = stop, stop_at, {}
        self.saves, self.background_succeeds = [], True

    def request_stop(self):
        self.stop.write_text('{"reason": "test"}')

    def _enter(self, stage):
        self.calls[stage] = self.calls.get(stage, 0) + 1
        if self.stop_at == (stage, self.calls[stage]):
            self.request_stop()
            raise Preempted("test")

    async def train(self, groups, rollout):
        self._enter("train")
        for _ in range(5):
            await asyncio.sleep(0)  # engines generate at this time in the asynchronous modes
        self.staleness += [self.versions[-1] - group.oldest_version for group in groups]
        self.seen += [group.prompt_id for group in groups]
        trained = json.dumps([[group.prompt_id, group.rewards] for group in groups])
        self.weights = hashlib.sha256((self.weights + trained).encode()).hexdigest()
        return {"train/loss": int(self.weights[:4], 16) / 1e4, "train/grad_norm": 1.0}

    async def sync(self, policy_version):
        self.versions.append(policy_version)
        if policy_version > 0:
            self._enter("sync")

    async def evaluate(self):
        self._enter("evaluate")
        return {"eval/heldout/reward_mean": int(self.weights[:4] or "0", 16) / 65536}

    async def save(self, state, *, wait):
        self.saved = (state, self.weights)
        self.saves.append((state.step, wait))

    async def measure(self, step, metrics):
        return {"time/tokens_per_s_per_gpu": metrics["rollout/num_tokens"] / metrics["time/step_s"]}

    is_owed = is_paused = False

    def put_off(self, step):
        pass

    async def wait_committed(self):
        return self.background_succeeds


def config(**rollout):
    return load(
        [],
        {
            "rollout": {
                "num_rollout": 6,
                "rollout_batch_size": 4,
                "n_samples_per_prompt": 2,
                **rollout,
            },
            "eval": {"eval_interval": 2, "eval_prompt_data": ["heldout", "x"]},
            "checkpoint": {"save_interval": 3},
        },
    ).config


def run(
    folder,
    stages,
    state,
    saved=False,
    wanted=lambda group: True,
    bad=(),
    loop_lag=None,
    kept=None,
    **rollout,
):
    prompts = Prompts(bad)
    cursor = PromptCursor(prompts, shuffle=True, seed=1)
    if state.cursor:
        cursor = PromptCursor.from_state(prompts, state.cursor, shuffle=True, seed=1)
    metrics = MetricsWriter(folder / "metrics.jsonl")
    metrics.rewind(state.step if state.pending is None else state.step - 1)
    settings, stop = config(**rollout), StopRequest(folder / "STOP")
    journal = Journal.resume(folder / "journal", state.journal, step=state.step, settings="")

    async def whole():
        versions = policy_versions(settings, start=state.step, kept=kept)
        buffer = RolloutBuffer(rules(settings, versions), state.backlog, step=state.step)
        ahead = settings.rollout.rollout_mode == "one_step_off"
        choices = Choices(ahead=ahead, wanted=wanted, counters=prompts.counters)
        engines = FakeEngines(stages)
        rollouts = Watched(
            stages,
            buffer,
            cursor,
            engines,
            choices=choices,
            stop_requested=stop.requested,
            journal=journal,
        )
        loop = Loop(
            stages,
            settings,
            checkpoints=stages,
            rollouts=rollouts,
            journal=journal,
            metrics=metrics,
            stop=stop,
            versions=versions,
            loop_lag=loop_lag,
        )
        return await loop.run(state, saved=saved)

    try:
        return asyncio.run(whole())
    finally:
        journal.close()
        metrics.close()


def comparable(folder):
    """Return the metrics lines without measured times."""
    return [
        {key: value for key, value in line.items() if not key.startswith("time/")}
        for line in read_metrics(folder / "metrics.jsonl")
    ]


@pytest.fixture
def untouched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("untouched")
    stages = FakeStages()
    run(folder, stages, RunState(pending={}))
    return stages, comparable(folder)


def test_every_step_generates_trains_and_synchronises_once_and_evaluates_when_due(untouched):
    stages, lines = untouched
    assert stages.versions == [0, 1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if "eval/heldout/reward_mean" in line] == [0, 2, 4, 6]
    assert stages.seen == list(range(24))
    backlog = Backlog(num_fetched=24, num_trained=24, newest_id=23)
    cursor = {"epoch": 2, "offset": 4, "num_prompts": 10}
    assert stages.saved[0] == RunState(step=6, cursor=cursor, backlog=backlog, journal=2)


def test_an_evaluation_alone_ends_before_the_first_step(tmp_path, monkeypatch):
    only = config().model_copy(update={"debug": DebugConfig(debug_eval_only=True)})
    monkeypatch.setattr(sys.modules[__name__], "config", lambda: only)
    stages = FakeStages()
    run(tmp_path, stages, RunState(pending={}))
    (line,) = comparable(tmp_path)
    assert line["step"] == 0 and "eval/heldout/reward_mean" in line
    assert stages.seen == [] and stages.versions == [0]


def test_the_end_of_an_epoch_is_evaluated_and_saved_in_addition_to_the_intervals(tmp_path):
    """Two epochs of 5 steps, an evaluation every 2 steps and a save every 3 steps, as in slime."""
    saved = []

    class Saving(FakeStages):
        async def save(self, state, *, wait):
            saved.append(state.step)
            await super().save(state, wait=wait)

    stages = Saving()
    run(tmp_path, stages, RunState(pending={}), num_rollout=10, num_epoch=2)
    evaluated = [
        line["step"] for line in comparable(tmp_path) if "eval/heldout/reward_mean" in line
    ]
    assert evaluated == [0, 2, 4, 5, 6, 8, 10]
    assert saved == [3, 5, 6, 9, 10]


@pytest.mark.parametrize("leaves", [False, True])
def test_engines_are_updated_after_each_interval_and_whenever_they_are_onloaded(
    tmp_path, monkeypatch, leaves
):
    def colocated(real=config, **rollout):
        given = real(**rollout)
        cluster = given.cluster.model_copy(update={"offload_rollout": leaves})
        return given.model_copy(update={"cluster": cluster})

    monkeypatch.setitem(globals(), "config", colocated)
    stages = FakeStages()
    run(tmp_path, stages, RunState(pending={}), update_weights_interval=2)
    assert stages.versions == ([0, 0, 2, 2, 4, 4, 6] if leaves else [0, 2, 4, 6])
    assert stages.seen == list(range(24))


@pytest.mark.parametrize(("kept", "first"), [(2, 2), (None, 3), (1, 3)])
def test_a_run_resumed_between_two_updates_sends_weights_that_its_ranks_have(tmp_path, kept, first):
    """They are those of the last update, or the policy's own where a checkpoint has none of use."""
    stages, state = FakeStages(), RunState(step=3, pending=None)
    run(tmp_path, stages, state, saved=True, update_weights_interval=2, kept=kept)
    assert stages.versions == [first, 4, 6]


STOPS = [
    *((stage, count) for stage in ("generate", "train", "sync") for count in range(1, 7)),
    *(("evaluate", count) for count in range(1, 5)),
]


@pytest.mark.parametrize("stop_at", STOPS, ids=lambda stop: f"{stop[0]}-{stop[1]}")
def test_a_stop_in_any_stage_and_a_resume_give_the_same_weights_and_metrics(
    tmp_path, untouched, stop_at
):
    stop = tmp_path / "STOP"
    first = FakeStages(stop, stop_at)
    with pytest.raises(Preempted):
        run(tmp_path, first, RunState(pending={}))
    state, weights = first.saved
    stop.unlink()
    second = FakeStages()
    second.weights = weights
    run(tmp_path, second, RunState.from_json(state.to_json()), saved=True)
    assert second.weights == untouched[0].weights
    assert comparable(tmp_path) == untouched[1]
    assert (first.seen + second.seen) == list(range(24))


def neither_third_nor_fourth(group):
    """A group filter that keeps half of the prompts."""
    return group.prompt_id % 4 < 2


@pytest.fixture(scope="module")
def untouched_with_losses(tmp_path_factory):
    folder = tmp_path_factory.mktemp("untouched_with_losses")
    stages = FakeStages()
    run(folder, stages, RunState(pending={}), wanted=neither_third_nor_fourth, bad=(2, 7))
    return stages, comparable(folder)


@pytest.mark.parametrize("stop_at", STOPS, ids=lambda stop: f"{stop[0]}-{stop[1]}")
def test_filtered_groups_and_skipped_rows_before_a_stop_are_counted_once(
    tmp_path, untouched_with_losses, stop_at
):
    stop, losses = tmp_path / "STOP", {"wanted": neither_third_nor_fourth, "bad": (2, 7)}
    first = FakeStages(stop, stop_at)
    with pytest.raises(Preempted):
        run(tmp_path, first, RunState(pending={}), **losses)
    state, weights = first.saved
    stop.unlink()
    second = FakeStages()
    second.weights = weights
    run(tmp_path, second, RunState.from_json(state.to_json()), saved=True, **losses)
    stages, lines = untouched_with_losses
    assert second.weights == stages.weights
    assert comparable(tmp_path) == lines
    for name in ("num_filtered", "wasted_tokens", "bad_prompts"):
        assert sum(line.get(f"rollout/{name}", 0) for line in lines) > 6


def test_a_crash_resumes_from_the_last_checkpoint_without_duplicate_lines(tmp_path, untouched):
    class Crash(FakeStages):
        async def train(self, groups, rollout):
            if len(self.seen) == 16:
                raise RuntimeError("killed")
            return await super().train(groups, rollout)

    first = Crash()
    with pytest.raises(RuntimeError, match="killed"):
        run(tmp_path, first, RunState(pending={}))
    state, weights = first.saved
    assert state.step == 3
    second = FakeStages()
    second.weights = weights
    run(tmp_path, second, state, saved=True)
    assert second.weights == untouched[0].weights
    assert comparable(tmp_path) == untouched[1]


@pytest.mark.parametrize("succeeds", [True, False])
def test_the_last_save_is_awaited_and_repeated_if_it_failed_in_the_background(tmp_path, succeeds):
    stages = FakeStages()
    stages.background_succeeds = succeeds
    run(tmp_path, stages, RunState(pending={}))
    assert stages.saves == [(3, False), (6, False)] + ([] if succeeds else [(6, True)])


@pytest.mark.parametrize(
    "error",
    [CheckpointError("the storage hangs"), OSError("no space left"), RlpostError("an actor died")],
)
def test_a_stop_whose_save_fails_is_still_a_stop_and_the_journal_is_used(
    tmp_path, untouched, error
):
    """Otherwise the attempt would count as failed and might lose journal records."""

    class Refused(FakeStages):
        async def save(self, state, *, wait):
            if wait:
                raise error
            await super().save(state, wait=wait)

    first = Refused(tmp_path / "STOP", ("train", 5))
    with pytest.raises(Preempted):
        run(tmp_path, first, RunState(pending={}))
    (tmp_path / "STOP").unlink()
    state, weights = first.saved
    assert state.step == 3
    second = FakeStages()
    second.weights = weights
    run(tmp_path, second, state, saved=True)
    assert second.weights == untouched[0].weights
    assert comparable(tmp_path) == untouched[1]


@pytest.mark.parametrize(
    ("deadline", "fails", "saves", "left_with"),
    [
        (9e9, True, False, None),
        (1, True, False, None),
        (1, False, False, "journal"),
        (1, True, True, "checkpoint"),
    ],
)
def test_a_journal_that_a_resume_cannot_read_is_not_reported_as_saved_and_a_late_save_is_tried(
    tmp_path, monkeypatch, deadline, fails, saves, left_with
):
    class Refused(FakeStages):
        def request_stop(self):
            self.stop.write_text(json.dumps({"reason": "test", "deadline": deadline}))

        async def save(self, state, *, wait):
            if wait and not saves:
                raise CheckpointError("the storage hangs")

    real = Journal.durable

    async def durable(journal):
        if fails and stops[0].requested() and not given_up:
            given_up.append(journal._segment)
            journal._segment.give_up("an fsync took more than 60 s")
        await real(journal)

    stops, given_up = [], []
    monkeypatch.setattr(Journal, "durable", durable)
    monkeypatch.setitem(
        globals(),
        "StopRequest",
        lambda path, real=StopRequest: stops.append(real(path)) or stops[0],
    )
    with pytest.raises(Preempted):
        run(tmp_path, Refused(tmp_path / "STOP", ("train", 5)), RunState(pending={}))
    assert stops[0].left_with == left_with


def test_no_save_is_started_before_the_pause_after_a_failed_one_is_over(tmp_path):
    class Paused(FakeStages):
        is_owed = True

        @property
        def is_paused(self):
            return 2 <= len(self.seen) // 4 < 5  # rollouts of 4 prompts

    stages = Paused()
    run(tmp_path, stages, RunState(pending={}))
    assert sorted({step for step, _ in stages.saves}) == [0, 1, 5, 6]


@pytest.mark.parametrize(
    ("commits", "saved"), [(True, "checkpoint"), (False, "journal"), ("hangs", "journal")]
)
def test_a_stop_during_the_save_of_the_last_step_leaves_with_what_that_save_has_committed(
    tmp_path, monkeypatch, commits, saved
):
    """No time is needed for a state that a checkpoint holds, however slow the disk was."""

    class Slow(FakeStages):
        async def save(self, state, *, wait):
            assert not wait, "the deadline leaves no time for another save"
            await super().save(state, wait=wait)
            deadline = time.time() + EXIT_S + (1 if commits == "hangs" else 15)
            reason = {"reason": "test", "time": time.time(), "deadline": deadline}
            self.stop.write_text(json.dumps(reason))

        async def wait_committed(self):
            if commits == "hangs":
                await asyncio.sleep(20)
                raise AssertionError("the deadline is over")
            return commits

    stops = []

    def slow_disk(path, real=StopRequest):
        stops.append(real(path))
        stops[0].saves.recall([{"bytes": 1e9, "seconds": 60.0}])
        return stops[0]

    monkeypatch.setitem(globals(), "StopRequest", slow_disk)
    stages = Slow(tmp_path / "STOP")
    with pytest.raises(Preempted):
        run(tmp_path, stages, RunState(pending={}))
    assert stages.saves == [(3, False)] and stops[0].left_with == saved


def test_an_attempt_that_lost_its_folder_ends_as_fenced_even_at_a_stop(tmp_path):
    class Lost(FakeStages):
        async def save(self, state, *, wait):
            raise Fenced("another attempt writes there")

    with pytest.raises(Fenced):
        run(tmp_path, Lost(tmp_path / "STOP", ("train", 1)), RunState(pending={}))


def test_a_finished_run_started_again_does_nothing(tmp_path, untouched):
    state = untouched[0].saved[0]
    stages = FakeStages()
    again = replace(state, journal=0)  # this folder has no journal
    assert run(tmp_path, stages, again, saved=True) == again
    assert stages.seen == [] and stages.saved is None


def test_a_state_survives_a_round_trip():
    state = RunState(
        step=3, cursor={"epoch": 1, "offset": 2, "num_prompts": 10}, pending={"a": 0.1}
    )
    assert RunState.from_json(state.to_json()) == state
    assert replace(state, pending=None) == state.recorded()


ASYNC = ["one_step_off", "fully_async"]


def assert_nothing_was_lost(trained, state, batches):
    """Assert that every fetched prompt is trained or held exactly once."""
    held = state.backlog.prompt_ids
    assert len(trained) == batches * 4
    assert sorted([*trained, *held]) == list(range(state.backlog.num_fetched))
    assert state.cursor["epoch"] * 10 + state.cursor["offset"] == state.backlog.num_fetched


@pytest.mark.parametrize("mode", ASYNC)
def test_the_next_batch_is_generated_during_training_and_is_at_most_one_version_old(tmp_path, mode):
    stages = FakeStages()
    state = run(tmp_path, stages, RunState(pending={}), rollout_mode=mode)
    assert stages.versions == [0, 1, 2, 3, 4, 5, 6]
    assert_nothing_was_lost(stages.seen, state, 6)
    assert set(stages.staleness) == {0, 1}
    lines = comparable(tmp_path)
    assert [line["rollout/staleness_max"] for line in lines[1:]] == [0, 1, 1, 1, 1, 1]
    assert state.backlog.prompt_ids == ()  # nothing is generated for steps beyond the last one


def test_every_mode_writes_the_same_metrics(tmp_path):
    found = []
    for mode in ["sync", *ASYNC]:
        folder = tmp_path / mode
        folder.mkdir()
        run(folder, FakeStages(), RunState(pending={}), rollout_mode=mode)
        found.append([sorted(line) for line in read_metrics(folder / "metrics.jsonl")])
    assert found[0] == found[1] == found[2]


def test_every_metrics_line_has_the_lag_and_the_tasks_of_the_event_loop(tmp_path):
    lags = iter([0.25, 0.5, 0.125, 1.5, 0.0, 0.75])
    run(tmp_path, FakeStages(), RunState(pending={}), loop_lag=lambda: next(lags))
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert all(1 <= line["driver/num_tasks"] <= 10 for line in lines[1:])
    assert [line.get("driver/loop_lag_s") for line in lines] == [
        None,
        0.25,
        0.5,
        0.125,
        1.5,
        0.0,
        0.75,
    ]


def test_more_staleness_means_more_generation_ahead(tmp_path):
    stages = FakeStages()
    run(tmp_path, stages, RunState(pending={}), rollout_mode="fully_async", max_staleness=3)
    assert 1 < max(stages.staleness) <= 3


@pytest.mark.parametrize("mode", ASYNC)
@pytest.mark.parametrize("stop_at", STOPS, ids=lambda stop: f"{stop[0]}-{stop[1]}")
def test_a_stop_and_a_resume_during_training_lose_nothing(tmp_path, mode, stop_at):
    """The checkpoint has the groups generated for later steps; every prompt is trained once."""
    stop = tmp_path / "STOP"
    first = FakeStages(stop, stop_at)
    with pytest.raises(Preempted):
        run(tmp_path, first, RunState(pending={}), rollout_mode=mode)
    state, weights = first.saved
    assert_nothing_was_lost(first.seen, state, state.step)
    stop.unlink()
    second = FakeStages()
    second.weights, second.versions = weights, [state.step]
    end = run(tmp_path, second, RunState.from_json(state.to_json()), saved=True, rollout_mode=mode)
    assert_nothing_was_lost(first.seen + second.seen, end, 6)
    assert max(second.staleness, default=0) <= 1
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [
        0,
        1,
        2,
        3,
        4,
        5,
        6,
    ]
