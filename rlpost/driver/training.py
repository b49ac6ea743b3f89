"""The training stage: runs the optimizer steps of a rollout on the actors.

Input: scored groups. Output: the metrics of the last optimizer step; guards check every step. With
several steps, a KL penalty in the reward or a kept old policy, the log-probs under the rollout's
weights are computed before the first step. With a critic (``critic_training``) it is trained first,
on the same batches.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rlpost.algorithm.advantage import Advantage, Penalties
from rlpost.algorithm.guards import Bounds, Guards, check_tokens
from rlpost.algorithm.kl import kl_values
from rlpost.algorithm.partition import by_group
from rlpost.algorithm.plugin import foreign_adapters
from rlpost.algorithm.schedule import sequence_work
from rlpost.algorithm.shaping import shaped
from rlpost.algorithm.shared_prefix import shared_lengths
from rlpost.columns import DoubleColumn, FloatColumn
from rlpost.config.groups.grpo import GrpoConfig
from rlpost.config.plugin_settings import settings_of
from rlpost.config.tree import Config
from rlpost.driver import distillation
from rlpost.driver.batches import (
    DealtStep,
    by_position,
    deal,
    in_order,
    prefix_metrics,
    rollout_samples,
    samples_with,
    shaping_of,
)
from rlpost.driver.calls import Calls
from rlpost.driver.critic_training import CriticBatches, CriticTraining
from rlpost.driver.ledger_lines import RecordEvent, not_recorded
from rlpost.driver.worker_groups import (
    Actor,
    ActorGroup,
    RankLogprobs,
    RemoteCall,
    StoredBatches,
    StoredLogprobs,
    received,
    remote,
)
from rlpost.driver.workers import Stored
from rlpost.observe.progress.stragglers import Stragglers
from rlpost.rollout.evaluate import summarise
from rlpost.rollout.filters import reward_post_process
from rlpost.rollout.policy_versions import PolicyVersions
from rlpost.types import SampleGroup, StepPlace, StepResult, TrainBatch

logger = logging.getLogger(__name__)

SentAdvantages = Sequence[Stored[Sequence[Advantage]] | None]
"""The advantages of each rank's batch; None keeps those of the batch itself."""


