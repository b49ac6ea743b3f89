"""Metrics of scored groups, and of held-out prompts.

Input: groups, or prompts to generate them from. Output: pass@k and means over prompts; an answer
counts once, however many samples it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlpost.algorithm.answers import answers_of
from rlpost.algorithm.evaluation_statistics import (
    AnswerFigures,
    PromptFigures,
    mean,
    prompt_figures,
)
from rlpost.errors import RolloutError
from rlpost.rollout.episode_metrics import episode_metrics
from rlpost.rollout.generate import GroupWriter, write_all
from rlpost.types import Prompt, SampleGroup

EVALUATED = ("/reward_mean", "/turns_mean")  # metrics of environments to report


def figures_of(groups: Sequence[SampleGroup]) -> PromptFigures:
    """Return the figures of the answers of groups, by prompt; groups without an answer are left out.

    Raises:
        ValueError: no group has an answer.
    """
    return prompt_figures(
        [
            [
                AnswerFigures(answer.reward, answer.length, answer.is_truncated)
                for answer in answers_of(group)
            ]
            for group in groups
            if group.samples
        ]
    )


def summarise(groups: Sequence[SampleGroup]) -> dict[str, float]:
    """Return ``reward_mean``, ``response_length_mean`` (tokens) and ``truncated_frac``."""
    figures = figures_of(groups)
    return {
        "reward_mean": mean(figures.rewards),
        "response_length_mean": mean(figures.lengths),
        "truncated_frac": mean(figures.truncated),
    }


def pass_rates(groups: Sequence[SampleGroup]) -> dict[str, float]:
    """Return ``pass@k`` for k of 1, 2, 4, ... and the number of answers.

    Empty for one answer per prompt. Prompts with fewer than k answers, because gradings were lost,
    do not count for that k.
    """
    pass_at = figures_of(groups).pass_at
    if len(pass_at) == 1:
        return {}
    return {f"pass@{k}": mean(values) for k, values in pass_at.items()}


async def evaluate(
    writer: GroupWriter,
    prompts: Sequence[Prompt],
    stop_requested: Callable[[], bool],
    show: Callable[[Sequence[SampleGroup]], None] = lambda groups: None,
) -> dict[str, float]:
    """Generate one group per prompt; return ``summarise`` and ``pass_rates`` of the groups.

    ``show`` is called with all groups that have an answer, in order of their prompts.

    Prompts whose gradings were all lost do not count. Raises RolloutError if that holds for all
    prompts; otherwise raises as ``write_all`` does.
    """
    groups = [group for group in await write_all(writer, prompts, stop_requested) if group.samples]
    if not groups:
        raise RolloutError(
            f"the gradings of all {len(prompts)} prompts were lost: there is nothing to evaluate"
        )
    show(groups)
    environment_means = {
        name.removesuffix("_mean"): value
        for name, value in episode_metrics(groups).items()
        if name.endswith(EVALUATED)
    }
    return summarise(groups) | pass_rates(groups) | environment_means
