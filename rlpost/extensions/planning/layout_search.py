"""Search layouts of the same model on as many GPUs, and order those that fit. Pure.

Input: settings and shape.
Output: settings with other parallel sizes of the trainer, another placement of the optimizer and,
if the KV cache is too small, larger engines. The estimate decides which of them fit, and the
arithmetic of ``step_time`` orders them: the shortest step comes first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from common.units import counted
from rlpost.config.checks.batch import is_uneven
from rlpost.config.checks.layout import layout_problems
from rlpost.config.plan.architecture import sharding_problem
from rlpost.config.plan.cards import CARDS, RESERVE, Card
from rlpost.config.plan.shape import Layout, Shape, layout_of
from rlpost.config.tree import Config
from rlpost.config.wording import with_values
from rlpost.extensions.planning.estimate import Estimate, estimate
from rlpost.extensions.planning.rank_memory import fullest_held
from rlpost.extensions.planning.rates import nearest_card
from rlpost.extensions.planning.step_time import StepTime, step_time
from rlpost.extensions.planning.train_time import IDLE
from rlpost.models.model_types import MegatronFields

MAX_CONTEXT = 16
HOST_MUST_SAVE = 0.02
OF_OFFLOAD = (
    "optimizer_cpu_offload",
    "overlap_cpu_optimizer_d2h_h2d",
    "use_precision_aware_optimizer",
)
"""Settings that are off for an optimizer on the GPU."""


@dataclass(frozen=True, slots=True)
class FittingLayout:
    """A layout that fits."""

    estimate: Estimate
    time: StepTime

    @property
    def cost(self) -> tuple[float, float]:
        """Seconds of a step, then of its training, which generation may hide.

        An optimizer on the host takes the memory of a node: it must save HOST_MUST_SAVE.
        """
        factor = 1 + HOST_MUST_SAVE * self.config.optimizer.optimizer_cpu_offload
        return self.time.total * factor, self.time.training

    @property
    def config(self) -> Config:
        return self.estimate.config

    @property
    def words(self) -> str:
        """The layout in a line."""
        return layout_words(self.estimate)

    @property
    def reasons(self) -> str:
        """Time and peak memory of the layout, for the user."""
        made, time = self.estimate, self.time
        peak = max(phase.total for phase in made.phases)
        texts = [f"{time.training:.0f} of {time.total:.0f} s train, MFU {time.mfu:.0%}"]
        if made.layout.pipeline > 1:
            texts.append(f"pipeline idle {time.parts[IDLE] / time.training:.0%}")
        texts.append(f"{peak / 1e9:.0f} of {made.gpu_bytes * RESERVE / 1e9:.0f} GB at its peak")
        return "; ".join(texts)


def _in_one_bucket(planned: Estimate) -> Estimate:
    """The same with slices in one bucket, of the same bytes: planned in a fraction of the time."""
    update = planned.update
    if update is None or update.slices is None:
        return planned
    slices = replace(update.slices, max_bytes=update.total_bytes * planned.config.num_engines)
    return replace(planned, update=replace(update, slices=slices))


def layout_words(planned: Estimate) -> str:
    """The layout in a line."""
    layout, config = planned.layout, planned.config
    sizes = f"TP {layout.tensor} x PP {layout.pipeline} x CP {layout.context}"
    texts = [f"{sizes} x DP {layout.data}"]
    if planned.shape.num_experts:
        texts.append(f"EP {layout.expert}")
    if layout.first is not None and layout.last is not None:
        texts.append(f"{layout.first} and {layout.last} layers at the ends")
    elif layout.last is not None:
        texts.append(f"{counted(layout.last, 'layer')} in the last stage")
    if config.optimizer.optimizer_cpu_offload:
        texts.append("optimizer on host")
    if config.num_engines:
        texts.append(f"engines of {config.cluster.rollout_num_gpus_per_engine}")
    return ", ".join(texts)


def suggest(
    config: Config,
    shape: Shape,
    *,
    gpu_bytes: int,
    engine_width: int = 2,
    card: Card | None = None,
) -> list[FittingLayout]:
    """All layouts that fit, the fastest first; each with the smallest engines that do.

    ``card``: of the GPUs; None: the one whose memory is nearest to ``gpu_bytes``.
    """
    card = card or CARDS[nearest_card(gpu_bytes)]
    fitting_layouts: dict[tuple[Layout, bool], FittingLayout] = {}
    for candidate in candidates(config, shape):
        key = layout_of(candidate), candidate.optimizer.optimizer_cpu_offload
        if key in fitting_layouts:
            continue  # with smaller engines
        if fullest_held(candidate, shape).total > gpu_bytes * RESERVE:
            continue  # spares the rest of the estimate, for most candidates
        memory_estimate = estimate(candidate, shape, gpu_bytes=gpu_bytes, engine_width=engine_width)
        if not memory_estimate.problems:
            time = step_time(_in_one_bucket(memory_estimate), card)
            fitting_layouts[key] = FittingLayout(memory_estimate, time)
    return sorted(fitting_layouts.values(), key=lambda choice: (choice.cost, choice.words))


def nearest(config: Config, choices: list[FittingLayout]) -> FittingLayout | None:
    """The layout that changes least, in factors of two; moving the optimizer counts as one."""
    here = _sizes(config)

    def distance(choice: FittingLayout) -> float:
        there = _sizes(choice.config)
        return sum(abs(math.log2(there[key] / here[key])) for key in here)

    return min(choices, key=lambda choice: (distance(choice), choice.cost), default=None)


def candidates(config: Config, shape: Shape) -> Iterator[Config]:
    """The layouts that divide GPUs, model and batch."""
    world, a_node = config.actor_world_size, config.cluster.actor_num_gpus_per_node
    for tensor in _powers(min(a_node, world)):
        if any(size % tensor for size in (shape.heads, shape.groups, shape.ffn)):
            continue
        for pipeline in _powers(world // tensor):
            ends = end_stages(shape.num_layers, pipeline)
            if ends is None:
                continue
            first, last = ends
            for context in _powers(min(MAX_CONTEXT, world // (tensor * pipeline))):
                for expert in _powers(world // pipeline) if shape.num_experts else [1]:
                    if shape.num_experts % expert == 0:
                        layout = Layout(
                            world, tensor, pipeline, context, expert, first=first, last=last
                        )
                        if not _is_refused(shape, layout):
                            yield from _possible(config, layout, has_experts=shape.num_experts > 0)


def _is_refused(shape: Shape, layout: Layout) -> bool:
    """Whether ``rlpost check`` refuses the layout for this model; an expert is on one rank."""
    fields: MegatronFields = {"add_bias_linear": shape.linear_bias}
    if shape.linear is not None:
        fields |= {"linear_attention_freq": (), "linear_num_key_heads": shape.linear.key_heads}
    if shape.num_experts:
        fields |= {"num_moe_experts": shape.num_experts}
    problem = sharding_problem(
        fields,
        tensor=layout.tensor,
        expert=layout.expert,
        expert_tensor=1,
        context=layout.context,
    )
    return problem is not None


def end_stages(num_layers: int, pipeline: int) -> tuple[int | None, int | None] | None:
    """Return the layers of the first and of the last stage where they are not the others' number.

    The others have the mean, rounded up, because embedding and logits are on the ends; these share
    the rest, 20 of 92 layers with 8 stages. None where no layers are left for them.
    """
    if num_layers % pipeline == 0:
        return None, None
    each = -(-num_layers // pipeline)
    rest = num_layers - each * (pipeline - 2)
    if rest < 2:
        return None
    first, last = -(-rest // 2), rest // 2
    return (None if first == each else first), last


def _possible(config: Config, layout: Layout, *, has_experts: bool) -> Iterator[Config]:
    changed = with_values(
        config,
        tensor_model_parallel_size=layout.tensor,
        sequence_parallel=layout.tensor > 1,
        pipeline_model_parallel_size=layout.pipeline,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=1 if has_experts else None,
        num_layers_per_virtual_pipeline_stage=None,
        decoder_first_pipeline_num_layers=layout.first,
        decoder_last_pipeline_num_layers=layout.last,
    )
    if layout_problems(changed) or is_uneven(changed):
        return
    on_gpu = dict.fromkeys(OF_OFFLOAD, False)
    for engine in _engine_sizes(changed):
        sized = with_values(changed, rollout_num_gpus_per_engine=engine)
        yield with_values(sized, **on_gpu)
        yield with_values(sized, optimizer_cpu_offload=True)


def _engine_sizes(config: Config) -> list[int]:
    """The given size, twice and four times that, where they divide the GPUs."""
    size, generates = config.cluster.rollout_num_gpus_per_engine, config.rollout_num_gpus
    larger = [one for one in (2 * size, 4 * size) if generates and generates % one == 0]
    return [size, *larger]


def _sizes(config: Config) -> dict[str, int]:
    perf = config.perf
    return {
        "tensor": perf.tensor_model_parallel_size,
        "pipeline": perf.pipeline_model_parallel_size,
        "context": perf.context_parallel_size,
        "expert": perf.expert_model_parallel_size,
        "engine": config.cluster.rollout_num_gpus_per_engine,
        "offload": 2 if config.optimizer.optimizer_cpu_offload else 1,
    }


def _powers(limit: int) -> list[int]:
    return [2**power for power in range(max(1, limit).bit_length()) if 2**power <= limit]
