"""What a plan says of engines: weight updates, routes, and groups beside the policy's. Pure.

Input: an estimate, the settings; of a group its model's config.json, or the sizes of jobs/models
where the weights are not here yet. Output: rows of the plan's table, and what does not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.units import counted
from rlpost.config.engine_groups import group_config
from rlpost.config.model_file import MODELS, read_model
from rlpost.config.plan.hf_shape import hf_shape, weight_bytes
from rlpost.config.plan.shape import Shape
from rlpost.config.tree import Config
from rlpost.errors import WeightError
from rlpost.extensions.planning.engine_memory import PlannedEngine, planned_engine
from rlpost.extensions.planning.estimate import Estimate, Sizes
from rlpost.extensions.planning.loading_note import loading_note
from rlpost.extensions.planning.planned_slices import SliceFigures, slice_figures
from rlpost.extensions.planning.planned_update import PlannedUpdate
from rlpost.models.config_file import read_config

SGLANG_BYTES_PER_EXPERT = 4
"""Bytes per expert of a token in an engine's table of routes, which covers dense layers too."""


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """A group of engines: its size, and the memory of each of its GPUs; None if that is unknown."""

    name: str
    engines: int
    gpus: int
    model: str
    engine: PlannedEngine | None
    in_fleet: bool = False

    @property
    def problem(self) -> str | None:
        """Why it does not fit; None if it does, or if the model is unknown."""
        engine = self.engine
        if engine is None or engine.kv_tokens > 0:
            return None
        return (
            f"[engines.{self.name}]: {gb(engine.weights)} of weights leave no memory for a KV cache on "
            f"each of {counted(self.gpus, 'GPU')}; use more gpus, or a larger "
            "sglang_mem_fraction_static"
        )

    @property
    def words(self) -> str:
        """The row of the table."""
        size = f"{counted(self.engines, 'engine')} x {counted(self.gpus, 'GPU')}"
        size += " on other jobs" if self.in_fleet else ""
        if self.engine is None:
            return f"{size}; {self.model} is not here: no memory is known"
        engine = self.engine
        return (
            f"{size} of {Path(self.model).name}: weights {gb(engine.weights)}, KV cache "
            f"{gb(max(0, engine.kv_cache))}, {max(0, engine.kv_tokens):,} tokens an engine"
        )


def planned_groups(config: Config, policy: Shape, gpu_bytes: int) -> list[PlannedGroup]:
    """Plan the groups of engines that the job starts; ``policy`` is the shape of its model."""
    groups = []
    for name, group in config.engines.started.items():
        own = group_config(config, name)
        size = own.cluster.rollout_num_gpus_per_engine
        known = (policy, 2) if group.model is None else _model(group.model)
        engine = None
        if known is not None:
            engine = planned_engine(own, known[0], gpu_bytes=gpu_bytes, width=known[1], held=0)
        model = own.checkpoint.hf_checkpoint
        groups.append(PlannedGroup(name, group.engines, size, model, engine, group.fleet))
    return groups


def _model(folder: str) -> tuple[Shape, int] | None:
    """Return the shape of a model and the bytes of a weight; None if neither file is here."""
    path = Path(folder)
    try:
        hf = read_config(path)
        return hf_shape(hf), weight_bytes(hf)
    except (OSError, ValueError, WeightError):
        pass
    name = path.name.lower().replace("-", "_").replace(".", "_")
    file = MODELS / f"{name}.json"
    return (hf_shape(read_model(file)), 2) if file.is_file() else None


def route_words(made: Estimate, kv_tokens: int) -> str:
    """Memory of recorded routes: the most per step in the driver, and per GPU of an engine."""
    shape, config = made.shape, made.config
    bytes_per_expert = 1 if shape.num_experts <= 255 else 2
    per_token = sum(shape.sparse) * shape.topk * bytes_per_expert
    of_step = per_token * config.samples_per_rollout * made.longest
    of_engine = len(shape.sparse) * shape.topk * SGLANG_BYTES_PER_EXPERT * kv_tokens
    return (
        f"{per_token} bytes a token: at most {gb(of_step)} a step in the driver, "
        f"{gb(of_engine)} of host memory for each GPU of an engine"
    )


def update_rows(config: Config, update: PlannedUpdate) -> list[tuple[str, str]]:
    """Bytes and requests of a weight update."""
    engines = f"each of {config.num_engines} engines" if config.num_engines > 1 else "the engine"
    moved = f"{gb(update.total_bytes)} to {engines} a step"
    if config.sync.update_weight_transport == "disk":
        return [("weight update", f"{moved}, through files")]
    buckets = f"{counted(update.num_buckets, 'bucket')} of at most {gb(update.largest_bytes)}"
    place = "of a GPU for buckets" if config.cluster.colocate else "of a GPU that sends for buckets"
    requests = f"{counted(update.num_requests, 'request')} that the driver relays"
    rows = [
        ("weight update", f"{moved}: {buckets}"),
        ("", f"{requests}; {gb(update.gpu_bytes)} {place}"),
    ]
    if update.slices is not None:
        rows += slice_rows(slice_figures(update.slices))
    return rows


def slice_rows(figures: SliceFigures) -> list[tuple[str, str]]:
    """Bytes of an update in which each engine rank receives only what it holds."""
    buckets = counted(figures.num_buckets, "bucket")
    words = f"at most {gb(figures.sent)} sent by a trainer rank, {gb(figures.received)} received"
    network = f"{gb(figures.between_nodes)} through the busiest network card"
    once = f"{gb(figures.once_a_node)} if each byte crossed once a node"
    return [
        ("", f"in slices, {buckets}: {words} by an engine rank"),
        ("", f"{network} ({once}, which it does not)"),
    ]


def gb(size: float) -> str:
    """A size in GB or TB."""
    return f"{size / 1e12:.2f} TB" if size >= 1e12 else f"{size / 1e9:.1f} GB"


def loading_notes(
    config: Config, shape: Shape, sizes: Sizes, groups: Sequence[PlannedGroup]
) -> list[str]:
    """Return the notes about the policy's engines and the groups of a plan."""
    weights = [("policy", shape.parameters.total * sizes["engine_width"])] * config.generates
    weights += [
        (f"[engines.{group.name}]", group.engine.weights * group.gpus)
        for group in groups
        if group.engine is not None and not group.in_fleet
    ]
    notes = [loading_note(config, name, num_bytes) for name, num_bytes in weights]
    return [note for note in notes if note]
