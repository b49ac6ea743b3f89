"""Metrics of trained or evaluated episodes, by environment. Pure.

Input: scored groups, whose samples carry the label of their environment. Output: metrics; empty for
answers that are not episodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from rlpost.rollout.episode_results import ENV, NUM_TURNS
from rlpost.types import SampleGroup


def episode_metrics(groups: Sequence[SampleGroup]) -> dict[str, float]:
    """Return ``env/LABEL/...`` of all episodes; an episode of several samples counts once."""
    episodes: dict[tuple[int, int], dict[str, Any]] = {}
    for group in groups:
        for scored in group.samples:
            sample = scored.sample
            if ENV not in sample.extra:
                continue
            episode = episodes.setdefault(
                (group.prompt_id, sample.index),
                {
                    "label": sample.extra[ENV],
                    "reward": scored.reward,
                    "turns": sample.extra.get(NUM_TURNS, 0),
                    "tokens": 0,
                },
            )
            episode["tokens"] += len(sample.response_ids)
    metrics: dict[str, float] = {}
    for label in sorted({each["label"] for each in episodes.values()}):
        own = [each for each in episodes.values() if each["label"] == label]
        metrics[f"env/{label}/episodes"] = float(len(own))
        for name in ("reward", "turns", "tokens"):
            metrics[f"env/{label}/{name}_mean"] = fmean(each[name] for each in own)
    return metrics
