"""Answers and turns of groups in generation: kept, referred to, void, damaged."""

import asyncio
import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpost.columns import FloatColumn, IntColumn, RouteColumn, TokenSetColumn
from rlpost.durable.journal_chain import read_folder
from rlpost.durable.journal_format import (
    ANSWER,
    BATCH,
    GROUP,
    PART,
    STATE,
    STEP,
    TURN,
    Part,
    prompt_digest,
)
from rlpost.durable.journal_segments import read_segment
from rlpost.durable.open_parts import Kept
from rlpost.types import ImageSpan, Prompt
from tests.unit.durable.test_journal import begin, group, replayed, resumed

OF_0_2 = Path(__file__).with_name("journal_of_0_2")
PROMPT = Prompt(4, "question", (1, 2, 4))


def answer(index, length=50, prompt_id=4):
    """The finished answer of an index."""
    (scored,) = group(prompt_id, length).samples
    return Part(prompt_id, index, ANSWER, samples=(replace(scored.sample, index=index),))


def turn(index, number, token_ids=(5, 6, 7), version=3):
    ids = IntColumn(token_ids)
    return Part(
        4,
        index,
        TURN,
        number,
        spans=((version, len(ids)),),
        columns={"token_ids": ids, "logprobs": FloatColumn([-0.5] * len(ids))},
        value={"request": f"r{number}", "text": "é\ud800", "finish_reason": {"type": "stop"}},
    )


def parts_of(journal, index, prompt_id=4):
    return asyncio.run(journal.parts_of(prompt_id)).get(index, [])


def group_of(answers, reward=1.0):
    """The group of finished answers, as grading makes it: the same columns, other fields."""
    made = group(4, *[1] * len(answers))
    samples = zip(made.samples, answers, strict=True)
    return replace(
        made,
        samples=tuple(
            replace(
                scored,
                reward=reward,
                sample=replace(each.samples[0], extra={"given": each.index}),
            )
            for scored, each in samples
        ),
    )


def flip(path, record):
    """Change one bit in the body of a record."""
    data = bytearray(path.read_bytes())
    data[record.offset + record.size - 2] ^= 4
    path.write_bytes(bytes(data))


@settings(max_examples=30, deadline=None)
@given(
    ids=st.lists(st.integers(0, 2**31 - 1), max_size=8),
    logprob=st.floats(allow_nan=False, allow_infinity=False, width=32),
    state=st.binary(max_size=40),
    finish=st.sampled_from([{"type": "stop", "matched": "é"}, {"type": "abort", "matched": None}]),
)
def test_turns_steps_and_states_read_back_equal_to_the_last_bit(
    tmp_path_factory, ids, logprob, state, finish
):
    folder = tmp_path_factory.mktemp("parts")
    journal = resumed(folder)
    routes = np.arange(len(ids) * 4, dtype=np.uint8).reshape(-1, 2, 2)
    columns = {
        "token_ids": IntColumn(ids),
        "logprobs": FloatColumn([logprob] * len(ids)),
        "routes": RouteColumn(routes),
        "sampling_mask": TokenSetColumn.of([[each] for each in ids]),
    }
    value = {"request": "r", "text": "t", "finish_reason": finish}
    written = [
        Part(4, 1, TURN, 0, spans=((7, len(ids)),), columns=columns, value=value),
        Part(4, 1, STEP, 1, value={"text": "said", "reward": 0.5, "tool": None}),
        Part(4, 1, STATE, value={"steps": 2}, data=state),
    ]
    for part in written:
        journal.add_part(part, PROMPT)
    journal.close()
    assert parts_of(resumed(folder), 1) == written


def test_images_of_an_answer_are_kept_and_its_prompt_is_that_with_the_same_ones(tmp_path):
    images = (ImageSpan("ab" * 32, 1, 2, (1, 2, 4)),)
    asked = replace(PROMPT, images=images)
    part = answer(1)
    part = replace(part, samples=(replace(part.samples[0], images=images),))
    journal = resumed(tmp_path)
    journal.add_part(part, asked)
    journal.close()
    journal = resumed(tmp_path)
    assert asyncio.run(journal.kept_answers()) == {4: list(part.samples)}
    (meta,) = journal.waiting_parts
    other = replace(asked, images=(replace(images[0], hash="cd" * 32),))
    assert meta["prompt"] == prompt_digest(asked) != prompt_digest(other)


def test_answers_and_turns_of_an_unfinished_group_are_kept(tmp_path):
    journal = resumed(tmp_path)
    for part in (turn(0, 0), answer(1), turn(0, 1), turn(2, 0), answer(2, 9)):
        journal.add_part(part, PROMPT)
    journal.close()
    journal = resumed(tmp_path)
    assert journal.kept() == Kept(answers=2, turns=2, begun_again=0, tokens=6 + 50 + 9)
    assert parts_of(journal, 0) == [turn(0, 0), turn(0, 1)]
    assert parts_of(journal, 2) == [], "an answer replaces its turns"
    kept = asyncio.run(journal.kept_answers())
    assert kept == {4: [answer(1).samples[0], answer(2, 9).samples[0]]}
    assert journal.oldest_version(4) == 3 and journal.oldest_version(5) is None
    number = begin(journal, 1)  # a checkpoint: the new segment has copies
    journal.add_part(turn(0, 2), PROMPT)
    journal.close()
    assert parts_of(resumed(tmp_path, number, 1), 0) == [turn(0, 0), turn(0, 1), turn(0, 2)]


