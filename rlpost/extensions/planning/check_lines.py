"""What the estimate adds to the core: lines of ``rlpost check``, notes, and the memory of ranks.

Input: settings, the model's config.json. Output: lines for the user; bytes by part.
"""

from __future__ import annotations

from common.units import size_text
from rlpost.config.extensions import RankEstimate
from rlpost.config.plan.hf_shape import hf_shape, weight_bytes
from rlpost.config.plan.shape import Shape
from rlpost.config.tree import Config
from rlpost.errors import WeightError
from rlpost.extensions.planning.earlier_runs import earlier_step_times
from rlpost.extensions.planning.engine_memory import engine_weights
from rlpost.extensions.planning.estimate import estimate
from rlpost.extensions.planning.rank_memory import frozen_note, fullest_held, reference_note
from rlpost.extensions.planning.save_interval import interval_note, save_interval
from rlpost.models.model_types import HfConfig

ANY_GPU_BYTES = 80 * 10**9  # a checkpoint does not depend on it


def arithmetic(config: Config, hf: HfConfig) -> list[tuple[str, str]]:
    """Return what a GPU of the trainer and of an engine holds."""
    shape = hf_shape(hf)
    memory = fullest_held(config, shape)
    critic = ", as much again for the critic" if config.use_critic else ""
    of_engine = engine_weights(config, shape, weight_bytes(hf))
    return [
        (
            "trainer GPU",
            f"weights {size_text(memory.weights)} + gradients {size_text(memory.gradients)} + optimizer "
            f"{size_text(memory.optimizer)} = {size_text(memory.total)}{critic}, and activations",
        ),
        ("engine GPU", f"weights {size_text(of_engine)}, and KV cache"),
    ]


def notes(config: Config, hf: HfConfig) -> list[str]:
    """Return the notes on settings that cost time or memory for nothing."""
    try:
        shape = hf_shape(hf)
    except WeightError:
        shape = None  # a plugin's model family: the notes omit sizes
    lines = (
        reference_note(config, shape),
        frozen_note(config),
        None if shape is None else _interval_note(config, shape),
    )
    return [line for line in lines if line is not None]


def _interval_note(config: Config, shape: Shape) -> str | None:
    """Note on a --save-interval that loses time, judged by an earlier run of this recipe."""
    times = earlier_step_times(config)
    if times is None:
        return None
    planned = estimate(config, shape, gpu_bytes=ANY_GPU_BYTES)
    best = save_interval(config, checkpoint_bytes=planned.checkpoint_bytes, times=times)
    return interval_note(config, best)


def rank_memory(
    config: Config, shape: Shape, gpu_bytes: int, with_engine: bool
) -> list[RankEstimate]:
    """Return the memory of the fullest rank of each pipeline stage while it trains."""
    ranks = []
    for rank in estimate(config, shape, gpu_bytes=gpu_bytes, with_engine=with_engine).ranks:
        parts = {
            "weights": rank.held.weights,
            "gradients": rank.held.gradients,
            "optimizer": rank.held.optimizer,
            "activations, logits": rank.passing.peak,
        }
        if rank.critic.total:
            parts["critic"] = rank.critic.total
        ranks.append(RankEstimate(parts, rank.context))
    return ranks
