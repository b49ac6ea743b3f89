"""The batch of a rehearsal: samples of planned lengths, scheduled as in a run. Pure.

The lengths of a step run evenly from a quarter of the longest sample to the longest, each rounded
to a length whose rows spread evenly over the experts. The schedule of the whole step is made, and
every data-parallel rank then gets the first micro-batches of the first rank. With balanced routing
all experts, and all ranks of an expert group, thus have equal rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlpost.algorithm.schedule import (
    Schedule,
    regroup,
    schedule,
    sequence_work,
)
from rlpost.config.plan.shape import Shape
from rlpost.config.plan.vision import image_tokens, longest_sample
from rlpost.config.tree import Config
from rlpost.types import ImageSpan, MicroBatch, TrainBatch, TrainSample


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One optimizer step.

    Attributes:
        batch: the micro-batches that every rank rehearses.
        log_prob_batch: those of the passes before it; None when a run has none.
        num_micro_batches: of the whole step, for each data-parallel rank.
    """

    batch: TrainBatch
    log_prob_batch: TrainBatch | None
    num_micro_batches: tuple[int, ...]


def planned_step(config: Config, shape: Shape, *, limit: int | None = None) -> PlannedStep:
    """The step of a configuration.

    ``limit`` is the number of micro-batches to rehearse, by default enough for a pipeline to be
    full, which is when it holds most: its stages and one more.

    Raises:
        ValueError: the samples cannot be distributed over the ranks.
    """
    longest = longest_sample(config)
    lengths = planned_lengths(config, longest, multiple=length_multiple(config, shape))
    dealt = _schedule(config, lengths)
    multiple = config.micro_batch_multiple
    num_micro_batches = config.perf.pipeline_model_parallel_size + 1 if limit is None else limit
    num_micro_batches += -num_micro_batches % multiple
    micro_batches = tuple(
        tuple(_sample(lengths[index], config, shape, index % 2) for index in micro)
        for micro in dealt[0][:num_micro_batches]
    )
    batch = TrainBatch(
        micro_batches,
        num_samples=len(lengths),
        num_tokens=sum(sample.response_length for micro in micro_batches for sample in micro),
    )
    return PlannedStep(batch, _log_prob_batch(config, batch), tuple(map(len, dealt)))


def length_multiple(config: Config, shape: Shape) -> int:
    """The tokens of which a sample is a multiple; 1 for a dense model.

    Of n rows a rank sends n k copies, k to each of a row's experts. They spread evenly if the
    number of experts divides n k. Context and tensor parallelism shard the rows of a sample, and a
    context-parallel rank has two chunks of it.
    """
    if not shape.num_experts:
        return 1
    perf = config.perf
    rows = shape.num_experts // math.gcd(shape.num_experts, shape.topk)
    ranks = perf.context_parallel_size * perf.tensor_model_parallel_size
    return math.lcm(rows * ranks, 2 * ranks)


def planned_lengths(config: Config, longest: int, *, multiple: int = 1) -> list[int]:
    """Tokens of each sample of a step, as many as the data-parallel ranks need."""
    unit = config.data_parallel_size * config.micro_batch_multiple
    num_samples = config.samples_per_rollout // config.num_steps_per_rollout
    num_samples += -num_samples % unit
    shortest = max(2, longest // 4)
    span = max(1, num_samples - 1)
    even = [shortest + (longest - shortest) * index // span for index in range(num_samples)]
    return [max(1, round(length / multiple)) * multiple for length in even]


def _schedule(config: Config, lengths: list[int]) -> Schedule:
    perf = config.perf
    multiple = perf.sequence_multiple
    padded = [length + -length % multiple for length in lengths]
    work = [sequence_work(length) for length in padded] if perf.balance_data else None
    return schedule(
        padded,
        data_parallel_size=config.data_parallel_size,
        max_tokens=config.max_tokens,
        micro_batch_size=perf.micro_batch_size,
        multiple_of=config.micro_batch_multiple,
        work=work,
    )


def _sample(length: int, config: Config, shape: Shape, token: int) -> TrainSample:
    """Return a sample of one repeated token: others share no beginning with it.

    With --multimodal-keys its prompt ends with an image, as large as fits.
    """
    prompt = max(1, length - config.rollout.rollout_max_response_len)
    response = length - prompt
    images: tuple[ImageSpan, ...] = ()
    if config.takes_images and shape.vision is not None and prompt > 1:
        count = min(prompt - 1, image_tokens(config, shape.vision))
        grid = 1, shape.vision.merge, count * shape.vision.merge
        images = (ImageSpan(f"{token}-{count}", prompt - count, count, grid),)
    return TrainSample(
        token_ids=[token] * length,  # type: ignore[arg-type]
        prompt_length=prompt,
        loss_mask=[1] * response,  # type: ignore[arg-type]
        rollout_logprobs=[0.0] * response,  # type: ignore[arg-type]
        advantage=1.0,
        images=images,
    )


def _log_prob_batch(config: Config, batch: TrainBatch) -> TrainBatch | None:
    """The passes of ``rlpost.driver.training`` before the first step."""
    grpo = config.grpo
    needed = grpo.kl_coef or (config.num_steps_per_rollout > 1 and not grpo.use_rollout_logprobs)
    if not needed:
        return None
    if config.log_probs_max_tokens is None:
        return batch
    samples = batch.samples
    packed = regroup(
        [[len(sample.token_ids) for sample in samples]],
        max_tokens=config.log_probs_max_tokens,
        multiple_of=config.micro_batch_multiple,
    )
    if packed is None:
        return batch
    groups: list[MicroBatch] = [tuple(samples[index] for index in one) for one in packed[0]]
    return TrainBatch(tuple(groups), num_samples=batch.num_samples, num_tokens=batch.num_tokens)
