"""Search layouts of the same model on as many GPUs, and order those that fit. Pure.

Input: settings and shape.
Output: settings with other parallel sizes of the trainer, another placement of the optimizer and,
if the KV cache is too small, larger engines. The estimate decides which of them fit. The order is a
rule of thumb, after Narayanan et al. (arXiv 2104.04473, section 3: tensor parallelism inside a
node, then pipelines, the rest data parallelism): each kind of communication and an optimizer on the
host cost a share of a step, an idle pipeline its bubble (p - 1) / (m + p - 1). It does not predict
speed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from common.units import counted
from rlpost.config.checks.batch import is_uneven
from rlpost.config.checks.layout import layout_problems
from rlpost.config.plan.estimate import RESERVE, Estimate, estimate
from rlpost.config.plan.shape import Layout, Shape
from rlpost.config.tree import Config
from rlpost.config.wording import with_values

TENSOR_COST, CONTEXT_COST, EXPERT_COST, OFFLOAD_COST = 0.06, 0.08, 0.03, 0.25
MAX_CONTEXT = 16
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
    cost: float

    @property
    def config(self) -> Config:
        return self.estimate.config

    @property
    def words(self) -> str:
        """The layout in a line."""
        layout = self.estimate.layout
        sizes = f"TP {layout.tensor} x PP {layout.pipeline} x CP {layout.context}"
        said = [f"{sizes} x DP {layout.data}"]
        if self.estimate.shape.num_experts:
            said.append(f"EP {layout.expert}")
        if layout.last is not None:
            said.append(f"{counted(layout.last, 'layer')} in the last stage")
        if self.config.optimizer.optimizer_cpu_offload:
            said.append("optimizer on host")
        if self.config.num_engines:
            said.append(f"engines of {self.config.cluster.rollout_num_gpus_per_engine}")
        return ", ".join(said)

    @property
    def reasons(self) -> str:
        """Peak memory, idle time and costs of the layout, for the user."""
        made, layout = self.estimate, self.estimate.layout
        peak = max(phase.total for phase in made.phases)
        said = [f"{peak / 1e9:.0f} of {made.gpu_bytes * RESERVE / 1e9:.0f} GB at its peak"]
        said.append(f"pipeline idle {bubble(made):.0%}" if layout.pipeline > 1 else "no pipeline")
        if layout.tensor > 1:
            said.append("TP inside a node")
        if layout.context > 1:
            said.append("sequences sharded")
        return "; ".join(said)


def suggest(
    config: Config,
    shape: Shape,
    *,
    gpu_bytes: int,
    engine_width: int = 2,
    teacher: Shape | None = None,
) -> list[FittingLayout]:
    """All layouts that fit, the best first; each with the smallest engines that do."""
    fitting_layouts: dict[tuple[Layout, bool], FittingLayout] = {}
    for candidate in candidates(config, shape):
        memory_estimate = estimate(
            candidate, shape, gpu_bytes=gpu_bytes, engine_width=engine_width, teacher=teacher
        )
        if not memory_estimate.problems:
            fitting_layouts.setdefault(
                (memory_estimate.layout, candidate.optimizer.optimizer_cpu_offload),
                FittingLayout(memory_estimate, _cost(memory_estimate)),
            )
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
            last = _last_stage(shape.num_layers, pipeline)
            if last is not None and last < 1:
                continue
            for context in _powers(min(MAX_CONTEXT, world // (tensor * pipeline))):
                for expert in _powers(world // pipeline) if shape.num_experts else [1]:
                    if shape.num_experts % expert == 0:
                        layout = Layout(world, tensor, pipeline, context, expert, last=last)
                        yield from _possible(config, layout, has_experts=shape.num_experts > 0)


def _last_stage(num_layers: int, pipeline: int) -> int | None:
    """Return the number of layers of the last stage; None where all stages are equal.

    Each of the other stages has the mean, rounded up. The number is less than 1 where no layers are
    left.

    Only a model with an odd number of layers gets unequal stages: no pipeline here divides it.
    """
    if num_layers % pipeline == 0:
        return None
    if num_layers % 2 == 0:
        return 0
    return num_layers - (pipeline - 1) * -(-num_layers // pipeline)


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
        decoder_first_pipeline_num_layers=None,
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


def bubble(made: Estimate) -> float:
    """Idle share of a pipeline stage, with responses of half the maximum length."""
    config, stages = made.config, made.layout.pipeline
    a_rank = config.samples_per_rollout / config.num_steps_per_rollout / made.layout.data
    batches = max(1.0, a_rank * made.longest / 2 / (made.tokens * made.layout.context))
    return (stages - 1) / (batches + stages - 1)


def _cost(made: Estimate) -> float:
    layout, config = made.layout, made.config
    cost = bubble(made) + TENSOR_COST * math.log2(layout.tensor)
    cost += CONTEXT_COST * math.log2(layout.context) + EXPERT_COST * math.log2(layout.expert)
    cost += OFFLOAD_COST if config.optimizer.optimizer_cpu_offload else 0.0
    return cost + 0.01 * math.log2(config.cluster.rollout_num_gpus_per_engine)


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
