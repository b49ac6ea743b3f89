"""Resumes with one damaged file of a long journal never train a batch at the wrong step.

Loop, collector and journal are real. Saves are deferred, as with --async-save on slow storage: each
begins a segment and none is committed. A crash therefore leaves a chain of segments from the start
of the run.
"""

import random
import shutil
from contextlib import suppress
from dataclasses import replace
from functools import cache

import pytest

from rlpost.durable.journal_chain import read_folder
from rlpost.durable.journal_format import BATCH, Framing, header_content
from rlpost.durable.journal_segments import read_segment
from rlpost.durable.state import RunState
from rlpost.tasks.cursor import PromptCursor
from tests.unit.driver import test_loop
from tests.unit.driver.test_crash import Killed, Mortal
from tests.unit.driver.test_loop import FakeStages, Prompts, comparable, run
from tests.unit.durable.test_journal_chain import DAMAGE as KINDS
from tests.unit.durable.test_journal_chain import damage as damage_a_file

MODES = ["sync", "one_step_off", "fully_async"]
NUM_STEPS = 5  # until the kill
# the first segment, then one per state; segment s + 1 has the batch of step s
NUM_SEGMENTS = 1 + NUM_STEPS


class PutOff(Mortal):
    """Stages that never commit a checkpoint.

    ``ages`` are the staleness, in steps, of all trained groups.
    """

    def __init__(self, dies_at=None):
        super().__init__(dies_at)
        self.versions, self.ages = [0], []

    async def train(self, groups, rollout):
        step = self.passed["train"]
        found = await super().train(groups, rollout)
        self.ages += [step - group.oldest_version for group in groups]
        return found

    is_owed = True

    async def save(self, state, *, wait):
        pass


