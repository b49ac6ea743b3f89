"""The table [rollout] of a recipe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlpost.config.groups.base import (
    FilePath,
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
    """Prompts, rewards, sampling and batch sizes."""

    prompt_data: FilePaths = ()
    """Prompt files, JSON Lines (one prompt a line) or Parquet (one a row); PATH@[A:B] selects a
    slice (docs/data.md)."""
    prompt_data_weights: tuple[PositiveNumber, ...] = ()
    """Sampling weight of each file, in the order of --prompt-data. If unset, every prompt is used
    once an epoch."""
    input_key: str = "input"
    """Key of the prompt in a line."""
    label_key: str | None = None
    """Key of the expected answer in a line."""
    multimodal_keys: JsonTable = Field(default={})
    """Key of the images of a line, as a JSON object: {"image": "images"}. Each <image> in the text of
    the prompt, and each part of type image in its messages, is the next of them (docs/data.md)."""
    image_max_pixels: Positive | None = None
    """Largest number of pixels of an image for the model; larger ones are scaled down. Default: that
    of the processor in --hf-checkpoint."""
    metadata_key: str | None = None
    """Key of an object that is passed to the reward with the prompt. Default: all other keys of the
    line."""
    tool_key: str | None = None
    """Key of the prompt's tools for the chat template, a list of OpenAI function schemas."""
    apply_chat_template: bool = False
    """Apply the tokenizer's chat template to the prompt (a string or a list of messages)."""
    apply_chat_template_kwargs: JsonTable = Field(default={})
    """Additional chat template arguments as a JSON object, such as {"enable_thinking": false}."""
    rollout_shuffle: bool = False
    """Reshuffle the prompts each epoch."""
    rollout_seed: int = 42
    """Seed of the shuffle, and of answers with --sglang-enable-deterministic-inference."""
    rollout_max_prompt_len: Positive | None = None
    """Maximum prompt length in tokens; longer prompts are skipped and counted."""
    bad_prompts: Literal["stop", "skip"] = "stop"
    """Action on an invalid line: fail before the run starts (stop), or skip and count it."""
    rm_type: str = "exact_match"
    """Reward function (docs/rewards.md); the prefix boxed_ grades the content of the last
    \\boxed{}. 'rm_type' in a prompt's metadata takes precedence."""
    rm_url: str | None = None
    """URL of the reward model of --rm-type remote_rm."""
    rm_url_timeout_s: PositiveNumber = 300.0
    """Timeout in seconds of one reward of --rm-url, retries included."""
    judge: FilePath | None = None
    """TOML file of the judge of --rm-type judge: its template, and the verdicts that it may give
    (docs/rewards.md)."""
    judge_url: str | None = None
    """URL of the model that judges, with the OpenAI interface: http://HOST:PORT/v1."""
    judge_engines: str | None = None
    """Name of the table [engines.NAME] with the model that judges, instead of --judge-url."""
    judge_model: str = "default"
    """Name of that model in requests."""
    judge_timeout_s: PositiveNumber = 300.0
    """Timeout in seconds of one request to the judge, retries included."""
    custom_rm_path: FunctionPath | None = None
    """module.function or FILE.py:function: a custom reward, instead of --rm-type
    (docs/rewards.md)."""
    group_rm: bool = False
    """Call the function of --custom-rm-path once per group instead of once per response."""
    reward_key: str | None = None
    """Key of the value to use where a reward is an object, such as score."""
    reward_weights: JsonTable = Field(default={})
    """Weights of the values of a reward that is an object, as a JSON object such as {"correct": 1.0,
    "format": 0.2}: the reward is the weighted sum; not with --reward-key."""
    reward_timeout_s: PositiveNumber = 10.0
    """Timeout in seconds for grading a response, or a group with --group-rm; on expiry the reward
    is 0."""
    reward_workers: Positive = 8
    """Maximum grading processes; they start on demand."""
    num_rollout: Positive = 1
    """Training steps; each generates and trains once."""
    num_epoch: Positive | None = None
    """Epochs over --prompt-data, instead of --num-rollout: the number of rows divided by
    --rollout-batch-size, rounded down, is the number of steps of an epoch. Rows that are skipped
    count. A run that evaluates or saves also does so at the end of each epoch."""
    rollout_batch_size: Positive = 1
    """Prompts per step."""
    n_samples_per_prompt: Positive = 1
    """Responses per prompt: the group size."""
    rollout_mode: Literal["sync", "one_step_off", "fully_async"] = "sync"
    """When batches are generated: between training steps (sync), the next one during training
    (one_step_off), or continuously, where engines resume their requests after a weight update
    (fully_async)."""
    update_weights_interval: Positive = 1
    """Update the engines' weights after this many steps instead of after each. Ranks then keep the
    weights of the last update in host memory, and checkpoints have them."""
    max_staleness: Positive | None = None
    """Maximum weight versions between a group's first token and its training, with --rollout-mode
    fully_async. Default: 1."""
    over_sampling_batch_size: Positive | None = None
    """Prompts in flight for a step. The first --rollout-batch-size complete groups are trained;
    further complete groups are kept for the next step. Default: --rollout-batch-size."""
    dynamic_sampling_filter_path: FunctionPath | None = None
    """module.function or FILE.py:function: selects the groups to train; rejected groups are dropped
    and replaced (docs/rollout.md). rlpost.rollout.filters.check_reward_nonzero_std drops groups
    whose rewards are all equal."""
    partial_rollout: bool = False
    """Keep the tokens of aborted responses and resume them in the next rollout."""
    partial_rollout_record_s: Annotated[float, Field(ge=0.0)] = 1.0
    """Seconds between records of responses in progress in the journal, with --partial-rollout: a
    crash loses at most the tokens since the last one. 0: only finished responses are recorded,
    as with external engines and with --use-rollout-routing-replay (engines stream no routes).
    Beyond 500 requests in flight for each second, records come less often."""
    mask_offpolicy_in_partial_rollout: bool = False
    """Mask the tokens of a resumed response in the loss that earlier weights generated."""
    buffer_filter_path: FunctionPath | None = None
    """module.function or FILE.py:function: chooses which aborted groups to resume first. Default:
    the oldest (docs/rollout.md)."""
    custom_generate_function_path: FunctionPath | None = None
    """module.function or FILE.py:function: generates a response, for instance with tools or over
    several turns (docs/rollout.md)."""
    rollout_function_path: str | None = None
    """Accepted for slime command lines, whose own rollout functions are settings here: SFT is
    --loss-type sft_loss, fully asynchronous rollout is --rollout-mode fully_async. Any other
    function is rejected (docs/extending.md)."""
    rollout_max_response_len: Positive = 1024
    """Maximum response length, in tokens."""
    rollout_max_context_len: Positive | None = None
    """Maximum length of prompt and response together, in tokens; prompts that leave no token for a
    response are skipped and counted."""
    rollout_temperature: Annotated[float, Field(gt=0.0)] = 1.0
    """Sampling temperature; the trainer divides its logits by the same value."""
    rollout_top_p: Fraction = 1.0
    """Nucleus sampling probability."""
    rollout_top_k: TopK = -1
    """Top-k sampling; -1 disables it."""
    rollout_stop: tuple[str, ...] = ()
    """Stop strings."""
    rollout_stop_token_ids: tuple[int, ...] = ()
    """Stop token ids."""
    global_batch_size: Positive | None = None
    """Samples per optimizer step. Default: derived from --num-steps-per-rollout."""
    num_steps_per_rollout: Positive | None = None
    """Optimizer steps per rollout. Default: 1, or derived from --global-batch-size."""

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps of an epoch; None without --num-epoch."""
        return None if self.num_epoch is None else max(1, self.num_rollout // self.num_epoch)

    def ends_epoch(self, step: int) -> bool:
        """Whether an epoch of --num-epoch ends with this many steps."""
        return self.steps_per_epoch is not None and step % self.steps_per_epoch == 0
