"""Batches since a checkpoint are read from disk while the journal is being written."""

import asyncio

import pytest

from rlpost.durable.recorded import write_groups
from rlpost.durable.trained_batches import RecordedBatches
from rlpost.errors import CheckpointError
from tests.unit.durable.test_journal import begin, durable, group, resumed

COUNTS = {}


def trained(journal, step, *groups, finished=True):
    """Finish groups and take them as the batch of a step."""
    if finished:
        for one in groups:
            journal.append_group(one, wanted=True)
    journal.batch(step, groups, COUNTS)
    durable(journal)


def read(journal, base, step, until, backlog=()):
    async def run():
        batches = await journal.trained_since(base, step, backlog=backlog, until=until)
        return [await batches.groups(one) for one in range(step, until)]

    return asyncio.run(run())


def test_batches_after_a_state_are_read_in_training_order_while_the_journal_is_open(tmp_path):
    journal = resumed(tmp_path)
    groups = [group(number, 3, 2) for number in range(6)]
    trained(journal, 0, groups[1], groups[0])
    trained(journal, 1, groups[2], groups[3])
    journal.append_group(groups[4], wanted=True)
    assert read(journal, 0, 0, 2) == [groups[:2], groups[2:4]]
    journal.close()


def test_groups_that_the_checkpoint_holds_are_taken_from_its_backlog(tmp_path):
    """In the asynchronous modes a batch mixes groups finished before and after a checkpoint."""
    journal = resumed(tmp_path)
    groups = [group(number, 2) for number in range(4)]
    trained(journal, 0, groups[0])
    journal.append_group(groups[2], wanted=True)
    base = begin(journal, 1)
    journal.append_group(groups[1], wanted=True)
    trained(journal, 1, groups[1], groups[2], finished=False)
    assert read(journal, base, 1, 2, backlog=[groups[2]]) == [[groups[1], groups[2]]]
    with pytest.raises(CheckpointError, match="batch of step 1"):
        read(journal, base, 1, 2)
    journal.close()


def test_steps_that_were_themselves_replayed_are_read_again(tmp_path):
    """The second attempt trains batches of the first and its own batches before a rank dies."""
    groups = [group(number, 2) for number in range(4)]
    first = resumed(tmp_path)
    trained(first, 0, groups[0])
    trained(first, 1, groups[1])
    first.close()
    second = resumed(tmp_path)
    while second.num_batches:
        list(second.again())
    trained(second, 2, groups[2])
    assert read(second, 0, 0, 3) == [[groups[0]], [groups[1]], [groups[2]]]
    second.close()


def test_uncommitted_states_in_between_leave_no_gap(tmp_path):
    journal = resumed(tmp_path)
    groups = [group(number, 2) for number in range(3)]
    for step, one in enumerate(groups):
        trained(journal, step, one)
        begin(journal, step + 1)
    assert read(journal, 0, 0, 3) == [[one] for one in groups]
    journal.close()


def test_a_batch_that_is_not_on_disk_is_an_error_that_names_its_step(tmp_path):
    journal = resumed(tmp_path)
    trained(journal, 0, group(0, 2))
    with pytest.raises(CheckpointError, match="does not hold the batch of step 1"):
        read(journal, 0, 0, 2)
    journal.close()


def test_a_recording_gives_the_batches_of_a_run_that_trains_on_it(tmp_path):
    template = str(tmp_path / "{rollout_id}.jsonl")
    write_groups(template, 3, [group(8, 2), group(7, 1)])
    found = asyncio.run(RecordedBatches(template).groups(3))
    assert [one.prompt_id for one in found] == [7, 8]
