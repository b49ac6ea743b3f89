"""Training batches: distributes scored groups over data-parallel ranks. Pure.

Input: the groups of a rollout. Output: for each optimizer step one ``TrainBatch`` per data-parallel
rank, with the denominators of the global batch; and metrics of the groups.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

from rlpost.algorithm.advantage import (
    Advantage,
    AnswerGroup,
    Penalties,
    custom_advantages,
    estimate,
)
from rlpost.algorithm.answers import (
    answer_weights,
    answers_of,
    compared_rewards,
    estimate_by_answer,
)
from rlpost.algorithm.evaluation_statistics import mean
from rlpost.algorithm.schedule import (
    Bins,
    Schedule,
    regroup,
    schedule,
    sequence_work,
)
from rlpost.algorithm.shaping import Shaping
from rlpost.algorithm.shared_prefix import (
    Prefixes,
    has_one_prompt,
    samples_of,
    schedule_with_prefixes,
    shared_lengths,
)
from rlpost.columns import RunColumn
from rlpost.config.groups.grpo import GrpoConfig
from rlpost.config.tree import Config
from rlpost.errors import DataError
from rlpost.rollout.episode_metrics import episode_metrics
from rlpost.rollout.evaluate import summarise
from rlpost.types import SampleGroup, TrainBatch, TrainSample

T = TypeVar("T")
StepBatches = tuple[TrainBatch, ...]  # one for each data-parallel rank


@dataclass(frozen=True, slots=True)
class DealtStep:
    """One optimizer step of a rollout.

    ``positions`` has for each data-parallel rank, in the order of ``TrainBatch.samples``, the
    position of each sample among those of the rollout; None for the copies that ``filled_up`` adds.
    """

    batches: StepBatches
    positions: tuple[tuple[int | None, ...], ...]


def by_position(step: DealtStep, of_ranks: Sequence[Sequence[T]]) -> dict[int, T]:
    """Return values of each rank's samples by the position of the sample in the rollout."""
    found: dict[int, T] = {}
    for positions, values in zip(step.positions, of_ranks, strict=True):
        pairs = zip(positions, values, strict=True)
        found |= {position: value for position, value in pairs if position is not None}
    return found


def in_order(values: Mapping[int, T]) -> list[T]:
    """Return the values of a rollout's samples, by position, in the order of their positions."""
    return [values[position] for position in range(len(values))]


def train_samples(
    group: SampleGroup,
    advantages: Sequence[Advantage],
    *,
    with_masks: bool = False,
) -> list[TrainSample]:
    """Return the group's samples with their advantages, in order.

    The samples of one answer together have weight 1. Sampling masks are left out without
    ``with_masks``.
    """
    return [
        TrainSample(
            token_ids=scored.sample.prompt_ids + scored.sample.response_ids,
            prompt_length=len(scored.sample.prompt_ids),
            loss_mask=scored.mask,
            rollout_logprobs=scored.sample.rollout_logprobs,
            advantage=advantage,
            weight=weight,
            count=count,
            routes=scored.sample.routes,
            teacher_logprobs=scored.sample.teacher_logprobs,
            teacher_top_ids=scored.sample.teacher_top_ids,
            teacher_top_logprobs=scored.sample.teacher_top_logprobs,
            sampling_mask=scored.sample.sampling_mask if with_masks else None,
            images=scored.sample.images,
        )
        for scored, advantage, (weight, count) in zip(
            group.samples, advantages, answer_weights(group), strict=True
        )
    ]


def shaping_of(config: Config) -> Shaping:
    """Return how a run shapes rewards and loss masks."""
    grpo = config.grpo
    return Shaping(
        max_response_len=config.rollout.rollout_max_response_len,
        max_context_len=config.rollout.rollout_max_context_len,
        overlong_buffer_len=grpo.overlong_buffer_len,
        overlong_penalty=grpo.overlong_penalty,
        truncated_answers=grpo.truncated_answers,
        repetitive_answers=grpo.repetitive_answers,
        punished_reward=grpo.punished_reward,
    )


def rollout_samples(
    groups: Sequence[SampleGroup], grpo: GrpoConfig, penalties: Penalties | None = None
) -> list[TrainSample]:
    """Return all samples of a rollout with ``rollout_advantages``, in order of groups."""
    return samples_with(rollout_advantages(groups, grpo, penalties), groups, grpo)