class Training:
    """Trains on the groups of one rollout after the other."""

    def __init__(
        self,
        config: Config,
        actors: ActorGroup,
        data_ranks: Sequence[int],
        *,
        calls: Calls,
        is_fresh: bool,
        break_even: float,
        hosts: Sequence[str] | None = None,
        record: RecordEvent = not_recorded,
    ) -> None:
        """
        Args:
            data_ranks: the data-parallel rank of each actor.
            calls: how passes over micro-batches are called.
            is_fresh: the weights are those of --hf-checkpoint.
            break_even: see ``model_flops.model_break_even``.
            hosts: the host of each actor. Default: one host.
        """
        self._config = config
        self._actors = actors
        self._calls = calls
        self._data_ranks = data_ranks
        self._break_even = break_even
        self._stragglers = Stragglers(hosts or ["this host"] * len(data_ranks))
        self._record = record
        self._guards = Guards(guard_bounds(config.grpo), is_fresh=is_fresh)
        self._shaping = shaping_of(config)
        self._post_process = reward_post_process(
            config.grpo.custom_reward_post_process_path,
            foreign_adapters().arguments(settings_of(config)),
        )
        self._grpo = config.grpo
        self._critic = None
        if config.use_critic:
            self._critic = CriticTraining(config.grpo, actors, data_ranks, calls)

    async def train(
        self, groups: Sequence[SampleGroup], rollout: int, versions: PolicyVersions
    ) -> Mapping[str, float]:
        """Run all optimizer steps of a rollout; return the metrics of the last one.

        ``rollout`` is its number in the run, from 1; ``versions`` are those of the attempt.

        Raises:
            TrainingError: a guard rejected the metrics of a step.
            Preempted: a stop was requested before the first optimizer step; nothing has changed.
            HalfTrained: the deadline of a stop passed after the first optimizer step. Without a
                near deadline, all steps are completed.
        """
        grpo, settings = self._grpo, self._config.distillation
        metrics: dict[str, float] = {}
        groups = await self._shaped(groups, metrics)
        steps = await asyncio.to_thread(self._deal, groups, self._config)
        self._warn(check_tokens(step.batches) for step in steps)
        if self._config.perf.share_prefix:
            metrics |= await asyncio.to_thread(prefix_metrics, groups, steps)
        # Stored once for all passes. The store frees them with these lists, at the end of the
        # rollout's training.
        batches = [await self._actors.send(step.batches, self._data_ranks) for step in steps]
        trains_policy = rollout > self._config.critic.num_critic_only_steps
        old: list[StoredLogprobs] = [self._nothing] * len(steps)
        advantages: list[SentAdvantages] = [self._nothing] * len(steps)
        trains_distilled = trains_policy and distillation.in_advantage(settings)
        has_old_policy = len(steps) > 1 or grpo.keep_old_actor
        is_compared = trains_policy and has_old_policy and not grpo.use_rollout_logprobs
        needs_own = trains_distilled and not grpo.use_rollout_logprobs
        if grpo.kl_coef or is_compared or needs_own:
            old_version = versions.old(rollout - 1)
            old = [await self._logprobs(batch, old_version) for batch in batches]
        penalties = None
        if grpo.kl_coef:
            penalties = await self._group_penalties(groups, steps, batches, old)
            total = await asyncio.to_thread(trained_sum, groups, penalties)
            metrics["train/reward_kl"] = total / grpo.kl_coef / num_tokens(steps)
        distances: dict[int, DoubleColumn] = {}
        if trains_distilled:  # before the critic changes, while a stop may still interrupt
            for number, step in enumerate(steps):
                distances |= await self._distances(step, old[number])
            metrics |= await asyncio.to_thread(
                distillation.reverse_kl, distances, num_tokens(steps)
            )
        estimated: Sequence[Sequence[Advantage]] | None = None
        if self._critic is not None:
            estimates = await self._critic.train(groups, CriticBatches(steps, batches), penalties)
            metrics |= estimates.metrics
            estimated = estimates.advantages
        elif penalties is not None or trains_distilled:
            estimated = await asyncio.to_thread(
                distillation.base_advantages, groups, grpo, settings, penalties
            )
        if not trains_policy:
            await self._actors.all(remote(Actor.old_policy.skip, rollout))
            return metrics
        if trains_distilled and estimated is not None:
            estimated = await asyncio.to_thread(
                distillation.with_teacher, estimated, groups, grpo, settings, distances
            )
        if estimated is not None:
            advantages = await self._sent_advantages(steps, estimated)
        for number, arguments in enumerate(zip(batches, old, advantages, strict=True)):
            place = versions.place(rollout, number + 1, len(steps))
            calls = train_calls(*arguments, place)
            # A critic has changed by now, so a stop must not interrupt any step, even the first.
            is_first_change = number == 0 and self._critic is None
            send = partial(self._actors.each, calls)
            results = await self._calls.make(calls[0].path, send, may_leave=is_first_change)
            metrics |= results[0].metrics
            metrics |= self._pace(steps[number], results)
            self._warn(self._guards.after_step(metrics, is_first=number == 0))
        return metrics

    async def _shaped(
        self, groups: Sequence[SampleGroup], metrics: dict[str, float]
    ) -> Sequence[SampleGroup]:
        """Return groups with the rewards to train on; add metrics of rewards that have changed."""
        changed = groups
        if not self._shaping.is_off:
            changed = await asyncio.to_thread(shaped, groups, self._shaping)
        if self._post_process is not None:
            processed = await asyncio.to_thread(self._post_process, changed)
            changed = processed.groups
            metrics["reward/mean"] = summarise(processed.raw_groups)["reward_mean"]
        if changed is not groups:
            metrics["reward/shaped_mean"] = summarise(changed)["reward_mean"]
        return changed

    @property
    def _nothing(self) -> list[None]:
        """Return an argument that is None on every rank."""
        return [None] * len(self._data_ranks)

    def _deal(self, groups: Sequence[SampleGroup], config: Config) -> list[DealtStep]:
        """Return the batches of a rollout for the ranks of ``config``.

        With a KL penalty, a critic or a teacher, advantages are 0 until they are replaced.
        """
        grpo, given = self._grpo, self._config.distillation
        has_teacher = distillation.in_advantage(given) or (given.use_opd and given.opd_alone)
        if grpo.kl_coef or self._critic is not None or has_teacher:
            samples = samples_with([[0.0] * len(group.samples) for group in groups], groups, grpo)
        else:
            samples = rollout_samples(groups, grpo)
        return deal(samples, config, break_even=self._break_even)

    async def _logprobs(self, batches: StoredBatches, old_version: int) -> StoredLogprobs:
        """Compute log-probs under the policy, or under ``old_version`` with --keep-old-actor."""
        if self._config.grpo.keep_old_actor:
            old = Actor.compute_old_logprobs
            return await self._pass([remote(old, received(one), old_version) for one in batches])
        return await self._pass([remote(Actor.compute_logprobs, received(one)) for one in batches])

    async def _pass(self, calls: Sequence[RemoteCall[Actor, RankLogprobs]]) -> StoredLogprobs:
        """Make a forward pass before the first optimizer step; a stop request may end it.

        Its results stay in the object store.
        """
        send = partial(self._actors.each_stored, calls)
        return await self._calls.make(calls[0].path, send, may_leave=True)

    def _pace(self, step: DealtStep, results: Sequence[StepResult]) -> dict[str, float]:
        """Return the straggler scores of a step; propose hosts that stay slow for exclusion."""
        shares = bool(self._config.perf.share_prefix)
        work = [rank_work(batch, self._break_even, share_prefix=shares) for batch in step.batches]
        seconds = [result.own_s for result in results]
        for slow in self._stragglers.add(seconds, [work[rank] for rank in self._data_ranks]):
            logger.warning("%s", slow)
            self._record("slow_host", host=slow.host, peer=round(slow.peer, 3), steps=slow.steps)
        return self._stragglers.metrics()

    def _warn(self, warnings: Iterable[str | None]) -> None:
        for warning in warnings:
            if warning is not None:
                logger.warning("%s", warning)

    async def _distances(self, step: DealtStep, old: StoredLogprobs) -> dict[int, DoubleColumn]:
        """Return divergences from the teacher of response tokens, by position of their sample."""
        own = old if distillation.needs_policy_logprobs(self._config) else self._nothing
        of_ranks = []
        for data_rank, batch in enumerate(step.batches):
            ours = await self._of_rank(own, data_rank)
            of_ranks.append(
                await asyncio.to_thread(distillation.rank_distances, batch.samples, ours)
            )
        return by_position(step, of_ranks)

    async def _of_rank(self, stored: StoredLogprobs, data_rank: int) -> list[FloatColumn] | None:
        return await self._actors.fetch_columns(stored, self._data_ranks, data_rank)

    async def _group_penalties(
        self,
        groups: Sequence[SampleGroup],
        steps: Sequence[DealtStep],
        batches: Sequence[StoredBatches],
        old: Sequence[StoredLogprobs],
    ) -> list[Sequence[DoubleColumn]]:
        """Return kl_coef x KL of each response token, by group and sample."""
        ref = [
            await self._pass([remote(Actor.compute_ref_logprobs, received(one)) for one in batch])
            for batch in batches
        ]
        penalties_by_position: dict[int, DoubleColumn] = {}
        for step, ours, theirs in zip(steps, old, ref, strict=True):
            penalties_by_rank = []
            for data_rank in range(len(step.batches)):
                rank_logprobs = await self._of_rank(ours, data_rank)
                reference = await self._of_rank(theirs, data_rank)
                assert rank_logprobs is not None and reference is not None, (
                    "the last stage has both"
                )
                penalties_by_rank.append(
                    await asyncio.to_thread(
                        kl_penalties, rank_logprobs, reference, self._config.grpo
                    )
                )
            penalties_by_position |= by_position(step, penalties_by_rank)
        return await asyncio.to_thread(masked_penalties, groups, in_order(penalties_by_position))

    async def _sent_advantages(
        self, steps: Sequence[DealtStep], by_group: Sequence[Sequence[Advantage]]
    ) -> list[SentAdvantages]:
        """Store advantages by step and rank; 0 for padding samples."""
        of_samples = [advantage for group in by_group for advantage in group]

        def of_rank(positions: Sequence[int | None]) -> tuple[Advantage, ...]:
            return tuple(
                0.0 if position is None else of_samples[position] for position in positions
            )

        return [
            await self._actors.send(list(map(of_rank, step.positions)), self._data_ranks)
            for step in steps
        ]


