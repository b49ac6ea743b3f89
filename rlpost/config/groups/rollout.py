"""The table [rollout] of a recipe."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rlpost.config.groups.base import FilePath, Fraction, Group, Positive


class RolloutConfig(Group):
    """Prompts, sampling and the size of a step."""

    prompt_data: FilePath = ""
    """JSONL file with one prompt a line."""
    input_key: str = "input"
    """Key of the prompt in a line."""
    label_key: str | None = None
    """Key of the expected answer in a line."""
    apply_chat_template: bool = False
    """Pass the prompt (a string or a list of messages) through the tokenizer's chat template."""
    rollout_shuffle: bool = False
    """Shuffle the prompts anew each epoch."""
    rollout_seed: int = 42
    """Seed of the shuffle."""
    rm_type: str = "exact_match"
    """Which reward function scores an answer."""
    num_rollout: Positive = 1
    """Steps to train: each generates, trains and synchronises once."""
    rollout_batch_size: Positive = 1
    """Prompts a step."""
    n_samples_per_prompt: Positive = 1
    """Answers to each prompt: the size of a group."""
    rollout_max_response_len: Positive = 1024
    """Longest answer, in tokens."""
    rollout_temperature: Annotated[float, Field(gt=0.0)] = 1.0
    """Sampling temperature; the trainer's log-probs are divided by the same."""
    rollout_top_p: Fraction = 1.0
    """Nucleus sampling."""
    rollout_top_k: int = -1
    """Top-k sampling; -1 is off."""
    rollout_stop: tuple[str, ...] = ()
    """Strings that end an answer."""
    rollout_stop_token_ids: tuple[int, ...] = ()
    """Token ids that end an answer."""
    global_batch_size: Positive | None = None
    """Samples an optimizer step; follows from the number of steps unless given."""
    num_steps_per_rollout: Positive | None = None
    """Optimizer steps a rollout; 1 unless given or implied by --global-batch-size."""
