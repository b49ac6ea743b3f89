"""Deterministic answers for runs that are disturbed: requests are real, their text is replaced.

    --custom-generate-function-path FILE:answer --dynamic-sampling-filter-path FILE:is_wanted
    --rm-type exact_match

FILE is a copy of this module. Input: a prompt. Output: tokens, log-probs and text that depend on
prompt and index only, so that two runs can be compared bit for bit, independent of the engines'
batches. Files beside FILE set how long an answer takes, and record what was finished:

- an answer is a short request and a random pause (``SECONDS`` x ``SLOWNESS``);
- ``FINISHED`` has a line for each finished group.
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
"""Prompt, process id and time of each finished group."""
SLOWNESS = Path(__file__).with_suffix(".slowness")
"""A factor of the pauses; 1 without this file."""
SECONDS = (0.1, 0.8)  # engines write so few tokens faster than any process could be killed
SMALLEST_ID, LARGEST_ID = 3, 12
LONGEST = 6  # tokens that are trained
SHARE_RIGHT = 0.5  # of the answers
DROPPED = 5  # every fifth group is not wanted


async def answer(builder: ResponseBuilder, prompt: Prompt, sampling: SamplingParams) -> Sample:
    """Request an answer, and replace its tokens, log-probs and text."""
    rng = random.Random(f"{prompt.prompt_id}/{builder.index}")
    await _write_and_pause(builder, rng.uniform(*SECONDS))
    length = rng.randint(1, LONGEST)
    return Sample(
        prompt_id=prompt.prompt_id,
        index=builder.index,
        prompt_ids=prompt.token_ids,
        response_ids=tuple(rng.randint(SMALLEST_ID, LARGEST_ID) for _ in range(length)),
        rollout_logprobs=tuple(-rng.random() for _ in range(length)),
        text=str(prompt.label) if rng.random() < SHARE_RIGHT else "",
        finish_reason="stop",
        policy_version=builder.sample().policy_version,
        label=prompt.label,
    )


async def _write_and_pause(builder: ResponseBuilder, seconds: float) -> None:
    await builder.write(max_new_tokens=LONGEST)
    slowness = float(SLOWNESS.read_text()) if SLOWNESS.exists() else 1.0
    await asyncio.sleep(slowness * seconds)


def is_wanted(group: SampleGroup) -> bool:
    """Whether the group is trained: not every fifth. Called once for each finished group."""
    _append(FINISHED, f"{group.prompt_id} {os.getpid()} {time.monotonic()}")
    return group.prompt_id % DROPPED != 0


def _append(path: Path, line: str) -> None:
    """Append in one write, so that a killed process leaves only whole lines."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(file, f"{line}\n".encode())
    finally:
        os.close(file)
