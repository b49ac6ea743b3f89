"""Which groups are worth training, and which waiting ones are gone on with first.

    --dynamic-sampling-filter-path    (group: SampleGroup) -> bool: whether to train a scored group; or slime's form
                                      (args, samples, **kwargs), see ``slime_filter``
    --buffer-filter-path              (waiting: Sequence[Unfinished], num_groups: int) -> Sequence[Unfinished]:
                                      which of the groups that wait to start now, at most ``num_groups``
    --custom-generate-function-path   (draft: Draft, prompt: Prompt, sampling: SamplingParams), async, -> Sample or
                                      several: writes an answer (``rlpost.rollout.draft``)

Comes in: a dotted path, or FILE.py:function. Goes out: the function. Paths that recipes for slime use mean ours.
"""

from __future__ import annotations

import inspect
import statistics
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlpost.algorithm.plugin import load_function
from rlpost.errors import ConfigError, suggestion
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


def group_filter(path: str | None, settings: Mapping[str, Any] | None = None) -> GroupFilter:
    """The filter of --dynamic-sampling-filter-path; without one every group is kept.

    Args: ``settings`` by key are the ``args`` of a function in slime's form. Raises ConfigError.
    """
    if path is None:
        return lambda group: True
    key = "rollout.dynamic_sampling_filter_path"
    function = _load(path, key=key)
    if _takes(function, 1):
        return function
    if _takes(function, 2):
        return slime_filter(function, settings or {})
    raise ConfigError(f"{key} = {path}: it is called with (group), or, in slime's form, with (args, samples)")


def slime_filter(function: Callable[..., Any], settings: Mapping[str, Any]) -> GroupFilter:
    """A filter from a function ``(args, samples, **kwargs)`` that returns a truth value, or an object with ``keep``.

    ``args`` has the run's settings as attributes. Each of ``samples`` has ``reward``; what slime keeps beside it is in
    ``sample``, under the names of ``rlpost.types.Sample``.
    """
    arguments = Namespace(**settings)

    def wanted(group: SampleGroup) -> bool:
        found = function(arguments, list(group.samples))
        return bool(getattr(found, "keep", found))

    return wanted


def buffer_filter(path: str | None) -> BufferFilter:
    """The filter of --buffer-filter-path; ``pop_first`` without one. Raises ConfigError."""
    return pop_first if path is None else _called_with(path, "waiting", "num_groups", key="rollout.buffer_filter_path")


def generate_function(path: str | None) -> GenerateFunction | None:
    """The function of --custom-generate-function-path, if there is one. Raises ConfigError."""
    if path is None:
        return None
    return _called_with(path, "draft", "prompt", "sampling", key="rollout.custom_generate_function_path")


def check_filters(**paths: str | None) -> None:
    """Whether names that belong to slime, by setting, are among those that stand for ours. Raises ConfigError with one
    line for each that is not: slime itself is not installed where rlpost runs."""
    unknown = [
        f"rollout.{key} = {path}: none of slime's functions that rlpost knows{suggestion(path, OURS)}; give one of "
        f"{', '.join(OURS)}, or a function of yours"
        for key, path in paths.items()
        if path is not None and path.startswith("slime.") and path not in OURS
    ]
    if unknown:
        raise ConfigError("\n".join(unknown))


def _called_with(path: str, *arguments: str, key: str) -> Callable[..., Any]:
    function = _load(path, key=key)
    if not _takes(function, len(arguments)):
        raise ConfigError(f"{key} = {path}: it is called with ({', '.join(arguments)}), which it does not take")
    return function


def _takes(function: Callable[..., Any], count: int) -> bool:
    """Whether a function can be called with so many arguments; True where it does not say what it takes."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def _load(path: str, *, key: str) -> Callable[..., Any]:
    return load_function(OURS.get(path, path), key=key)
