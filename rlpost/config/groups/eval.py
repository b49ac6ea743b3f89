"""The table [eval] of a recipe."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rlpost.config.groups.base import FilePath, Fraction, Group, Positive, TopK


class EvalConfig(Group):
    """Evaluation on held-out prompts. Unset sampling settings are inherited from [rollout]."""

    eval_interval: Positive | None = None
    """Steps between evaluations; none is run if unset."""
    eval_engines: str | None = None
    """Name of the table [engines.NAME] whose engines evaluate while the next steps train
    (docs/engines.md); it has follows_policy = true. policy: some of the policy's engines
    (--eval-policy-engines). Default: the policy's engines, and the next step waits."""
    eval_policy_engines: Positive = 1
    """Engines of the policy that evaluate with --eval-engines policy. While they do, they neither
    generate nor get new weights."""
    eval_prompt_data: tuple[str, ...] = ()
    """Pairs NAME PATH of JSONL files, or one PATH, whose stem is the NAME."""
    eval_config: FilePath | None = None
    """TOML or YAML file of evaluation sets with their own settings, instead of --eval-prompt-data
    (docs/rollout.md)."""
    eval_function_path: str | None = None
    """Accepted for slime command lines, as --rollout-function-path is."""
    eval_reward_key: str | None = None
    """Key of the value to use where a reward is an object. Default: --reward-key."""
    n_samples_per_eval_prompt: Positive = 1
    """Responses per held-out prompt."""
    eval_temperature: Annotated[float, Field(ge=0.0)] | None = None
    """Sampling temperature; 0 is greedy decoding."""
    eval_top_p: Fraction | None = None
    """Nucleus sampling probability."""
    eval_top_k: TopK | None = None
    """Top-k sampling; -1 disables it."""
    eval_max_response_len: Positive | None = None
    """Maximum response length, in tokens."""
    eval_min_new_tokens: Positive | None = None
    """Minimum response length, in tokens: no end of sequence is sampled before. Default: none."""
    eval_max_prompt_len: Positive | None = None
    """Maximum prompt length in tokens; longer prompts are skipped. Default:
    --rollout-max-prompt-len."""
    eval_max_context_len: Positive | None = None
    """Maximum length of prompt and response together, in tokens. Default:
    --rollout-max-context-len."""
    eval_input_key: str | None = None
    """Key of the prompt in a line of every set that does not name its key. Default:
    --input-key."""
    eval_label_key: str | None = None
    """The same for the expected answer. Default: --label-key."""
    eval_tool_key: str | None = None
    """The same for the prompt's tools. Default: --tool-key."""
    skip_eval_before_train: bool = False
    """Skip the evaluation before the first step."""
