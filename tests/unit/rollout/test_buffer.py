"""Every fetched prompt is trained, filtered or buffered exactly once, in any order of events."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpost.durable.state import RunState
from rlpost.rollout.buffer import RolloutBuffer, Rules, Tally
from rlpost.types import Backlog, Prompt, Sample, SampleGroup, ScoredSample, Unfinished

NOTHING = Backlog()


def prompt(prompt_id: int) -> Prompt:
    return Prompt(prompt_id, "", (1,))


def answer(prompt_id: int, *versions: int, cut: bool = False) -> Sample:
    """An answer with one token per version."""
    spans = tuple((version, 1) for version in versions) if len(versions) > 1 else ()
    tokens = tuple(range(len(versions)))
    reason = "abort" if cut else "stop"
    return Sample(
        prompt_id,
        0,
        (1,),
        tokens,
        (-0.5,) * len(tokens),
        "",
        reason,
        versions[-1],
        version_spans=spans,
    )


def group(prompt_id: int, *versions: int) -> SampleGroup:
    return SampleGroup(prompt_id, (ScoredSample(answer(prompt_id, *versions), 1.0),))


def start(buffer: RolloutBuffer, prompt_ids: range) -> None:
    buffer.add_prompts([prompt(prompt_id) for prompt_id in prompt_ids])
    for prompt_id in prompt_ids:
        buffer.start(prompt_id)


def opened(rules: Rules, backlog: Backlog = NOTHING, step: int = 0) -> RolloutBuffer:
    buffer = RolloutBuffer(rules, backlog, step=step)
    buffer.is_open = True
    return buffer


def test_more_groups_are_started_when_too_few_are_left_and_surplus_is_kept() -> None:
    buffer = opened(Rules(batch_size=4, start_size=6, num_steps=9))
    assert buffer.capacity() == 6
    start(buffer, range(6))
    assert buffer.capacity() == 0
    for prompt_id in (0, 1):
        buffer.finish(group(prompt_id, 0), wanted=False)
    assert buffer.capacity() == 0  # the remaining four can still make a batch
    buffer.finish(group(2, 0), wanted=False)
    assert buffer.capacity() == 3  # three cannot, so the buffer refills to six
    start(buffer, range(6, 9))
    for prompt_id in (8, 3, 4, 7, 5):
        buffer.finish(group(prompt_id, 0), wanted=True)
    taken = buffer.take()
    assert taken is not None
    assert [g.prompt_id for g in taken] == [3, 4, 7, 8]
    assert buffer.counts() == {
        "rollout/num_filtered": 3,
        "rollout/num_aborted": 0,
        "rollout/num_continued": 0,
        "rollout/wasted_tokens": 3,
        "rollout/num_held": 1,
        "rollout/num_unfinished": 1,
    }
    assert buffer.take() is None


@pytest.mark.parametrize("keep_partial", [True, False])
def test_an_aborted_group_waits_with_or_without_its_tokens(keep_partial: bool) -> None:
    buffer = opened(Rules(batch_size=1, start_size=2, num_steps=9, keep_partial=keep_partial))
    start(buffer, range(2))
    partial = Unfinished(prompt(1), (answer(1, 0, 0, cut=True),))
    buffer.finish(group(0, 0), wanted=True)
    buffer.abort(partial)
    assert buffer.waiting == (partial if keep_partial else Unfinished(prompt(1)),)
    assert buffer.take() == [group(0, 0)]
    assert (buffer.counts()["rollout/num_aborted"], buffer.counts()["rollout/wasted_tokens"]) == (
        1,
        2 * (not keep_partial),
    )
    again = buffer.start(1)
    assert again.samples == (partial.samples if keep_partial else ())


def test_groups_in_training_stay_in_the_backlog_until_they_are_trained() -> None:
    buffer = opened(Rules(batch_size=2, start_size=2, num_steps=9))
    start(buffer, range(2))
    for prompt_id in range(2):
        buffer.finish(group(prompt_id, 0), wanted=True)
    assert buffer.take() is not None
    assert [g.prompt_id for g in buffer.backlog().finished] == [0, 1]
    resumed = opened(buffer.rules, buffer.backlog())
    assert resumed.take() == [group(0, 0), group(1, 0)]
    assert resumed.counts() == buffer.counts()
    buffer.mark_trained()
    assert buffer.backlog() == Backlog(num_fetched=2, num_trained=2, newest_id=1)


def test_counts_survive_a_preemption_and_do_not_include_its_own_aborts() -> None:
    undisturbed = opened(Rules(batch_size=2, start_size=2, num_steps=9))
    start(undisturbed, range(2))
    undisturbed.finish(group(0, 0), wanted=False)
    undisturbed.add_counts({"rollout/bad_prompts": 2.0})
    start(undisturbed, range(2, 3))
    backlog = undisturbed.backlog()
    preempted = opened(undisturbed.rules, backlog)
    for prompt_id in (1, 2):
        undisturbed.finish(group(prompt_id, 0), wanted=True)
        preempted.start(prompt_id)
    preempted.abort(Unfinished(prompt(1), (answer(1, 0, 0, cut=True),)))
    resumed = opened(undisturbed.rules, preempted.backlog())
    assert resumed.backlog().counts == {
        "rollout/num_filtered": 1,
        "rollout/wasted_tokens": 1,
        "rollout/bad_prompts": 2,
    }
    for prompt_id in (1, 2):
        resumed.start(prompt_id)
        resumed.finish(group(prompt_id, 0), wanted=True)
    assert undisturbed.take() == resumed.take() == [group(1, 0), group(2, 0)]
    assert undisturbed.counts() == resumed.counts()


def test_counts_for_the_next_batch_stay_with_it_when_the_current_batch_is_returned() -> None:
    buffer = opened(Rules(batch_size=1, start_size=2, num_steps=9))
    start(buffer, range(2))
    buffer.finish(group(0, 0), wanted=False)
    buffer.finish(group(1, 0), wanted=True)
    buffer.take()
    start(buffer, range(2, 4))  # for the next batch, while this one is in training
    buffer.finish(group(2, 0), wanted=False)
    again = opened(buffer.rules, opened(buffer.rules, buffer.backlog()).backlog())
    assert again.take() == [group(1, 0)] and again.counts() == buffer.counts()
    again.mark_trained()
    again.start(3)
    again.finish(group(3, 0), wanted=True)
    assert again.take() == [group(3, 0)] and again.counts()["rollout/num_filtered"] == 1


def test_no_more_groups_are_in_flight_than_can_be_trained_in_time_or_before_the_last_step() -> None:
    buffer = opened(Rules(batch_size=2, start_size=2, num_steps=3, max_staleness=1))
    assert buffer.capacity() == 4
    start(buffer, range(4))
    for prompt_id in (0, 1):
        buffer.finish(group(prompt_id, 0), wanted=True)
    assert buffer.take() is not None and buffer.capacity() == 0
    buffer.mark_trained()
    assert buffer.capacity() == 0  # the engines still have the old weights
    buffer.version = 1
    assert buffer.capacity() == 2
    start(buffer, range(4, 6))
    for prompt_id in range(2, 6):
        buffer.finish(group(prompt_id, 0 if prompt_id < 4 else 1), wanted=True)
    assert [g.prompt_id for g in buffer.take() or ()] == [2, 3]
    buffer.mark_trained()
    buffer.version = 2
    assert buffer.capacity() == 0


def test_a_batch_waits_for_a_straggler_that_would_become_too_old() -> None:
    """Group 2 began with version 0, so it must be trained at version 1, in this batch.

    Otherwise the groups that are already finished would make the batch.
    """
    buffer = opened(Rules(batch_size=2, start_size=2, num_steps=9, max_staleness=1))
    start(buffer, range(4))
    for prompt_id in (0, 1):
        buffer.finish(group(prompt_id, 0), wanted=True)
    assert buffer.take() is not None
    buffer.mark_trained()
    buffer.version = 1
    start(buffer, range(4, 6))
    for prompt_id in (3, 4, 5):
        buffer.finish(group(prompt_id, 0 if prompt_id == 3 else 1), wanted=True)
    assert not buffer.has_batch()
    buffer.finish(group(2, 0, 1), wanted=True)
    assert [g.prompt_id for g in buffer.take() or ()] == [2, 3]


def test_after_a_resume_with_a_stricter_bound_stale_groups_are_not_trained() -> None:
    held = Backlog(
        (group(0, 1), group(1, 4)), (Unfinished(prompt(2), (answer(2, 1, cut=True),)),), 3, 0, 0, 2
    )
    buffer = opened(
        Rules(batch_size=1, start_size=1, num_steps=9, max_staleness=1, keep_partial=True),
        held,
        step=5,
    )
    assert buffer.start(2) == Unfinished(prompt(2))
    assert [g.prompt_id for g in buffer.take() or ()] == [1]
    assert buffer.counts()["rollout/wasted_tokens"] == 2


@pytest.mark.parametrize(
    "broken",
    [
        Backlog((group(3, 0),), num_fetched=4, num_trained=2, newest_id=3),
        Backlog((group(3, 0), group(3, 0)), num_fetched=2, newest_id=3),
    ],
    ids=["lost", "twice"],
)
def test_a_tally_that_does_not_add_up_is_refused(broken: Backlog) -> None:
    with pytest.raises(AssertionError):
        Tally(broken)


def test_a_prompt_that_is_fetched_twice_is_refused() -> None:
    buffer = RolloutBuffer(Rules(1, 1, 1), Backlog(), step=0)
    buffer.add_prompts([prompt(0)])
    with pytest.raises(AssertionError, match="fetched twice"):
        buffer.add_prompts([prompt(0)])


class World:
    """Engines, a trainer and preemptions with random events; records the fate of each prompt."""

    def __init__(self, rules: Rules, seed: int) -> None:
        self.draw = random.Random(seed)
        self.rules, self.buffer = rules, opened(rules)
        self.cursor, self.running = 0, {}
        self.trained, self.filtered, self.staleness = [], [], [0]

    def run(self) -> None:
        while self.buffer.step < self.rules.num_steps:
            event = self.draw.random()
            if event < 0.03:
                self.resume()
            elif event < 0.1:
                self.cut_off_all()
            self.fill()
            if not self.train() and self.running:
                self.finish_one()

    def fill(self) -> None:
        self.buffer.is_open = True
        while (room := self.buffer.capacity()) > 0:
            entries = self.buffer.waiting[:room] or self.buffer.add_prompts(
                [prompt(self.cursor + i) for i in range(room)]
            )
            self.cursor = max(self.cursor, *(entry.prompt.prompt_id + 1 for entry in entries))
            for entry in entries:
                entry = self.buffer.start(entry.prompt.prompt_id)
                versions = [
                    v
                    for sample in entry.samples
                    for v, n in sample.version_spans
                    or [(sample.policy_version, 1)] * len(sample.response_ids)
                    for _ in range(n)
                ]
                self.running[entry.prompt.prompt_id] = [*versions, self.buffer.version]

    def finish_one(self) -> None:
        prompt_id = self.draw.choice(list(self.running))
        versions = self.running.pop(prompt_id)
        wanted = self.draw.random() < 0.7
        if not wanted:
            self.filtered.append(prompt_id)
        last = [self.buffer.version] if self.buffer.version != versions[-1] else []
        self.buffer.finish(group(prompt_id, *versions, *last), wanted=wanted)

    def cut_off_all(self) -> None:
        for prompt_id, versions in self.running.items():
            written = (answer(prompt_id, *versions, cut=True),) if self.draw.random() < 0.5 else ()
            self.buffer.abort(Unfinished(prompt(prompt_id), written))
        self.running = {}

    def train(self) -> bool:
        groups = self.buffer.take()
        if groups is None:
            return False
        if self.draw.random() < 0.1:
            self.resume()  # before the step was trained
            return True
        self.staleness += [self.buffer.version - each.oldest_version for each in groups]
        self.trained += [each.prompt_id for each in groups]
        self.buffer.mark_trained()
        if self.draw.random() < 0.1:
            self.resume()  # after the step was trained, so the engines start with the new weights
        self.buffer.version = self.buffer.step
        return True

    def resume(self) -> None:
        """Resume from the content of a checkpoint alone."""
        self.running = {}
        state = RunState(self.buffer.step).holding({}, self.buffer.backlog())
        state = RunState.from_json(state.to_json())
        self.buffer = opened(self.rules, state.backlog, step=state.step)


@given(
    st.integers(1, 4),
    st.integers(0, 4),
    st.sampled_from([None, 1, 2, 3]),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_every_prompt_is_trained_filtered_or_held_once(
    batch: int, more: int, staleness: int | None, partial: bool, seed: int
) -> None:
    """This holds for any mix of drops, aborts, saves and resumes, within the staleness bound."""
    world = World(Rules(batch, batch + more, 8, staleness, partial), seed)
    world.run()
    held = world.buffer.backlog()
    assert len(world.trained) == 8 * batch
    assert sorted([*world.trained, *world.filtered, *held.prompt_ids]) == list(range(world.cursor))
    assert (held.num_trained, held.num_filtered) == (len(world.trained), len(world.filtered))
    if staleness is not None:
        assert max(world.staleness) <= staleness


class Counted:
    """A minimal group that counts how often the buffer reads its age."""

    num_tokens = 1

    def __init__(self, prompt_id: int, version: int) -> None:
        self.prompt_id, self.version, self.times_asked = prompt_id, version, 0

    @property
    def oldest_version(self) -> int:
        self.times_asked += 1
        return self.version


@pytest.mark.parametrize("max_staleness", [None, 100])
def test_an_event_of_one_group_reads_no_other_group(max_staleness: int | None) -> None:
    """With 100,000 groups in the backlog, reading all of them for each event takes hours."""
    count = 300
    buffer = opened(
        Rules(batch_size=10, start_size=count, num_steps=count, max_staleness=max_staleness)
    )
    start(buffer, range(count))
    groups = [Counted(prompt_id, 0) for prompt_id in range(count)]
    for each in groups:
        buffer.finish(each, wanted=True)  # type: ignore[arg-type]
        buffer.capacity()
        buffer.has_batch()
    for _ in range(5):
        assert buffer.take() is not None
        buffer.mark_trained()
    assert max(each.times_asked for each in groups) <= 2


@given(st.lists(st.integers(0, 4), min_size=8, max_size=24), st.integers(0, 4), st.integers(0, 6))
def test_the_oldest_groups_come_first_and_ties_are_in_order_of_completion(
    versions: list[int], max_staleness: int, num_running: int
) -> None:
    """Compare with the definition of a batch: sort all groups, then check every deadline."""
    size, step = 4, 4
    buffer = RolloutBuffer(Rules(size, size, 100, max_staleness), NOTHING, step=step)
    start(buffer, range(len(versions) + num_running))  # running groups began at version ``step``
    for prompt_id in random.Random(len(versions)).sample(range(len(versions)), len(versions)):
        buffer.finish(group(prompt_id, versions[prompt_id]), wanted=True)
    kept = [
        each for each in buffer.backlog().finished if each.oldest_version >= step - max_staleness
    ]
    ordered = sorted(kept, key=lambda each: each.oldest_version)
    left = sorted([each.oldest_version for each in ordered[size:]] + [step] * num_running)
    in_time = all(
        count <= (version + max_staleness - step) * size for count, version in enumerate(left, 1)
    )
    expected = None
    if len(ordered) >= size and (in_time or not num_running):
        expected = sorted(each.prompt_id for each in ordered[:size])
    taken = buffer.take()
    assert (None if taken is None else [each.prompt_id for each in taken]) == expected


def test_the_longest_waiting_groups_are_the_first_of_the_waiting_ones() -> None:
    buffer = opened(Rules(batch_size=4, start_size=6, num_steps=9))
    buffer.add_prompts([prompt(prompt_id) for prompt_id in range(6)])
    buffer.start(1)
    assert buffer.longest_waiting(3) == buffer.waiting[:3]
    assert [entry.prompt.prompt_id for entry in buffer.longest_waiting(9)] == [0, 2, 3, 4, 5]
