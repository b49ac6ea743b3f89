"""Steps that are to be looked at and do not exist. Pure.

In: a ``Config``. Out: one line a problem.
"""

from __future__ import annotations

from rlpost.config.tree import Config


def observe_problems(config: Config) -> list[str]:
    """What of [observe] would leave nothing behind."""
    observe, last = config.observe, config.rollout.num_rollout
    problems = []
    if observe.profile or observe.record_memory_history:
        start, end = observe.profile_step_start, observe.profile_step_end
        if end <= start:
            problems.append(
                f"observe.profile_step_end = {end}: the step before which the profile ends; it must be above "
                f"profile_step_start = {start}"
            )
        elif start > last:
            problems.append(
                f"observe.profile_step_start = {start}: the run has {last} steps (--num-rollout), so nothing would be "
                "profiled"
            )
        ranks = [rank for rank in observe.profile_ranks if rank >= config.actor_world_size]
        if ranks:
            problems.append(
                f"observe.profile_ranks: there is no rank {', '.join(map(str, ranks))}; the trainer has "
                f"{config.actor_world_size} ranks"
            )
    if observe.traced and observe.traced[0] > last:
        problems.append(f"observe.trace_steps = {observe.trace_steps}: the run has {last} steps (--num-rollout)")
    return problems
