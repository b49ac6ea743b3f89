"""What a set of scored groups says in a few numbers, and the numbers of held-out prompts.

Comes in: groups, or prompts to make them from. Goes out: means over all samples, each sample counted once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlpost.reward.registry import RewardFunction
from rlpost.rollout.generate import RouterAddress, generate_groups
from rlpost.rollout.sampling import SamplingParams
from rlpost.types import Prompt, SampleGroup


def summarise(groups: Sequence[SampleGroup]) -> dict[str, float]:
    """``reward_mean``; ``response_length_mean``, in tokens; ``truncated_frac``, the share that the limit cut off."""
    scored = [sample for group in groups for sample in group.samples]
    if not scored:
        raise ValueError("no samples to summarise")
    return {
        "reward_mean": sum(each.reward for each in scored) / len(scored),
        "response_length_mean": sum(len(each.sample.response_ids) for each in scored) / len(scored),
        "truncated_frac": sum(each.sample.finish_reason == "length" for each in scored) / len(scored),
    }


async def evaluate(
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    n: int,
    router: RouterAddress,
    score: RewardFunction,
    stop_requested: Callable[[], bool],
) -> dict[str, float]:
    """``summarise`` of ``n`` samples of each prompt; raises what ``generate_groups`` raises."""
    groups = await generate_groups(prompts, sampling, n=n, router=router, score=score, stop_requested=stop_requested)
    return summarise(groups)
