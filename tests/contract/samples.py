"""Random samples to train on: three steps of eight."""

from __future__ import annotations

import random

from rlpost.types import TrainSample


def random_sample(source: random.Random) -> TrainSample:
    prompt_length, response_length = source.randint(1, 12), source.randint(1, 20)
    return TrainSample(
        token_ids=tuple(source.randrange(96) for _ in range(prompt_length + response_length)),
        prompt_length=prompt_length,
        loss_mask=(1, *(int(source.random() < 0.8) for _ in range(response_length - 1))),
        rollout_logprobs=tuple(-4 * source.random() for _ in range(response_length)),
        advantage=source.uniform(-2, 2),
    )


_source = random.Random(3)
STEPS = [[random_sample(_source) for _ in range(8)] for _ in range(3)]
