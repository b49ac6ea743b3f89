"""The table [eval] of a recipe."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rlpost.config.groups.base import Fraction, Group, Positive


class EvalConfig(Group):
    """Held-out prompts; what is not given is inherited from the rollout."""

    eval_interval: Positive | None = None
    """Steps between evaluations; without it there is none."""
    eval_prompt_data: tuple[str, ...] = ()
    """Pairs NAME PATH of JSONL files."""
    n_samples_per_eval_prompt: Positive = 1
    """Answers to each held-out prompt."""
    eval_temperature: Annotated[float, Field(ge=0.0)] | None = None
    """Temperature; 0 is greedy decoding."""
    eval_top_p: Fraction | None = None
    """Nucleus sampling."""
    eval_max_response_len: Positive | None = None
    """Longest answer, in tokens."""
    skip_eval_before_train: bool = False
    """Do not evaluate before the first step."""
