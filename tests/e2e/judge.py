"""A reward that asks the engines of a group, for runs with a tiny model as the judge."""

from __future__ import annotations

import random
from collections.abc import Mapping

from rlpost.engines.group_client import GroupClient
from rlpost.types import Prompt, Sample


async def reward(prompt: Prompt, sample: Sample, engines: Mapping[str, GroupClient]) -> float:
    """Return 1 for the label, after the judges have answered the question themselves."""
    for name in {"judge", "second"} & {*engines}:
        reply = await engines[name].generate(prompt.text, max_new_tokens=4)
        assert reply["meta_info"]["completion_tokens"]
    return float(sample.text.strip() == prompt.label)


async def drawn(prompt: Prompt, sample: Sample, engines: Mapping[str, GroupClient]) -> float:
    """Return 0 or 1 at random, after the judge has answered: an untrained model is never right."""
    await reward(prompt, sample, engines)
    return float(random.random() < 0.5)
