"""Batches of supervised examples resume where they stopped and have every prompt once."""

import asyncio

from rlpost.durable.state import RunState
from rlpost.rollout.buffer import RolloutBuffer, Rules
from rlpost.rollout.collector import Supervised
from rlpost.types import Prompt, Sample, SampleGroup, ScoredSample


class Cursor:
    """Prompts 0, 1, 2 and so on."""

    def __init__(self, position=0):
        self.position = position

    def take(self, count):
        self.position += count
        return [Prompt(i, "", (1,)) for i in range(self.position - count, self.position)]

    def state(self):
        return {"position": self.position}


def group(prompt):
    sample = Sample(prompt.prompt_id, 0, (1,), (2, 3), (0.0, 0.0), "", "stop", 0)
    return SampleGroup(prompt.prompt_id, (ScoredSample(sample, 0.0),))


def source(cursor, backlog, step=0):
    rules = Rules(batch_size=3, start_size=3, num_steps=4, max_staleness=None, keep_partial=False)
    return Supervised(
        RolloutBuffer(rules, backlog, step=step), cursor, group, stop_requested=lambda: False
    )


def test_a_stopped_source_resumes_with_the_next_prompts():
    seen, cursor = [], Cursor()
    rollouts = source(cursor, RunState().backlog)
    for step in range(4):
        batch = asyncio.run(rollouts.batch())
        if step == 1:  # the batch is fetched and not trained, so a resume returns it again
            state, backlog = rollouts.pending()
            rollouts = source(Cursor(state["position"]), backlog, step=step)
            again = asyncio.run(rollouts.batch())
            assert again == batch
        seen += [each.prompt_id for each in batch]
        rollouts.mark_trained()
        rollouts.mark_synced(step + 1)
    assert seen == list(range(12))
    assert rollouts.pending()[1].num_trained == 12
