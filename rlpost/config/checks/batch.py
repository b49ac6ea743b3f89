"""Check batch sizes against each other and the data-parallel ranks. Pure.

Input: a ``Config``. Output: one line for each problem, with the arithmetic and valid values.
"""

from __future__ import annotations

import math

from rlpost.algorithm.advantage import ESTIMATORS
from rlpost.config.checks.layout import layout_problems
from rlpost.config.tree import Config
from rlpost.config.wording import divisors, listed, nearest, spelled

PROMPTS, ANSWERS = "rollout_batch_size", "n_samples_per_prompt"
GLOBAL, STEPS = "global_batch_size", "num_steps_per_rollout"


def batch_problems(config: Config) -> list[str]:
    """Inconsistent batch sizes, or sizes that do not divide evenly over the data-parallel ranks."""
    rollout = config.rollout
    samples, steps = config.samples_per_rollout, config.num_steps_per_rollout
    problems = []
    if samples % steps or (
        rollout.global_batch_size is not None and rollout.global_batch_size * steps != samples
    ):
        problems.append(_not_the_samples(config))
    elif not layout_problems(config) and is_uneven(config):
        problems.append(_uneven(config))
    if config.perf.use_dynamic_batch_size and config.perf.max_tokens_per_gpu is None:
        problems.append(
            "--use-dynamic-batch-size true needs --max-tokens-per-gpu, the tokens of a micro-batch; add it, for "
            "instance --max-tokens-per-gpu 8192, or use --use-dynamic-batch-size false"
        )
    grpo = config.grpo
    is_own = grpo.is_supervised or grpo.custom_advantage_function_path is not None
    compares = not is_own and ESTIMATORS[grpo.advantage_estimator].compares
    if compares and rollout.n_samples_per_prompt == 1:
        problems.append(
            f"--n-samples-per-prompt 1: {spelled(config, 'advantage_estimator')} compares the responses to a "
            "prompt, so a single response gives no advantage; use --n-samples-per-prompt 2 or more, or "
            "--advantage-estimator reinforce_plus_plus"
        )
    return problems


def is_uneven(config: Config) -> bool:
    """Whether the samples of an optimizer step do not spread evenly over the data-parallel ranks.

    Whether the samples divide into optimizer steps does not depend on the layout.
    """
    samples, steps = config.samples_per_rollout, config.num_steps_per_rollout
    return samples % steps == 0 and samples // steps % _unit(config) != 0


def _unit(config: Config) -> int:
    """Divisor required of the samples per optimizer step."""
    return max(1, config.data_parallel_size * config.micro_batch_multiple)


def _samples(config: Config) -> str:
    return f"{config.samples_per_rollout} samples of a rollout, {spelled(config, PROMPTS)} x {spelled(config, ANSWERS)}"


def _whole_steps(config: Config) -> list[int]:
    """Samples per optimizer step that divide the rollout and spread evenly over the ranks."""
    unit = 1 if layout_problems(config) else _unit(config)
    return [size for size in divisors(config.samples_per_rollout) if size % unit == 0]


def _not_the_samples(config: Config) -> str:
    """The samples of a rollout do not divide into optimizer steps of the given size."""
    rollout = config.rollout
    batch_size, steps = rollout.global_batch_size, rollout.num_steps_per_rollout
    samples = config.samples_per_rollout
    sizes = _whole_steps(config)
    if batch_size is None:
        counts = sorted(samples // size for size in sizes)
        remedy = _other_prompts(config)
        if counts:
            remedy = f"use --num-steps-per-rollout {listed(nearest(counts, steps or 1))}"
        return f"{spelled(config, STEPS)} does not divide the {_samples(config)}; {remedy}"
    near = nearest(sizes, batch_size)
    why = f"{spelled(config, GLOBAL)} does not divide the {_samples(config)}"
    if steps is None:
        if not near:
            return f"{why}; {_other_prompts(config)}"
        counts = [samples // size for size in near]
        plural = "step" if counts == [1] else "steps"
        per_rollout = f"{listed(counts)} optimizer {plural} per rollout"
        return f"{why}; use --global-batch-size {listed(near)}, which is {per_rollout}"
    remedies = []
    if samples % steps == 0 and samples // steps in sizes:
        remedies.append(f"--global-batch-size {samples // steps}")
    if batch_size in sizes:
        remedies.append(f"--num-steps-per-rollout {samples // batch_size}")
    remedies += [
        f"--global-batch-size {size} --num-steps-per-rollout {samples // size}" for size in near[:1]
    ]
    if not remedies:
        return f"{why}; {_other_prompts(config)}"
    product = f"{spelled(config, GLOBAL)} x {spelled(config, STEPS)} = {batch_size * steps}"
    return f"{product}, not the {_samples(config)}; use {listed(remedies[:2])}"


def _uneven(config: Config) -> str:
    """The samples of an optimizer step do not spread evenly over the data-parallel ranks."""
    steps, rollout = config.num_steps_per_rollout, config.rollout
    a_step = config.samples_per_rollout // steps
    rounds = ""
    if config.micro_batch_multiple > 1:
        rounds = f" x {config.micro_batch_multiple} micro-batches per pipeline round"
    divided = f" / {spelled(config, STEPS)}" if rollout.num_steps_per_rollout is not None else ""
    line = (
        f"{spelled(config, PROMPTS)} x {spelled(config, ANSWERS)}{divided} = {a_step} samples per "
        f"optimizer step, not a multiple of {config.data_parallel_size} data-parallel ranks{rounds}"
    )
    if rollout.global_batch_size is None:
        return f"{line}; {_other_prompts(config)}"
    sizes = _whole_steps(config)
    remedy = f"use --global-batch-size {listed(nearest(sizes, rollout.global_batch_size))}"
    if rollout.num_steps_per_rollout is not None:
        remedy += " --num-steps-per-rollout none"
    constraint = f"not a multiple of the {config.data_parallel_size} data-parallel ranks{rounds}"
    return (
        f"{spelled(config, GLOBAL)} is {constraint}; {remedy if sizes else _other_prompts(config)}"
    )


def _other_prompts(config: Config) -> str:
    """The nearest numbers of prompts or responses that give whole optimizer steps on every rank."""
    rollout, needed = config.rollout, config.num_steps_per_rollout
    unit = 1 if layout_problems(config) else _unit(config)
    if rollout.global_batch_size is not None:
        needed, also = 1, " --global-batch-size none --num-steps-per-rollout 1"
    else:
        also = ""
    remedies = []
    for flag, value, other, least in (
        ("--rollout-batch-size", rollout.rollout_batch_size, rollout.n_samples_per_prompt, 1),
        ("--n-samples-per-prompt", rollout.n_samples_per_prompt, rollout.rollout_batch_size, 2),
    ):
        multiple = needed * unit // math.gcd(needed * unit, other)
        lower = value // multiple * multiple
        near = [number for number in (lower, lower + multiple) if number >= least]
        remedies.append(f"{flag} {listed(near)}{also}")
    return f"use {', or '.join(remedies)}"
