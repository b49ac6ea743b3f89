"""Check that profiled and traced steps and ranks exist, and that there are mirrors of metrics.

Input: a ``Config``. Output: one line for each problem.
"""

from __future__ import annotations

from rlpost.config import extensions
from rlpost.config.flags import flag
from rlpost.config.tree import Config
from rlpost.config.wording import listed, spelled


def observe_problems(config: Config) -> list[str]:
    """Settings of [observe] that would produce no output."""
    observe, last = config.observe, config.rollout.num_rollout
    behind_last = f"is after the last step, {spelled(config, 'num_rollout')}"
    problems = _missing_mirrors(config)
    if observe.profile or observe.record_memory_history:
        start, end = observe.profile_step_start, observe.profile_step_end
        first, behind = spelled(config, "profile_step_start"), spelled(config, "profile_step_end")
        if end <= start:
            problems.append(
                f"{behind} must be above {first}, because the profile ends before it; use "
                f"--profile-step-end {start + 1} or more"
            )
        elif start > last:
            problems.append(
                f"{first} {behind_last}; use --profile-step-start {last} --profile-step-end "
                f"{last + 1}, or a larger --num-rollout"
            )
        ranks = [rank for rank in observe.profile_ranks if rank >= config.actor_world_size]
        if ranks:
            problems.append(
                f"{spelled(config, 'profile_ranks')}: rank {listed(ranks)} does not exist; use ranks from 0 to "
                f"{config.actor_world_size - 1}, for instance --profile-ranks 0"
            )
    if observe.traced and observe.traced[0] > last:
        problems.append(
            f"{spelled(config, 'trace_steps')} {behind_last}; use steps from 1 to {last}, for "
            f"instance --trace-steps {last}"
        )
    return problems


def _missing_mirrors(config: Config) -> list[str]:
    """Mirrors of metrics that this installation lacks."""
    switches = {
        "use_tensorboard": config.observe.use_tensorboard,
        "use_prometheus": config.observe.use_prometheus,
        "use_wandb": config.wandb.is_on,
    }
    return [
        f"{flag(name)} true: this installation has no extension for it; use {flag(name)} false"
        for name, is_on in switches.items()
        if is_on and name not in extensions.mirrors()
    ]
