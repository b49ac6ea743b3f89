"""Settings of rollout, evaluation and debugging that contradict or need each other.

Input: a ``Config``. Output: one line for each problem. Pure but for the file of --eval-config, which holds settings.
"""

from __future__ import annotations

from rlpost.config.tree import Config
from rlpost.config.wording import spelled
from rlpost.errors import ConfigError


def rollout_problems(config: Config) -> list[str]:
    """Settings of the rollout that contradict each other."""
    rollout = config.rollout
    over, mode, staleness = rollout.over_sampling_batch_size, rollout.rollout_mode, rollout.max_staleness
    rules = [
        (
            over is not None and over < rollout.rollout_batch_size and mode != "fully_async",
            f"{spelled(config, 'over_sampling_batch_size')} is less than {spelled(config, 'rollout_batch_size')}: "
            f"it is the prompts started at once to get that many groups; use --over-sampling-batch-size "
            f"{rollout.rollout_batch_size} or more, or none",
        ),
        (
            mode != "sync" and config.cluster.colocate,
            f"{spelled(config, 'rollout_mode')} generates while the trainer trains, and with --colocate true both "
            "share the same GPUs; use --rollout-mode sync, or --colocate false with --rollout-num-gpus",
        ),
        (
            over is not None and mode == "fully_async",
            f"{spelled(config, 'over_sampling_batch_size')} has no meaning with --rollout-mode fully_async, where "
            "--max-staleness bounds how much is generated ahead; use --over-sampling-batch-size none",
        ),
        (
            staleness is not None and mode != "fully_async",
            f"{spelled(config, 'max_staleness')} has no meaning with {spelled(config, 'rollout_mode')}; use "
            "--rollout-mode fully_async or --max-staleness none",
        ),
        (
            rollout.mask_offpolicy_in_partial_rollout and not rollout.partial_rollout and mode == "sync",
            "--mask-offpolicy-in-partial-rollout true needs --partial-rollout, else no answer has older tokens; add "
            "--partial-rollout true, or use --mask-offpolicy-in-partial-rollout false",
        ),
    ]
    return [problem for is_broken, problem in rules if is_broken]


def eval_problems(config: Config) -> list[str]:
    """Evaluation settings that contradict each other, or a file of sets that cannot be used."""
    pairs, file = config.eval.eval_prompt_data, config.eval.eval_config
    if len(pairs) % 2 and len(pairs) > 1:
        return [
            f"{spelled(config, 'eval_prompt_data')}: {len(pairs)} words are no pairs; write one PATH, or NAME PATH for "
            "each set"
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
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is None:
        return []
    return [
        f"{spelled(config, 'eval_prompt_data')}: two sets are called {twice}, and metrics are named by set; give each "
        f"a NAME, such as {twice} and {twice}-2"
    ]


def debug_problems(config: Config) -> list[str]:
    """Recorded rollouts without a place for the step; debugging one half with what the other half makes."""
    debug = config.debug
    problems = [
        f"{spelled(config, key)} has no {{rollout_id}} in it, and there is one file a step; write for instance "
        f"{path}.{{rollout_id}}"
        for key in ("save_debug_rollout_data", "load_debug_rollout_data")
        if (path := getattr(debug, key)) is not None and "{rollout_id}" not in path
    ]
    if debug.debug_train_only and debug.load_debug_rollout_data is None:
        problems.append(
            "--debug-train-only true needs recorded groups to train on; add --load-debug-rollout-data "
            "PATH-{rollout_id}, or use --debug-train-only false"
        )
    other = "debug_train_only" if debug.debug_train_only else "load_debug_rollout_data"
    without = "--debug-train-only false" if debug.debug_train_only else "--load-debug-rollout-data none"
    if debug.debug_rollout_only and (debug.debug_train_only or debug.load_debug_rollout_data is not None):
        problems.append(
            f"--debug-rollout-only true generates, and {spelled(config, other)} trains on what was recorded; use "
            f"--debug-rollout-only false, or {without}"
        )
    return problems
