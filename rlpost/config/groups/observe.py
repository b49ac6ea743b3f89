"""The table [observe] of a recipe."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from rlpost.config.groups.base import FilePath, Group, Positive


def _steps(given: str) -> str:
    found = re.fullmatch(r"(\d+)(?::(\d+))?", given)
    if found is None or int(found[1]) < 1 or int(found[2] or found[1]) < int(found[1]):
        raise ValueError("write FIRST:LAST, two steps of at least 1, or one step")
    return given


Steps = Annotated[str, AfterValidator(_steps)]


class ObserveConfig(Group):
    """Monitoring and profiling beyond metrics.jsonl (docs/seeing.md)."""

    log_format: Literal["text", "json"] | None = None
    """Format of the logs of agents, driver, actors and servers: text with date and time, or one JSON
    object per line (time, level, logger, source, message). Default: text."""
    use_tensorboard: bool = False
    """Also write the metrics of each step for TensorBoard; the driver's node needs the package
    tensorboard."""
    tensorboard_dir: FilePath | None = None
    """Folder for the TensorBoard events of several runs; each has the subfolder NAME-ID. Default:
    RUN/tensorboard."""
    use_prometheus: bool = False
    """Serve the latest metrics to Prometheus from the driver's node; requests need the attempt's
    token."""
    prometheus_host: str = "127.0.0.1"
    """Address to bind, for sites whose Prometheus runs on another machine."""
    prometheus_port: Annotated[int, Field(gt=0, lt=65536)] | None = None
    """Port to bind. Default: the last port of the job's block; the driver logs it."""
    trace_steps: Steps | None = None
    """FIRST:LAST, inclusive: trace driver, actors and engines in these steps and write RUN/traces,
    for Perfetto."""
    profile: bool = False
    """Profile the trainer's operators with torch.profiler and write RUN/traces."""
    profile_step_start: Positive = 10
    """First step to profile."""
    profile_step_end: Positive = 12
    """Step before which profiling stops."""
    profile_ranks: tuple[Annotated[int, Field(ge=0)], ...] = (0,)
    """Trainer ranks to profile."""
    record_memory_history: bool = False
    """Record every GPU memory allocation in those steps on those ranks and write RUN/traces, for
    pytorch.org/memory_viz. CUDA only."""

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