def train_calls(
    batches: StoredBatches, old: StoredLogprobs, advantages: SentAdvantages, place: StepPlace
) -> list[RemoteCall[Actor, StepResult]]:
    """Return the call of an optimizer step of each rank; all but ``place`` have one per rank."""
    return [
        remote(Actor.train_step, received(batch), received(logprobs), received(own), place)
        for batch, logprobs, own in zip(batches, old, advantages, strict=True)
    ]


def guard_bounds(grpo: GrpoConfig) -> Bounds:
    """Return the thresholds of the guards of a run."""
    bounds = Bounds(**{name: getattr(grpo, name) for name in Bounds.__slots__})
    if grpo.use_rollout_logprobs or grpo.keep_old_actor:
        # The KL is then measured against the engines, or against the weights that generated.
        bounds = replace(bounds, guard_initial_kl=0.0)
    return bounds


def kl_penalties(
    old: Iterable[FloatColumn], ref: Iterable[FloatColumn], grpo: GrpoConfig
) -> list[DoubleColumn]:
    """Return kl_coef x KL of each response token, by sample."""
    found = []
    for own, reference in zip(old, ref, strict=True):
        difference = own.array.astype("float64") - reference.array.astype("float64")
        kl: Any = kl_values(difference, grpo.kl_loss_type)
        found.append(DoubleColumn.view(grpo.kl_coef * kl))
    return found


