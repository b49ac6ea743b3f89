"""Check [rollout], [eval] and [debug] for conflicting or missing settings.

Input: a ``Config``. Output: one line for each problem. Pure, except that it reads the file of
--eval-config.
"""

from __future__ import annotations

import math

from rlpost.config.eval_sets import name_problem
from rlpost.config.extensions import command
from rlpost.config.tree import Config
from rlpost.config.wording import spelled
from rlpost.errors import ConfigError

MAX_MASK = 4096
"""Default of SGLang's --sampling-mask-max-tokens."""


def rollout_problems(config: Config) -> list[str]:
    """Conflicting rollout settings."""
    rollout = config.rollout
    over, mode = rollout.over_sampling_batch_size, rollout.rollout_mode
    staleness = rollout.max_staleness
    longest = config.eval.eval_max_response_len or rollout.rollout_max_response_len
    rules = [
        (
            over is not None and over < rollout.rollout_batch_size and mode != "fully_async",
            f"{spelled(config, 'over_sampling_batch_size')} is less than {spelled(config, 'rollout_batch_size')}: "
            f"that many prompts must be in flight to complete the batch; use --over-sampling-batch-size "
            f"{rollout.rollout_batch_size} or more, or none",
        ),
        (
            mode != "sync" and config.cluster.colocate,
            f"{spelled(config, 'rollout_mode')} generates during training, and with --colocate true both "
            "share the same GPUs; use --rollout-mode sync, or --colocate false with --rollout-num-gpus",
        ),
        (
            over is not None and mode == "fully_async",
            f"{spelled(config, 'over_sampling_batch_size')} has no effect with --rollout-mode fully_async, where "
            "--max-staleness bounds the groups generated ahead; use --over-sampling-batch-size none",
        ),
        (
            staleness is not None and mode != "fully_async",
            f"{spelled(config, 'max_staleness')} has no effect with {spelled(config, 'rollout_mode')}; use "
            "--rollout-mode fully_async or --max-staleness none",
        ),
        (
            rollout.mask_offpolicy_in_partial_rollout
            and not rollout.partial_rollout
            and mode == "sync",
            "--mask-offpolicy-in-partial-rollout true needs --partial-rollout, else no response has off-policy tokens; "
            "add --partial-rollout true, or use --mask-offpolicy-in-partial-rollout false",
        ),
        (
            (config.eval.eval_min_new_tokens or 0) > longest,
            f"{spelled(config, 'eval_min_new_tokens')} is more than the {longest} tokens that a response may have "
            f"(--eval-max-response-len, else --rollout-max-response-len); use at most {longest}",
        ),
        (
            bool(rollout.reward_weights and rollout.reward_key),
            f"{spelled(config, 'reward_key')} takes one value of a reward and --reward-weights several; use one of "
            "them",
        ),
        (
            not all(_is_number(weight) for weight in rollout.reward_weights.values()),
            f"--reward-weights {dict(rollout.reward_weights)}: every weight must be a finite number, such as "
            '{"correct": 1.0, "format": 0.2}',
        ),
        (
            bool(
                rollout.reward_weights
                and rollout.custom_rm_path is None
                and rollout.custom_generate_function_path is None
            ),
            f"--reward-weights: {spelled(config, 'rm_type')} gives a number; add --custom-rm-path with a function that "
            "returns an object, or leave --reward-weights out",
        ),
    ]
    problems = [problem for is_broken, problem in rules if is_broken]
    return problems + _update_interval_problems(config) + _mask_problems(config)


def _update_interval_problems(config: Config) -> list[str]:
    """Settings that need the newest weights in the engines."""
    rollout, every = config.rollout, spelled(config, "update_weights_interval")
    interval, evaluates = rollout.update_weights_interval, config.eval.eval_interval
    if interval == 1:
        return []
    staleness = rollout.max_staleness or 1
    rules = [
        (
            rollout.rollout_mode == "fully_async" and staleness < interval,
            f"{every} with --rollout-mode fully_async: the last step before an update trains groups of weights that "
            f"are {interval - 1} to {interval} versions old, and --max-staleness is {staleness}; use --max-staleness "
            f"{interval} or more",
        ),
        (
            evaluates is not None and evaluates % interval != 0,
            f"{spelled(config, 'eval_interval')} with {every}: between two updates engines have older weights than "
            f"the step that they would evaluate; use a multiple of {interval}",
        ),
        (
            evaluates is not None and rollout.num_rollout % interval != 0,
            f"{spelled(config, 'num_rollout')} with {every}: the last evaluation needs the last weights; use a "
            f"multiple of {interval}",
        ),
        (
            evaluates is not None and (rollout.steps_per_epoch or 0) % interval != 0,
            f"{spelled(config, 'num_epoch')} with {every}: an evaluation follows each epoch of "
            f"{rollout.steps_per_epoch} steps; use an interval that divides them, or --num-rollout",
        ),
        (
            config.grpo.is_supervised,
            f"{every} has no effect with --loss-type sft_loss, which has no engines; omit it",
        ),
    ]
    return [problem for is_broken, problem in rules if is_broken]


def is_truncated(config: Config) -> bool:
    """Whether responses are sampled from a part of the vocabulary."""
    return config.rollout.rollout_top_p < 1.0 or config.rollout.rollout_top_k > 0


