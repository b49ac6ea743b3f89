"""The table [eval] of a recipe."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rlpost.config.groups.base import FilePath, Fraction, Group, Positive, TopK


class EvalConfig(Group):
    """Held-out prompts; what is not given is inherited from the rollout."""

    eval_interval: Positive | None = None
    """Steps between evaluations; without it there is none."""
    eval_prompt_data: tuple[str, ...] = ()
    """Pairs NAME PATH of JSONL files, or one PATH, whose name without its ending is the NAME."""
    eval_config: FilePath | None = None
    """TOML or YAML file of evaluation sets with settings of their own, in place of --eval-prompt-data
    (docs/rollout.md)."""
    eval_function_path: str | None = None
    """For command lines of slime, as --rollout-function-path."""
    n_samples_per_eval_prompt: Positive = 1
    """Answers to each held-out prompt."""
    eval_temperature: Annotated[float, Field(ge=0.0)] | None = None
    """Temperature; 0 is greedy decoding."""
    eval_top_p: Fraction | None = None
    """Nucleus sampling."""
    eval_top_k: TopK | None = None
    """Top-k sampling; -1 is off."""
    eval_max_response_len: Positive | None = None
    """Longest answer, in tokens."""
    skip_eval_before_train: bool = False
    """Do not evaluate before the first step."""