def test_a_group_refers_to_its_answers_instead_of_repeating_them(tmp_path):
    answers = [answer(index, 500) for index in range(3)]
    journal = resumed(tmp_path)
    for part in answers:
        journal.add_part(part, PROMPT)
    finished = group_of(answers)
    journal.append_group(finished, wanted=True, prompt=PROMPT)
    journal.close()
    journal = resumed(tmp_path)  # copies group and answers
    assert journal.kept() == Kept(0, 0, 0, 0)
    (record,) = journal.waiting
    assert record.size < 0.1 * sum(part.size for part in record.answers)
    assert record.group() == finished
    number = begin(journal, 1)
    journal.close()
    (record,) = resumed(tmp_path, number, 1).waiting
    assert record.group() == finished


def test_a_group_of_resumed_answers_refers_to_them(tmp_path):
    journal = resumed(tmp_path)
    journal.add_part(answer(0, 500), PROMPT)
    journal.close()
    journal = resumed(tmp_path)
    kept = asyncio.run(journal.kept_answers())[4]
    finished = group_of([replace(answer(0), samples=tuple(kept))])
    journal.append_group(finished, wanted=True, prompt=PROMPT)
    journal.close()
    (record,) = resumed(tmp_path).waiting
    assert len(record.answers) == 1 and record.group() == finished


def test_a_reward_is_kept_with_its_answer_and_void_without_it(tmp_path):
    """The group that is trained is the same: its record has the rewards of all answers."""
    two = Part(4, 1, ANSWER, samples=answer(1).samples * 2)
    journal = resumed(tmp_path)
    journal.add_reward(answer(0).samples[0], PROMPT, 0, 9.0)  # the journal lacks the answer
    for part in (answer(0), two, answer(2)):
        journal.add_part(part, PROMPT)
    journal.add_reward(answer(0).samples[0], PROMPT, 0, 0.1)
    journal.add_reward(two.samples[1], PROMPT, 1, -2.5)
    journal.add_reward(answer(2).samples[0], PROMPT, 0, 1.0)
    journal.add_part(answer(2), PROMPT)  # generated again, and not graded
    journal.close()
    journal = resumed(tmp_path)
    assert journal.kept().answers == 3 and parts_of(journal, 0) == []
    samples = asyncio.run(journal.kept_answers())[4]
    assert [(each.index, each.reward) for each in samples] == [(0, 0.1), (1, None), (1, -2.5), (2, None)]  # fmt: skip
    finished = group_of([answer(0), two, answer(2)])
    journal.append_group(finished, wanted=True, prompt=PROMPT)
    journal.close()
    (record,) = resumed(tmp_path).waiting
    assert record.group() == finished


@pytest.mark.parametrize(
    ("void", "left"),
    [((), []), ((4,), [5]), ((4, 1), [4, 5]), ("batch", [])],
)
def test_void_parts_are_not_used(tmp_path, void, left):
    journal = resumed(tmp_path)
    for part in (answer(0), answer(1), answer(0, prompt_id=5)):
        journal.add_part(part, replace(PROMPT, prompt_id=part.prompt_id))
    if void == "batch":
        journal.batch(0, [], {}, drops_parts=True)
    else:
        journal.drop_parts(*void)
    journal.close()
    kept = asyncio.run(resumed(tmp_path).kept_answers())
    assert sorted(kept) == left
    assert void != (4, 1) or [sample.index for sample in kept[4]] == [0]


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_a_damaged_part_costs_that_part_alone_and_is_named(tmp_path, caplog, damaged):
    journal = resumed(tmp_path)
    for index in range(3):
        journal.add_part(answer(index), PROMPT)
    journal.append_group(group(9, 3), wanted=True)
    journal.close()
    path = tmp_path / "0000000.log"
    record = read_segment(path).records[damaged]
    flip(path, record)
    journal = resumed(tmp_path)
    assert f"{path}: the record at byte {record.offset} is damaged; it is left out" in caplog.text
    found = asyncio.run(journal.kept_answers())[4]
    assert [sample.index for sample in found] == [index for index in range(3) if index != damaged]
    assert replayed(journal) == [(GROUP, 9)]


def test_a_group_with_a_damaged_answer_is_completed_from_the_others(tmp_path, caplog):
    journal = resumed(tmp_path)
    answers = [answer(index) for index in range(3)]
    for part in answers:
        journal.add_part(part, PROMPT)
    journal.append_group(group_of(answers), wanted=True, prompt=PROMPT)
    journal.append_group(group(9, 3), wanted=True)
    journal.close()
    path = tmp_path / "0000000.log"
    flip(path, [each for each in read_segment(path).records if each.kind == PART][1])
    journal = resumed(tmp_path)
    assert "answers [1] to prompt 4 are damaged; they are generated again" in caplog.text
    assert replayed(journal) == [(GROUP, 9)]
    assert [sample.index for sample in asyncio.run(journal.kept_answers())[4]] == [0, 2]


