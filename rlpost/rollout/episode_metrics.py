"""Metrics of trained or evaluated episodes, by environment. Pure.

Input: scored groups, whose samples carry the label of their environment. Output: metrics; empty for
answers that are not episodes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from rlpost.algorithm.answers import Answer, answers_of
from rlpost.algorithm.evaluation_statistics import mean
from rlpost.types import SampleGroup

ENV, NUM_TURNS, SIDE_TOKENS = "env", "num_turns", "side_tokens"
"""Keys of ``Sample.extra``, beside the reward (``rlpost.tasks.reward.given``)."""


def episode_metrics(groups: Sequence[SampleGroup]) -> dict[str, float]:
    """Return ``env/LABEL/...`` of all episodes, as means over prompts, and their tokens by kind.

    An episode of several samples counts once.
    """
    by_label: defaultdict[str, list[list[Answer]]] = defaultdict(list)  # episodes by prompt
    for group in groups:
        by_group: defaultdict[str, list[Answer]] = defaultdict(list)
        for answer in answers_of(group):
            if ENV in answer.samples[0].sample.extra:
                by_group[str(answer.samples[0].sample.extra[ENV])].append(answer)
        for label, episodes in by_group.items():
            by_label[label].append(episodes)
    every = [answer for prompts in by_label.values() for each in prompts for answer in each]
    metrics: dict[str, float] = {}
    if every:
        metrics["env/task_tokens"] = float(sum(map(_trained_tokens, every)))
        metrics["env/side_tokens"] = float(sum(map(_side_tokens, every)))
    for label, prompts in sorted(by_label.items()):
        metrics[f"env/{label}/episodes"] = float(sum(map(len, prompts)))
        for name, figure in FIGURES.items():
            means = [mean([figure(episode) for episode in episodes]) for episodes in prompts]
            metrics[f"env/{label}/{name}_mean"] = mean(means)
    return metrics


def _num_turns(episode: Answer) -> float:
    return float(episode.samples[0].sample.extra.get(NUM_TURNS, 0))


def _trained_tokens(episode: Answer) -> int:
    return sum(scored.mask.total() for scored in episode.samples)


def _side_tokens(episode: Answer) -> int:
    return int(str(episode.samples[0].sample.extra.get(SIDE_TOKENS, 0)))


FIGURES: dict[str, Callable[[Answer], float]] = {
    "reward": lambda episode: episode.reward,
    "turns": _num_turns,
    "tokens": lambda episode: episode.length,
}
"""What is counted of an episode, by the name in its metric."""