def masked_penalties(
    groups: Sequence[SampleGroup], penalties: Sequence[DoubleColumn]
) -> list[Sequence[DoubleColumn]]:
    """Return the penalties of tokens that the policy generated, 0 at others, by group and sample.

    Also those of answers that shaping masks out of the loss: the baseline counts their rewards.
    """
    samples = [scored.sample for group in groups for scored in group.samples]
    pairs = zip(samples, penalties, strict=True)
    masked = [DoubleColumn.view(column.array * sample.mask.array) for sample, column in pairs]
    return by_group(groups, masked)


def trained_sum(groups: Sequence[SampleGroup], penalties: Penalties) -> float:
    """Return the sum of the penalties of all tokens in the loss."""
    columns = [column for own in penalties for column in own]
    masks = [mask for group in groups for mask in group.masks]
    pairs = zip(columns, masks, strict=True)
    return sum(float((DoubleColumn.of(column).array * mask.array).sum()) for column, mask in pairs)


def rank_work(batch: TrainBatch, break_even: float, *, share_prefix: bool = False) -> float:
    """Return the work of a rank's samples in tokens, with attention converted to tokens."""
    return sum(
        sequence_work(len(sample.token_ids), break_even) - sequence_work(count, break_even)
        for micro_batch in batch.micro_batches
        for sample, count in zip(
            micro_batch,
            shared_lengths(micro_batch, shares=share_prefix),
            strict=True,
        )
    )


def num_tokens(steps: Sequence[DealtStep]) -> int:
    """Return the number of trained tokens (loss mask 1) of all steps."""
    return sum(step.batches[0].num_tokens for step in steps)
