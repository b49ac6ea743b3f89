"""The table [observe] of a recipe."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from rlpost.config.groups.base import FilePath, Group, Positive


def _steps(given: str) -> str:
    found = re.fullmatch(r"(\d+)(?::(\d+))?", given)
    if found is None or int(found[1]) < 1 or int(found[2] or found[1]) < int(found[1]):
        raise ValueError("write FIRST:LAST, two steps from 1 on, or one step")
    return given


Steps = Annotated[str, AfterValidator(_steps)]


class ObserveConfig(Group):
    """Ways to look at a run beside metrics.jsonl (docs/seeing.md)."""

    use_tensorboard: bool = False
    """Write the metrics of each step for TensorBoard, too; the driver's node needs the package tensorboard."""
    tensorboard_dir: FilePath | None = None
    """Folder for that; RUN/tensorboard unless given."""
    use_prometheus: bool = False
    """Serve the newest metrics to Prometheus from the driver's node; whoever asks shows the attempt's token."""
    prometheus_host: str = "127.0.0.1"
    """Address to serve them at, for sites whose Prometheus is on another machine."""
    prometheus_port: Annotated[int, Field(gt=0, lt=65536)] | None = None
    """Port for that; the last of the job's own block unless given. The driver's log says which."""
    trace_steps: Steps | None = None
    """FIRST:LAST, both included: write what driver, actors and engines did in these steps to RUN/traces, to be opened
    with Perfetto."""
    profile: bool = False
    """Record the operators of the trainer with torch's profiler, to RUN/traces."""
    profile_step_start: Positive = 10
    """The first step that is profiled."""
    profile_step_end: Positive = 12
    """The step before which it ends."""
    profile_ranks: tuple[Annotated[int, Field(ge=0)], ...] = (0,)
    """Ranks of the trainer that are profiled."""
    record_memory_history: bool = False
    """Record every allocation of GPU memory in those steps on those ranks, to RUN/traces, for pytorch.org/memory_viz;
    CUDA only."""

    @property
    def traced(self) -> range:
        """The steps of ``trace_steps``."""
        first, _, last = (self.trace_steps or "1:0").partition(":")
        return range(int(first), int(last or first) + 1)

    @property
    def profiled(self) -> range:
        """The steps that are profiled, or whose allocations are recorded."""
        wanted = self.profile or self.record_memory_history
        return range(self.profile_step_start, self.profile_step_end) if wanted else range(0)
