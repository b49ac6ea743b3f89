"""Deterministic answers for ``benchmarks.fleet``: engines do the whole work, their text is replaced.

    --custom-generate-function-path FILE:answer --dynamic-sampling-filter-path FILE:is_wanted

As in ``benchmarks.crash_answers``, tokens depend on prompt and index alone, so that the weights of
two runs can be compared bit for bit. Here each answer is one request, of exactly as many tokens as
the file beside this one says, so that the engines' work can be counted and is set while they run.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

from rlpost.rollout.response_builder import ResponseBuilder
from rlpost.rollout.sampling import SamplingParams
from rlpost.types import Prompt, Sample, SampleGroup

FINISHED = Path(__file__).with_suffix(".finished")
SMALLEST_ID, LARGEST_ID = 3, 12
LENGTH = Path(__file__).with_suffix(".length")
"""Tokens that an engine writes for an answer."""
LONGEST = 6  # tokens that are trained
RIGHT = 0.5  # of the answers
DROPPED = 5  # one group in so many


class Whole(SamplingParams):
    """Sampling that continues after the token that ends an answer."""

    def to_sglang(self) -> dict[str, Any]:
        """See SamplingParams."""
        return {**SamplingParams.to_sglang(self), "ignore_eos": True}


async def answer(builder: ResponseBuilder, prompt: Prompt, sampling: SamplingParams) -> Sample:
    """What the engines write, with other tokens in its place."""
    builder.sampling = Whole(**{one.name: getattr(sampling, one.name) for one in fields(sampling)})
    wanted = max(int(LENGTH.read_text()), builder.num_tokens)
    while builder.num_tokens < wanted:
        await builder.write(max_new_tokens=wanted - builder.num_tokens)
    assert builder.num_tokens == wanted, f"{builder.num_tokens} tokens instead of {wanted}"
    written = builder.sample()
    rng = random.Random(f"{prompt.prompt_id}/{builder.index}")
    length = rng.randint(1, LONGEST)
    return Sample(
        prompt_id=prompt.prompt_id,
        index=builder.index,
        prompt_ids=prompt.token_ids,
        response_ids=tuple(rng.randint(SMALLEST_ID, LARGEST_ID) for _ in range(length)),
        rollout_logprobs=tuple(-rng.random() for _ in range(length)),
        text=str(prompt.label) if rng.random() < RIGHT else "",
        finish_reason="stop",
        policy_version=written.policy_version,
        label=prompt.label,
    )


def is_wanted(group: SampleGroup) -> bool:
    """Not every fifth group; each call is a group that is finished."""
    line = f"{group.prompt_id} {os.getpid()} {time.monotonic()}\n".encode()
    file = os.open(FINISHED, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(file, line)
    finally:
        os.close(file)
    return group.prompt_id % DROPPED != 0
