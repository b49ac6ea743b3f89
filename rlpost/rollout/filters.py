"""Which groups are worth training, and which waiting ones are gone on with first.

    --dynamic-sampling-filter-path    (group: SampleGroup) -> bool: whether to train a scored group
    --buffer-filter-path              (waiting: Sequence[Unfinished], num_groups: int) -> Sequence[Unfinished]:
                                      which of the groups that wait to start now, at most ``num_groups``
    --custom-generate-function-path   (draft: Draft, prompt: Prompt, sampling: SamplingParams), async, -> Sample or
                                      several: writes an answer (``rlpost.rollout.draft``)

Comes in: a dotted path, or FILE.py:function. Goes out: the function. Paths that recipes for slime use mean ours.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from rlpost.algorithm.plugin import load_function
from rlpost.rollout.draft import GenerateFunction
from rlpost.types import SampleGroup, Unfinished

GroupFilter = Callable[[SampleGroup], bool]
BufferFilter = Callable[[Sequence[Unfinished], int], Sequence[Unfinished]]

SMALLEST_STD = 1e-6
OURS = {
    "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std": (
        "rlpost.rollout.filters.check_reward_nonzero_std"
    ),
    "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std_with_fallback": (
        "rlpost.rollout.filters.check_reward_nonzero_std_with_fallback"
    ),
    "slime.rollout.filter_hub.buffer_filters.pop_first": "rlpost.rollout.filters.pop_first",
    "slime.rollout.data_source.pop_first": "rlpost.rollout.filters.pop_first",
}
"""What other trainers call functions that are here."""


def check_reward_nonzero_std(group: SampleGroup) -> bool:
    """Whether the rewards differ: equal ones have no advantage and teach nothing (DAPO, arXiv 2503.14476, 3.2)."""
    return statistics.pstdev(group.rewards) > SMALLEST_STD


def check_reward_nonzero_std_with_fallback(group: SampleGroup) -> bool:
    """The same, as long as the batch fills without them: groups of equal rewards are kept where dropping one would
    start more prompts."""
    return check_reward_nonzero_std(group)


check_reward_nonzero_std_with_fallback.keep_when_insufficient = True  # type: ignore[attr-defined]


def keeps_when_insufficient(wanted: GroupFilter) -> bool:
    """Whether a filter only says what it would rather not have: a function with this attribute set."""
    return bool(getattr(wanted, "keep_when_insufficient", False))


def pop_first(waiting: Sequence[Unfinished], num_groups: int) -> Sequence[Unfinished]:
    """Those that have waited longest."""
    return waiting[:num_groups]


def group_filter(path: str | None) -> GroupFilter:
    """The filter of --dynamic-sampling-filter-path; without one every group is kept. Raises ConfigError."""
    return (lambda group: True) if path is None else _load(path, key="rollout.dynamic_sampling_filter_path")


def buffer_filter(path: str | None) -> BufferFilter:
    """The filter of --buffer-filter-path; ``pop_first`` without one. Raises ConfigError."""
    return pop_first if path is None else _load(path, key="rollout.buffer_filter_path")


def generate_function(path: str | None) -> GenerateFunction | None:
    """The function of --custom-generate-function-path, if there is one. Raises ConfigError."""
    return None if path is None else _load(path, key="rollout.custom_generate_function_path")


def _load(path: str, *, key: str) -> Callable[..., Any]:
    return load_function(OURS.get(path, path), key=key)