def rollout_advantages(
    groups: Sequence[SampleGroup], grpo: GrpoConfig, penalties: Penalties | None = None
) -> list[tuple[Advantage, ...]]:
    """Return advantages by group and sample, of rewards minus ``penalties`` per token."""
    if grpo.is_supervised:
        return [(1.0,) * len(group.samples) for group in groups]
    if grpo.disable_compute_advantages_and_returns:
        return [(0.0,) * len(group.samples) for group in groups]
    if grpo.custom_advantage_function_path is not None:
        return custom_advantages(grpo.custom_advantage_function_path, groups, penalties)

    def estimate_answers(answers: Sequence[AnswerGroup]) -> list[tuple[Advantage, ...]]:
        # as in slime, post-processed rewards get no baseline
        is_raw = grpo.custom_reward_post_process_path is not None
        return estimate(
            grpo.advantage_estimator,
            answers,
            normalize_std=not grpo.disable_grpo_std_normalization,
            normalize_advantages=grpo.normalize_advantages,
            gamma=grpo.gamma,
            raw=grpo.disable_rewards_normalization or is_raw,
        )

    return estimate_by_answer(groups, penalties, estimate_answers)


def samples_with(
    advantages: Sequence[Sequence[Advantage]], groups: Sequence[SampleGroup], grpo: GrpoConfig
) -> list[TrainSample]:
    """Return all samples of a rollout, in order of groups, with the given advantages.

    Raises:
        DataError: --use-rollout-sampling-mask, and a sample has no sampling mask.
    """
    samples = [scored.sample for group in groups for scored in group.samples]
    if grpo.use_rollout_sampling_mask and any(each.sampling_mask is None for each in samples):
        raise DataError(
            "--use-rollout-sampling-mask needs the sampling mask of every sample, and one has none: "
            "generate functions must take tokens from their ResponseBuilder, and recordings must be "
            "made with the same setting"
        )
    all_samples: list[TrainSample] = []
    for group, group_advantages in zip(groups, advantages, strict=True):
        all_samples += train_samples(
            group, group_advantages, with_masks=grpo.use_rollout_sampling_mask
        )
    return all_samples


