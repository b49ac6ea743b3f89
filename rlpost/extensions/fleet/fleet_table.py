"""The table [fleet] of a recipe."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from rlpost.config.groups.base import Group, Positive, PositiveNumber


class FleetConfig(Group):
    """Engines on separate jobs, which join the run and may leave at any time (docs/fleet.md)."""

    idle_in_process: ClassVar[str | None] = "there is one engine"

    engines: Annotated[int, Field(ge=0)] = 0
    """Engine jobs that `rlpost submit` submits together with the run; they start once the run's job
    has started. `rlpost fleet RUN` adds and removes engines later."""
    min_engines: Annotated[int, Field(ge=0)] = 0
    """A step waits while fewer engines serve, those of the run's own job included."""
    engine_wait_s: PositiveNumber = 3600.0
    """Longest wait for --min-engines in seconds; then the attempt fails."""
    engine_partition: str | None = None
    """Slurm partition of the engine jobs. Default: that of the run; the same holds for the
    following."""
    engine_account: str | None = None
    """Slurm account of the engine jobs."""
    engine_qos: str | None = None
    """Slurm quality of service of the engine jobs."""
    engine_reservation: str | None = None
    """Slurm reservation of the engine jobs."""
    engine_constraint: str | None = None
    """Node features that the engine jobs require."""
    engine_gpu_type: str | None = None
    """Type of the GPUs of the engine jobs."""
    engine_sbatch: tuple[str, ...] | None = None
    """Further options of sbatch for the engine jobs. Default: those of the run, but for its requests
    for GPUs and its --dependency."""
    engine_time: str | None = None
    """Time limit of the engine jobs, in Slurm's --time syntax."""
    engine_lost_after_s: Annotated[float, Field(ge=10.0)] = 30.0
    """Seconds without a sign of life after which an engine of the fleet is lost; its agent writes
    one every 2 s."""
    pulls_at_once: Positive = 4
    """Engines of the fleet that read weights at the same time."""
    pull_gb_per_s: PositiveNumber | None = None
    """Bound on the mean rate in GB/s at which all engines of the fleet together read weights:
    an engine begins when those before it would be done at this rate. Default: no bound."""

    @property
    def joining_engines(self) -> int:
        """See ``Group``."""
        return self.engines