def failing_fsync(descriptor):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("how", ["given up", "EIO", "a bit", "a bit after a resume"])
async def test_what_the_journal_has_lost_is_in_its_next_segment(tmp_path, monkeypatch, how):
    """A group refers only to answers that a resume can read: its batch is replayed."""
    journal, answers = resumed(tmp_path), [answer(index) for index in range(3)]
    with monkeypatch.context() as patched:
        if how in ("given up", "EIO"):
            patched.setattr(os, "fsync", failing_fsync)
        journal.add_part(answers[0], PROMPT)
        await journal.durable()
        if how == "EIO":  # it fails once more when the next segment begins
            patched.setattr(os, "fsync", lambda file, left=[1]: left and failing_fsync(left.pop()))
            number = await journal.begin(1)
    if how == "given up":
        journal._segment.give_up("the storage hangs")
    elif "a bit" in how:
        if "resume" in how:
            journal.close()
            journal = resumed(tmp_path)
            await journal.kept_answers()
        path = max(tmp_path.glob("*.log"))
        flip(path, read_segment(path).records[0])
    journal.add_part(answers[1], PROMPT)
    if how != "EIO":
        number = await journal.begin(1)
    journal.add_part(answers[2], PROMPT)
    journal.append_group(group_of(answers), wanted=True, prompt=PROMPT)
    journal.batch(1, [group_of(answers)], {})
    journal.note_committed(number)
    await journal.durable()
    assert journal.is_durable
    journal.close()
    again = resumed(tmp_path, number, 1)
    records = list(again.waiting)
    assert [record.kind for record in records] == [GROUP, BATCH]
    assert records[0].group() == group_of(answers)


async def test_records_are_durable_only_when_a_resume_reaches_them(tmp_path):
    """After a gap a resume needs the state that was saved behind it, or a later one."""
    journal = resumed(tmp_path)
    await journal.durable()
    assert journal.is_durable
    journal._segment.give_up("the storage hangs")
    assert not journal.is_durable
    behind_the_gap = await journal.begin(1)
    for number in (behind_the_gap, await journal.begin(2)):
        journal.append_group(group(9, 3), wanted=True)
        await journal.durable()
        assert journal.is_written and not journal.is_durable, number
    journal.note_committed(behind_the_gap)
    assert journal.is_durable
    journal.close()
    assert replayed(resumed(tmp_path, behind_the_gap, 1)) == [(GROUP, 9)]
    assert replayed(resumed(tmp_path, 0, 0)) == []


async def test_the_journal_syncs_by_itself_whatever_the_loop_awaits(tmp_path, monkeypatch):
    """After a failure it tries again, without another record."""
    synced, fails, real = asyncio.Event(), [True], os.fsync
    loop = asyncio.get_running_loop()

    def fsync(descriptor):
        if fails:
            failing_fsync(fails.pop())
        real(descriptor)
        loop.call_soon_threadsafe(synced.set)

    journal = resumed(tmp_path)
    monkeypatch.setattr("rlpost.durable.journal.SYNC_AFTER_S", 0.01)
    monkeypatch.setattr(os, "fsync", fsync)
    journal.add_part(turn(0, 0), PROMPT)
    async with asyncio.timeout(30):
        await synced.wait()
        while not journal.is_durable:
            await asyncio.sleep(0.01)
    assert not fails
    journal.close()


def test_two_damaged_records_in_a_row_end_the_segment(tmp_path, caplog):
    journal = resumed(tmp_path)
    for index in range(4):
        journal.add_part(answer(index), PROMPT)
    journal.close()
    path = tmp_path / "0000000.log"
    for record in read_segment(path).records[1:3]:
        flip(path, record)
    journal = resumed(tmp_path)
    assert "is damaged" in caplog.text
    assert [sample.index for sample in asyncio.run(journal.kept_answers())[4]] == [0]


def test_a_journal_of_rlpost_0_2_is_read_and_continued(tmp_path, caplog):
    """Its files were written by that version: format 3."""
    folder = tmp_path / "journal"
    shutil.copytree(OF_0_2, folder)
    segments, _ = read_folder(folder)
    assert [segment.header.format for segment in segments] == [3, 3]
    journal = resumed(folder)
    assert caplog.text == ""
    assert journal.evaluation(1) == {"eval/x": 0.5}
    records = list(journal.waiting)
    assert [record.group() for record in records if record.kind == GROUP] == [
        group(0, 3, 4),
        group(1, 2),
        group(2, 5, 1),
        group(3, 2, 2),
    ]
    journal.add_part(answer(0), PROMPT)
    journal.close()
    assert resumed(folder).kept().answers == 1
