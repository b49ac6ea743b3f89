"""The table [rollout] of a recipe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlpost.config.groups.base import (
    FilePaths,
    Fraction,
    FunctionPath,
    Group,
    JsonTable,
    Positive,
    PositiveNumber,
    TopK,
)


class RolloutConfig(Group):
    """Prompts, sampling and the size of a step."""

    prompt_data: FilePaths = ()
    """Files of prompts, JSON Lines (one prompt a line) or Parquet (one a row); PATH@[A:B] is a slice of one
    (docs/data.md)."""
    prompt_data_weights: tuple[PositiveNumber, ...] = ()
    """Share of each file in what is asked, in the order of --prompt-data; without it every prompt comes once an
    epoch."""
    input_key: str = "input"
    """Key of the prompt in a line."""
    label_key: str | None = None
    """Key of the expected answer in a line."""
    metadata_key: str | None = None
    """Key of an object that goes with the prompt to its reward; all other keys of a line unless given."""
    tool_key: str | None = None
    """Key of the tools of a prompt, a list of OpenAI function schemas, for the chat template."""
    apply_chat_template: bool = False
    """Pass the prompt (a string or a list of messages) through the tokenizer's chat template."""
    apply_chat_template_kwargs: JsonTable = Field(default={})
    """More arguments of the chat template, as a JSON object, such as {"enable_thinking": false}."""
    rollout_shuffle: bool = False
    """Shuffle the prompts anew each epoch."""
    rollout_seed: int = 42
    """Seed of the shuffle."""
    rollout_max_prompt_len: Positive | None = None
    """Longest prompt, in tokens; longer ones are skipped and counted."""
    bad_prompts: Literal["stop", "skip"] = "stop"
    """What to do about a line that is no prompt: end the run before it starts, or skip and count it."""
    rm_type: str = "exact_match"
    """Which reward scores an answer (docs/rewards.md); with boxed_ before it, the content of its last box.
    'rm_type' in the metadata of a prompt goes before it."""
    rm_url: str | None = None
    """Address of the reward model of --rm-type remote_rm."""
    rm_url_timeout_s: PositiveNumber = 300.0
    """Longest wait for one reward of --rm-url, all tries together, in seconds."""
    custom_rm_path: FunctionPath | None = None
    """module.function or FILE.py:function: a reward of your own, in place of --rm-type (docs/rewards.md)."""
    group_rm: bool = False
    """Call the function of --custom-rm-path once for all answers to a prompt instead of once for each."""
    reward_key: str | None = None
    """Which value of a reward that is an object counts, such as score."""
    reward_timeout_s: PositiveNumber = 10.0
    """Longest grading of an answer, or of a group with --group-rm, in seconds; what takes longer scores 0."""
    reward_workers: Positive = 8
    """Processes that grade; they start when they are needed."""
    num_rollout: Positive = 1
    """Steps to train: each generates, trains and synchronises once."""
    rollout_batch_size: Positive = 1
    """Prompts a step."""
    n_samples_per_prompt: Positive = 1
    """Answers to each prompt: the size of a group."""
    rollout_mode: Literal["sync", "one_step_off", "fully_async"] = "sync"
    """When a batch is generated: between trainings; the next one during each training; or all the time, engines going
    on with what they write when new weights arrive."""
    max_staleness: Positive | None = None
    """Versions of the weights that may lie between a group's first token and its training, with --rollout-mode
    fully_async; 1 unless given."""
    over_sampling_batch_size: Positive | None = None
    """Prompts to generate at once for a step, of which the first --rollout-batch-size groups are trained and other
    finished ones kept for the next; as many as that unless given."""
    dynamic_sampling_filter_path: FunctionPath | None = None
    """module.function or FILE.py:function: which groups to train; others are dropped and more generated
    (docs/rollout.md). rlpost.rollout.filters.check_reward_nonzero_std drops those whose rewards are all equal."""
    partial_rollout: bool = False
    """Keep the tokens of answers that were cut off, and go on with them in the next rollout."""
    mask_offpolicy_in_partial_rollout: bool = False
    """Leave those tokens of an answer out of the loss that older weights wrote than its last ones."""
    buffer_filter_path: FunctionPath | None = None
    """module.function or FILE.py:function: which of the groups that were cut off to go on with first; those that wait
    longest unless given (docs/rollout.md)."""
    custom_generate_function_path: FunctionPath | None = None
    """module.function or FILE.py:function: writes an answer in place of one turn of the model, with tools or in several
    turns (docs/rollout.md)."""
    rollout_function_path: str | None = None
    """For command lines of slime, whose own rollout functions are settings here: that of SFT is --loss-type sft_loss,
    the fully asynchronous one --rollout-mode fully_async. Another one is refused (docs/extending.md)."""
    rollout_max_response_len: Positive = 1024
    """Longest answer, in tokens."""
    rollout_max_context_len: Positive | None = None
    """Longest prompt and answer together, in tokens; prompts that leave no room for an answer are skipped and
    counted."""
    rollout_temperature: Annotated[float, Field(gt=0.0)] = 1.0
    """Sampling temperature; the trainer's log-probs are divided by the same."""
    rollout_top_p: Fraction = 1.0
    """Nucleus sampling."""
    rollout_top_k: TopK = -1
    """Top-k sampling; -1 is off."""
    rollout_stop: tuple[str, ...] = ()
    """Strings that end an answer."""
    rollout_stop_token_ids: tuple[int, ...] = ()
    """Token ids that end an answer."""
    global_batch_size: Positive | None = None
    """Samples an optimizer step; follows from the number of steps unless given."""
    num_steps_per_rollout: Positive | None = None
    """Optimizer steps a rollout; 1 unless given or implied by --global-batch-size."""