def sampling_note(config: Config) -> str | None:
    """Sampling from a part of the vocabulary while training with log-probs over all of it."""
    grpo = config.grpo
    if not is_truncated(config) or grpo.use_rollout_sampling_mask or grpo.is_supervised:
        return None
    name = "rollout_top_p" if config.rollout.rollout_top_p < 1.0 else "rollout_top_k"
    return (
        f"{spelled(config, name)}: responses are sampled from a part of the vocabulary, and their "
        "log-probs in training are over all of it, so the ratios of policies are biased; add "
        "--use-rollout-sampling-mask (with --rollout-top-k), or sample with --rollout-top-p 1 "
        "--rollout-top-k -1"
    )


def staleness_note(config: Config) -> str | None:
    """Training on tokens of older weights without a ratio that corrects for them."""
    grpo, rollout = config.grpo, config.rollout
    is_corrected = grpo.use_tis or grpo.use_rollout_logprobs or grpo.keep_old_actor
    if grpo.loss_type != "policy_loss" or is_corrected:
        return None
    causes = {
        "rollout_mode": rollout.rollout_mode != "sync",
        "update_weights_interval": rollout.update_weights_interval > 1,
        "partial_rollout": (
            rollout.partial_rollout and not rollout.mask_offpolicy_in_partial_rollout
        ),
    }
    cause = next((spelled(config, key) for key, is_set in causes.items() if is_set), None)
    if cause is None:
        return None
    return (
        f"{cause}: engines generate with older weights than those that are trained, and the loss "
        "does not weigh the difference; add --use-tis true or --use-rollout-logprobs true"
    )


def _mask_problems(config: Config) -> list[str]:
    """Problems of --use-rollout-sampling-mask."""
    if not config.grpo.use_rollout_sampling_mask:
        return []
    args, top_k = config.sglang.server_args, config.rollout.rollout_top_k
    limit = args.get("sampling_mask_max_tokens", MAX_MASK)
    limit = limit if isinstance(limit, int) else MAX_MASK  # another problem of --sglang-...
    flag = "--use-rollout-sampling-mask"
    rules = [
        (
            not 1 <= top_k <= limit,
            f"{flag} with {spelled(config, 'rollout_top_k')}: engines return sampling masks of at most "
            f"{limit} tokens; use --rollout-top-k {min(limit, 1024)}, or another number up to {limit}",
        ),
        (
            config.grpo.is_supervised,
            f"{flag}: nothing is sampled with --loss-type sft_loss; leave it out",
        ),
        (
            args.get("speculative_algorithm") is not None,
            f"{flag}: engines return no sampling masks with speculative decoding; leave out "
            "--sglang-speculative-algorithm, or the mask",
        ),
        (
            config.distillation.use_opd,
            f"{flag}: the teacher of --use-opd has log-probs over the whole vocabulary; leave one of "
            "them out",
        ),
    ]
    return [problem for is_broken, problem in rules if is_broken]


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value)


def eval_problems(config: Config) -> list[str]:
    """Conflicting evaluation settings, or an invalid --eval-config file."""
    pairs, file = config.eval.eval_prompt_data, config.eval.eval_config
    if len(pairs) % 2 and len(pairs) > 1:
        return [
            f"{spelled(config, 'eval_prompt_data')}: {len(pairs)} words are not pairs; write one PATH, or NAME PATH "
            "for each set"
        ]
    if pairs and file is not None:
        return [
            f"{spelled(config, 'eval_config')} and {spelled(config, 'eval_prompt_data')} both name sets; use "
            "--eval-config none, or --eval-prompt-data without words"
        ]
    if config.eval.eval_interval is not None and not pairs and file is None:
        return [
            f"{spelled(config, 'eval_interval')} needs prompts to evaluate; add --eval-prompt-data NAME PATH or "
            "--eval-config FILE, or use --eval-interval none"
        ]
    try:
        names = [name for name, _ in config.eval_sets]
    except ConfigError as error:
        return [f"--eval-config {line}" for line in str(error).splitlines()]
    problem = name_problem(names)
    return [] if problem is None else [f"{spelled(config, 'eval_prompt_data')}: {problem}"]


def debug_problems(config: Config) -> list[str]:
    """Recording paths without {rollout_id}; conflicting debug modes."""
    debug = config.debug
    problems = [
        f"{spelled(config, key)} lacks {{rollout_id}}, and each step writes one file; write for instance "
        f"{path}.{{rollout_id}}"
        for key in ("save_debug_rollout_data", "load_debug_rollout_data")
        if (path := getattr(debug, key)) is not None and "{rollout_id}" not in path
    ]
    has_responses = config.grpo.is_supervised  # those of --prompt-data
    if debug.debug_train_only and not debug.load_debug_rollout_data and not has_responses:
        problems.append(
            "--debug-train-only true needs recorded groups to train on; add --load-debug-rollout-data "
            "PATH-{rollout_id}, or use --debug-train-only false"
        )
    other = "debug_train_only" if debug.debug_train_only else "load_debug_rollout_data"
    without = (
        "--debug-train-only false" if debug.debug_train_only else "--load-debug-rollout-data none"
    )
    if debug.debug_rollout_only and (
        debug.debug_train_only or debug.load_debug_rollout_data is not None
    ):
        problems.append(
            f"--debug-rollout-only true generates, but {spelled(config, other)} trains on recorded groups; use "
            f"--debug-rollout-only false, or {without}"
        )
    if debug.debug_eval_only and not debug.debug_rollout_only:
        problems.append(
            "--debug-eval-only true starts no trainer; add --debug-rollout-only true, or use "
            + command("evaluate")
        )
    if debug.debug_eval_only and (
        config.eval.eval_interval is None or config.eval.skip_eval_before_train
    ):
        problems.append(
            "--debug-eval-only true evaluates before the first step; add --eval-interval 1 "
            "--skip-eval-before-train false"
        )
    return problems
