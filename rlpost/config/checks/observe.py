"""Check that profiled and traced steps and ranks exist. Pure.

Input: a ``Config``. Output: one line for each problem.
"""

from __future__ import annotations

from rlpost.config.tree import Config
from rlpost.config.wording import listed, spelled


def observe_problems(config: Config) -> list[str]:
    """Settings of [observe] that would produce no output."""
    observe, last = config.observe, config.rollout.num_rollout
    behind_last = f"is after the last step, {spelled(config, 'num_rollout')}"
    problems = []
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
