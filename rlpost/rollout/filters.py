"""Loads custom functions: filters, the generate function, the post-processing of rewards.

    --dynamic-sampling-filter-path    (group: SampleGroup) -> bool: whether to train a scored group
    --buffer-filter-path              (waiting: Sequence[Unfinished], num_groups: int) -> Sequence[Unfinished]:
                                      the waiting groups to start now, at most ``num_groups``
    --custom-generate-function-path   async (builder: ResponseBuilder, prompt: Prompt, sampling: SamplingParams)
                                      -> Sample or several: writes an answer (``rlpost.rollout.response_builder``)

Functions with the signatures of slime work as well (``rlpost.extensions.slime``).

Input: a dotted path, or FILE.py:function. Output: the function. Paths that recipes for slime use
mean ours.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from rlpost.algorithm.answers import answers_of, compared_rewards
from rlpost.algorithm.plugin import blaming, checked_interface, foreign_adapters, load_function
from rlpost.algorithm.shaping import PostProcessed
from rlpost.algorithm.signatures import Interface, Kind
from rlpost.rollout.response_builder import GenerateFunction
from rlpost.types import SampleGroup, Unfinished

GroupFilter = Callable[[SampleGroup], bool]
PostProcess = Callable[[Sequence[SampleGroup]], PostProcessed]
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
"""slime's paths of filters that this module provides."""


def check_reward_nonzero_std(group: SampleGroup) -> bool:
    """Return whether the rewards of answers differ; equal ones have zero advantage (DAPO, arXiv
    2503.14476, 3.2). With rewards of turns: whether the returns of the turns differ.
    """
    return statistics.pstdev(compared_rewards(answers_of(group))) > SMALLEST_STD


def check_reward_nonzero_std_with_fallback(group: SampleGroup) -> bool:
    """Like ``check_reward_nonzero_std``, but keep a group if dropping it would start more
    prompts.
    """
    return check_reward_nonzero_std(group)


check_reward_nonzero_std_with_fallback.keep_when_insufficient = True  # type: ignore[attr-defined]


def keeps_when_insufficient(wanted: GroupFilter) -> bool:
    """Return whether a filter is only a preference: its attribute ``keep_when_insufficient`` is
    set.
    """
    return bool(getattr(wanted, "keep_when_insufficient", False))


def pop_first(waiting: Sequence[Unfinished], num_groups: int) -> Sequence[Unfinished]:
    """Return the groups that have waited longest."""
    return waiting[:num_groups]


def group_filter(path: str | None, args: object = None) -> GroupFilter:
    """Load the filter of --dynamic-sampling-filter-path; the default keeps every group.

    ``args`` (``Adapters.arguments``) are passed to a function of slime. Raises ConfigError.
    """
    if path is None:
        return lambda group: True
    function, found = _load(path, "filter", key="rollout.dynamic_sampling_filter_path")
    return _adapted("filter", function, args) if found == "slime" else function


def buffer_filter(path: str | None, args: object = None) -> BufferFilter:
    """Load the filter of --buffer-filter-path; the default is ``pop_first``. Raises ConfigError."""
    if path is None:
        return pop_first
    function, found = _load(path, "buffer filter", key="rollout.buffer_filter_path")
    return _adapted("buffer filter", function, args) if found == "slime" else function


def generate_function(
    path: str | None, args: object = None, *, evaluation: bool = False
) -> GenerateFunction | None:
    """Load the function of --custom-generate-function-path; None without one. Raises ConfigError.

    ``evaluation``: the function answers held-out prompts.
    """
    if path is None:
        return None
    function, found = _load(path, "generate", key="rollout.custom_generate_function_path")
    if found != "slime":
        return function
    return _adapted("generate", function, args, evaluation=evaluation)


def reward_post_process(path: str | None, args: object = None) -> PostProcess | None:
    """Load the function of --custom-reward-post-process-path; None without one.

    Raises ConfigError.
    """
    if path is None:
        return None
    key = "custom_reward_post_process_path"
    function, _ = _load(path, "reward post-process", key=key)  # only slime's interface exists
    return _adapted("reward post-process", function, args, path=path, key=key)


def _load(path: str, kind: Kind, *, key: str) -> tuple[Callable[..., Any], Interface]:
    """Load a function; return it, with its errors turned into ConfigError, and its interface."""
    if path in OURS:
        return load_function(OURS[path], key=key), "rlpost"
    function = load_function(path, key=key)
    found = checked_interface(kind, function, key=key, path=path)
    return blaming(function, path, key=key), found


def _adapted(
    kind: Kind, function: Callable[..., Any], args: object, **options: object
) -> Callable[..., Any]:
    """Return a function of slime with rlpost's interface."""
    assert args is not None, "a function of slime reads the settings of the run"
    return foreign_adapters().adapt(kind, function, args, **options)