def flipped(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(bytes(data))


def flip_header(path):
    flipped(path, 30)


def flip_record(path):
    flipped(path, path.stat().st_size - 5)


def cut_in_half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def cut_between_records(path):
    path.write_bytes(path.read_bytes()[: read_segment(path).records[-1].offset])


def empty(path):
    path.write_bytes(b"")


def delete(path):
    path.unlink()


def duplicate(path):
    shutil.copy(path, path.with_name("0000009.log"))


def swap(path):
    other = path.with_name(f"{(int(path.stem) + 1) % NUM_SEGMENTS:07d}.log")
    ours, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(ours)


DAMAGE = [
    flip_header,
    flip_record,
    cut_in_half,
    cut_between_records,
    empty,
    delete,
    duplicate,
    swap,
]


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Return a function from a mode to the folder of a run that was killed in its fifth step."""

    @cache
    def of(mode):
        folder = tmp_path_factory.mktemp(mode)
        with pytest.raises(Killed):
            run(folder, PutOff(("train", NUM_STEPS)), RunState(pending={}), rollout_mode=mode)
        return folder

    return of


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("untouched")
    stages = FakeStages()
    run(folder, stages, RunState(pending={}))
    return stages.weights, comparable(folder)


def resumed(folder, mode, **changed):
    """Resume the run from its start; check that staleness of all groups is within its bounds."""
    stages = PutOff()
    run(folder, stages, RunState(pending={}), rollout_mode=mode, **changed)
    bound = {"sync": 0, "one_step_off": 1, "fully_async": 1}[mode]
    assert min(stages.ages) >= 0 and max(stages.ages) <= bound
    assert sorted(stages.seen) == list(range(24))
    assert [line["step"] for line in comparable(folder)] == list(range(7))
    return stages


def batches(folder):
    """Return (step, prompt ids) of all batches in the journal."""
    records = [
        record for segment in read_folder(folder / "journal")[0] for record in segment.records
    ]
    return [
        (record.meta["step"], record.meta["prompt_ids"])
        for record in records
        if record.kind == BATCH
    ]


@pytest.mark.parametrize("mode", MODES)
def test_without_damage_the_whole_chain_is_used(tmp_path, killed, mode):
    folder = shutil.copytree(killed(mode), tmp_path / "run")
    taken = batches(folder)
    assert [step for step, _ in taken] == list(range(NUM_STEPS))
    assert len(read_folder(folder / "journal")[0]) == NUM_SEGMENTS
    stages = resumed(folder, mode)
    for step, prompts in taken:
        assert stages.seen[4 * step : 4 * step + 4] == prompts


@pytest.mark.parametrize(
    ("mode", "number", "damage"),
    [  # every damage meets every file, and each of both every mode
        (MODES[(number + index) % len(MODES)], number, damage)
        for number in range(NUM_SEGMENTS)
        for index, damage in enumerate(DAMAGE)
    ],
)
def test_one_damaged_file_costs_only_its_segment_and_those_after_it(
    tmp_path, killed, untouched, caplog, mode, number, damage
):
    folder = shutil.copytree(killed(mode), tmp_path / "run")
    path = folder / f"journal/{number:07d}.log"
    taken = batches(folder)
    damage(path)
    stages = resumed(folder, mode)
    if mode == "sync":
        assert (stages.weights, comparable(folder)) == untouched
    if damage is duplicate:
        first, named = NUM_SEGMENTS, {9}
    elif damage is swap and number == NUM_SEGMENTS - 1:
        first, named = 0, set(range(NUM_SEGMENTS))
    else:
        first, named = number, set(range(number, NUM_SEGMENTS))
    for step, prompts in taken[: max(0, first - 1)]:
        assert stages.seen[4 * step : 4 * step + 4] == prompts
    # Only the next segment shows that a file is missing or ends between two records.
    named -= {number} if damage in (delete, cut_between_records) else set()
    assert {segment for segment in range(10) if f"{segment:07d}.log" in caplog.text} == named


@pytest.mark.parametrize("mode", MODES)
def test_a_damaged_run_resumes_again_with_its_regenerated_groups(tmp_path, killed, mode):
    """Invalid records must not come before records that were written since."""
    folder = shutil.copytree(killed(mode), tmp_path / "run")
    empty(folder / "journal/0000002.log")
    again = PutOff(("train", 5))
    with pytest.raises(Killed):
        run(folder, again, RunState(pending={}), rollout_mode=mode)
    stages = resumed(folder, mode)
    assert stages.seen[:16] == again.seen[:16]
    assert len(set(stages.written) & set(again.seen[:16])) == 0


class Changed(Prompts):
    """Prompts of a file in which one row was edited."""

    def prompt(self, position, prompt_id):
        found = super().prompt(position, prompt_id)
        return (
            found if position != 3 or found is None else replace(found, text="asks something else")
        )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "prompts", [lambda bad: Prompts((3,)), Changed], ids=["became bad", "changed"]
)
def test_answers_to_a_changed_row_are_not_used_and_the_run_continues(
    tmp_path, killed, monkeypatch, caplog, mode, prompts
):
    """This includes changes that the fingerprint of a large file does not show."""
    folder = shutil.copytree(killed(mode), tmp_path / "run")
    before = batches(folder)
    monkeypatch.setattr(test_loop, "Prompts", prompts)
    stages = PutOff()
    run(folder, stages, RunState(pending={}), rollout_mode=mode)
    assert len(stages.seen) == len(set(stages.seen)) == 24
    assert min(stages.ages) >= 0
    third = next(prompt.prompt_id for prompt in cursor().take(10) if prompt.text == "p3")
    intact = [prompts for _, prompts in before if max(prompts) < third]
    assert stages.seen[: 4 * len(intact)] == [prompt for prompts in intact for prompt in prompts]
    assert (
        f"prompt {third}, which reads differently now: --prompt-data or the tokenizer has changed"
        in caplog.text
        or (f"a group of prompt {third}, for which the run does not wait" in caplog.text)
    )
    assert "To generate again: groups:" in caplog.text


def cursor():
    return PromptCursor(Prompts(), shuffle=True, seed=1)


def leave_out(number, folder):
    """Delete a segment and write the later ones as if it had never existed."""
    seal = None
    for segment in read_folder(folder)[0]:
        contents = [record.content() for record in segment.records]
        segment.path.unlink()
        if segment.header.number != number:
            framing = Framing()
            header = header_content(replace(segment.header, previous=seal))
            segment.path.write_bytes(b"".join(map(framing.frame, [header, *contents])))
            seal = framing.seal(segment.header.number)


def test_a_batch_of_another_step_is_never_trained(tmp_path, killed, caplog):
    """Seals that continue each other do not prove that no segment is missing in between."""
    folder = shutil.copytree(killed("sync"), tmp_path / "run")
    leave_out(2, folder / "journal")
    stages = resumed(folder, "sync")
    assert stages.seen == list(range(24))
    assert (
        "a group written by the weights of step 2, while the run is at step 1; it and later records are ignored"
        in caplog.text
    )


PLACES_TO_DIE = ["train", "trained", "sync", "evaluate", "save"]


class Sometimes(PutOff):
    """Stages that commit some of their states; ``begun`` is the step at which they start."""

    def __init__(self, dies_at, rng, begun):
        super().__init__(dies_at)
        self.rng, self.begun, self.committed = rng, begun, []

    async def save(self, state, *, wait):
        self.passes("save")
        if wait or self.rng.random() < 0.3:
            self.committed.append((state, self.weights))

    async def train(self, groups, rollout):
        found = await super().train(groups, rollout)
        self.ages[-len(groups) :] = [self.begun + age for age in self.ages[-len(groups) :]]
        return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(6))
def test_a_run_whose_journal_is_damaged_after_every_crash_finishes(tmp_path, untouched, mode, seed):
    """Sometimes it resumes from the second newest checkpoint, as if the newest were damaged."""
    rng = random.Random(f"{mode} {seed}")
    committed = [(RunState(pending={}), "")]
    for dies_at in [*((rng.choice(PLACES_TO_DIE), rng.randint(1, 6)) for _ in range(4)), None]:
        del committed[rng.choice([len(committed), len(committed), max(1, len(committed) - 1)]) :]
        state, weights = committed[-1]
        stages = Sometimes(dies_at, rng, state.step)
        stages.weights, stages.versions = weights, [state.step]
        with suppress(Killed):
            run(tmp_path, stages, state, saved=len(committed) > 1, rollout_mode=mode)
        assert all(0 <= age <= (mode != "sync") for age in stages.ages)
        committed += stages.committed
        damage_a_file(
            tmp_path / "journal", rng.choice(KINDS), rng.randrange(99), rng.randrange(9999)
        )
    assert [line["step"] for line in comparable(tmp_path)] == list(range(7))
    if mode == "sync":
        assert (stages.weights, comparable(tmp_path)) == untouched