def deal(
    samples: Sequence[TrainSample], config: Config, *, break_even: float = math.inf
) -> list[DealtStep]:
    """Deal the samples of a rollout to optimizer steps; those of one answer stay in one step.

    Fewer answers than steps, because their grades were lost, are one step each.
    """
    starts = [number for number, sample in enumerate(samples) if sample.count] + [len(samples)]
    num_answers = len(starts) - 1
    num_steps = min(config.num_steps_per_rollout, num_answers)
    ends = [starts[num_answers * number // num_steps] for number in range(num_steps + 1)]
    return [
        _deal_step(samples[start:end], start, config, break_even) for start, end in pairwise(ends)
    ]


def filled_up(samples: Sequence[TrainSample], multiple_of: int) -> list[TrainSample]:
    """Pad samples to a multiple with copies of the shortest one that are masked out of the loss.

    Padding is only needed when a custom generate function returns a varying number of samples.
    """
    shortest = min(samples, key=lambda sample: len(sample.token_ids))
    filler = replace(shortest, loss_mask=RunColumn([(0, shortest.response_length)]), advantage=0.0)
    return [*samples, *[filler] * (-len(samples) % multiple_of)]


def _deal_step(
    samples: Sequence[TrainSample], first: int, config: Config, break_even: float
) -> DealtStep:
    """Return the batches of one step; ``first`` is the position of its first sample."""
    padded_to = config.perf.sequence_multiple
    num_samples = sum(sample.count for sample in samples)
    positions = range(first, first + len(samples))
    samples = filled_up(samples, config.data_parallel_size * config.micro_batch_multiple)
    lengths = [len(sample.token_ids) + -len(sample.token_ids) % padded_to for sample in samples]
    layout = {
        "data_parallel_size": config.data_parallel_size,
        "multiple_of": config.micro_batch_multiple,
    }
    if config.perf.share_prefix and config.max_tokens is not None:
        prefixes = Prefixes(lengths, shared_lengths(samples), break_even)
        balances = config.perf.balance_data
        dealt = schedule_with_prefixes(
            prefixes, max_tokens=config.max_tokens, balances=balances, **layout
        )
    else:
        dealt = schedule(
            lengths,
            max_tokens=config.max_tokens,
            micro_batch_size=config.perf.micro_batch_size,
            work=[sequence_work(length, break_even) for length in lengths]
            if config.perf.balance_data
            else None,
            **layout,
        )
    num_tokens = sum(sample.loss_mask.total() for sample in samples)

    def batch(micro_batches: Bins, groups: Bins) -> TrainBatch:
        return TrainBatch(
            micro_batches=tuple(_chosen(samples, indices) for indices in micro_batches),
            num_samples=num_samples,
            num_tokens=num_tokens,
            log_prob_groups=tuple(map(tuple, groups)),
        )

    batches = tuple(map(batch, dealt, _log_prob_groups(dealt, samples, lengths, config)))
    in_rollout: list[int | None] = [*positions, *[None] * (len(samples) - len(positions))]
    chain = itertools.chain.from_iterable
    return DealtStep(batches, tuple(_chosen(in_rollout, chain(rank)) for rank in dealt))


def _log_prob_groups(
    dealt: Schedule, samples: Sequence[TrainSample], lengths: Sequence[int], config: Config
) -> list[Bins]:
    """Pack each rank's samples for the log-prob passes, which have a separate token limit."""
    limit = config.log_probs_max_tokens
    if limit is None:
        return [[] for _ in dealt]
    ranks = [list(itertools.chain.from_iterable(rank)) for rank in dealt]
    # What is packed as one: samples that share a beginning, by their numbers on the rank.
    bundles, sizes = [], []
    for indices in ranks:
        rank_samples = _chosen(samples, indices)
        shared = shared_lengths(rank_samples, shares=bool(config.perf.share_prefix))
        prefixes = Prefixes(_chosen(lengths, indices), shared, math.inf)
        bundles.append(prefixes.bundles(limit=limit, most=len(indices)))
        sizes.append([math.ceil(prefixes.size(one)) for one in bundles[-1]])
    packed = regroup(sizes, max_tokens=limit, multiple_of=config.micro_batch_multiple)
    if packed is None:
        return [[] for _ in dealt]
    return [
        [samples_of(rank_samples, bin_) for bin_ in bins]
        for rank_samples, bins in zip(bundles, packed, strict=True)
    ]


def _chosen(values: Sequence[T], indices: Iterable[int]) -> tuple[T, ...]:
    return tuple(values[i] for i in indices)


def prefix_metrics(groups: Sequence[SampleGroup], steps: Sequence[DealtStep]) -> dict[str, float]:
    """Return metrics of --share-prefix: tokens that are not computed again, and odd groups."""
    micro_batches = [
        micro_batch
        for step in steps
        for batch in step.batches
        for micro_batch in batch.micro_batches
    ]
    shared = sum(sum(shared_lengths(micro_batch)) for micro_batch in micro_batches)
    total = sum(len(sample.token_ids) for micro_batch in micro_batches for sample in micro_batch)
    odd = sum(not has_one_prompt(group) for group in groups)
    return {"train/shared_tokens_frac": shared / total, "train/groups_of_several_prompts": odd}


def rollout_metrics(groups: Sequence[SampleGroup]) -> dict[str, float]:
    """Return metrics of rewards and response lengths of a rollout.

    An answer counts once, however many samples it has; means are over prompts.
    """
    summary = summarise(groups)
    by_group = [answers_of(group) for group in groups]
    answers = list(itertools.chain.from_iterable(by_group))
    compared = [set(compared_rewards(group_answers)) for group_answers in by_group]
    return {
        "reward/mean": summary["reward_mean"],
        "reward/std": statistics.pstdev(answer.reward for answer in answers),
        "rollout/zero_std_groups": sum(len(rewards) == 1 for rewards in compared),
        "rollout/response_length_mean": summary["response_length_mean"],
        "rollout/response_length_max": max(answer.length for answer in answers),
        "rollout/truncated_frac": summary["truncated_frac"],
        "rollout/repetitive_frac": mean(
            [
                mean([answer.is_repetitive for answer in group_answers])
                for group_answers in by_group
                if group_answers
            ]
        ),
        "rollout/num_tokens": sum(answer.length for answer in answers),
        **route_metrics(groups),
        **mask_metrics(groups),
        **episode_metrics(groups),
    }


def route_metrics(groups: Sequence[SampleGroup]) -> dict[str, float]:
    """Return bytes per token of routes, and the fraction of tokens without one; {} without routes.

    The last token of a response never has a route and does not count.
    """
    samples = [scored.sample for group in groups for scored in group.samples]
    routes = [sample.routes for sample in samples if sample.routes is not None]
    num_read = sum(len(sample.prompt_ids) + len(sample.response_ids) - 1 for sample in samples)
    if not routes or not num_read:
        return {}
    num_known = sum(int(column.known.sum()) for column in routes)
    return {
        "rollout/routes_bytes_per_token": sum(column.array.nbytes for column in routes) / num_read,
        "rollout/routes_unknown_frac": max(0.0, 1 - num_known / num_read),
    }


def mask_metrics(groups: Sequence[SampleGroup]) -> dict[str, float]:
    """Return the mean number of ids that a token was sampled from; empty without sampling masks."""
    samples = [scored.sample for group in groups for scored in group.samples]
    masks = [sample.sampling_mask for sample in samples if sample.sampling_mask is not None]
    num_masked = sum(int((mask.sizes.array > 0).sum()) for mask in masks)
    if not num_masked:
        return {}
    return {"rollout/sampling_mask_size": sum(len(mask.token_ids) for mask in masks) / num_masked}


def staleness_metrics(groups: Sequence[SampleGroup], version: int) -> dict[str, float]:
    """Return mean and maximum over groups of ``version`` minus the version of the first token."""
    behind = [version - group.oldest_version for group in groups]
    return {
        "rollout/staleness_mean": statistics.fmean(behind),
        "rollout/staleness_max": max(behind),
    }
