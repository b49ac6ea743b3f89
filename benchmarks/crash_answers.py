"""Deterministic answers for ``benchmarks.crash``: every request is real, but its text is replaced.

    --custom-generate-function-path FILE:answer --dynamic-sampling-filter-path FILE:is_wanted
    --rm-type exact_match

Input: a prompt. Output: tokens, log-probs and text that depend on prompt and index only, so that
two runs can be compared bit for bit, independent of the engines' batches. Every finished group is
recorded, with the process that finished it and the time, in the file beside this one.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from pathlib import Path

from rlpost.rollout.response_builder import ResponseBuilder
from rlpost.rollout.sampling import SamplingParams
from rlpost.types import Prompt, Sample, SampleGroup

FINISHED = Path(__file__).with_suffix(".finished")
SMALLEST_ID, LARGEST_ID = 3, 12
LONGEST = 6
SECONDS = (
    0.1,
    0.8,
)  # an answer takes, for engines write a few tokens faster than anybody could kill them
TIMES = Path(__file__).with_suffix(".times")
"""Begin and end of each answer that was finished, in seconds of the machine's monotonic clock."""
SLOWNESS = Path(__file__).with_suffix(".slowness")
"""A file with the number that these times are multiplied by; 1 without it."""
RIGHT = 0.5  # of the answers
DROPPED = 5  # one group in so many


async def answer(builder: ResponseBuilder, prompt: Prompt, sampling: SamplingParams) -> Sample:
    """What the engines write, with other tokens in its place."""
    begin = time.monotonic()
    await builder.write(max_new_tokens=LONGEST)
    written = builder.sample()
    rng = random.Random(f"{prompt.prompt_id}/{builder.index}")
    slowness = float(SLOWNESS.read_text()) if SLOWNESS.exists() else 1.0
    await asyncio.sleep(slowness * rng.uniform(*SECONDS))
    _append(TIMES, f"{begin} {time.monotonic()}")
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
    _append(FINISHED, f"{group.prompt_id} {os.getpid()} {time.monotonic()}")
    return group.prompt_id % DROPPED != 0


def _append(path: Path, line: str) -> None:
    """In one write, so that lines of a process that is killed are whole."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(file, f"{line}\n".encode())
    finally:
        os.close(file)
