"""Engine jobs that are submitted with a run, and end with it (``rlpost.config.extensions.JobPart``).

Imports ``fleet_jobs`` on demand: jobs are rendered where only pydantic is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from common.fleet_name import POLICY
from common.run_folder import RunFolder
from common.units import counted
from rlpost.config.engine_groups import group_config
from rlpost.config.extensions import JobPart
from rlpost.config.tree import Config
from rlpost.errors import ConfigError
from rlpost.extensions.fleet.fleet_checks import engine_jobs, engine_size_problem
from slurm.client import is_available
from slurm.errors import SlurmError, UnknownJobError


class FleetJobs(JobPart):
    """The engine jobs of [fleet] and of groups with ``fleet = true``."""

    def problems(self, config: Config, why: str) -> list[str]:
        """Refuse engine jobs, which are jobs of Slurm."""
        lines = []
        for group, number in engine_jobs(config).items():
            asked, remedy = f"[engines.{group}] fleet = true", "engines of the run's own job"
            if group == POLICY:
                asked, remedy = f"--engines {number}", "--engines 0 --min-engines 0"
            lines.append(
                f"{asked}: {why}, so the run has no fleet; use {remedy}, or submit where there is Slurm"
            )
        return lines

    def check(self, config: Config, run: RunFolder) -> None:
        """See ``fleet_spec``; the checks of settings report engines of a wrong size."""
        from rlpost.extensions.fleet.fleet_jobs import engine_settings, fleet_spec

        for group, number in _missing(config, run).items():
            if engine_size_problem(group_config(config, group)) is None:
                fleet_spec(run, engine_settings(config), number, group=group)

    def planned(self, config: Config, run: RunFolder) -> list[str]:
        """Return a line for each array of engine jobs."""
        return [_words(group, number) for group, number in _missing(config, run).items()]

    def submit_optional(self, config: Config, run: RunFolder, job_id: str) -> None:
        """Submit the engine jobs, which start after the run's job."""
        from rlpost.extensions.fleet.fleet_folder import FleetFolder

        try:
            missing = _missing(config, run)
        except (SlurmError, OSError, ConfigError) as error:
            print(
                f"note: the engine jobs were not submitted: {error}; {FleetFolder(run.root).command} "
                "submits N of them",
                file=sys.stderr,
            )
            return
        for group, number in missing.items():
            _submit(config, run, group, number, after=job_id)

    def cancel(self, run: RunFolder) -> None:
        """Order all engines to stop: a task that is requeued then exits without a cancellation."""
        from rlpost.extensions.fleet.fleet_jobs import fleet_folders

        for folder in fleet_folders(run):
            folder.order(stop=True)


FLEET_JOBS = FleetJobs()


def _missing(config: Config, run: RunFolder) -> Mapping[str, int]:
    """Engine jobs to submit, by group: those asked for, less those that a resumed run still has."""
    asked = engine_jobs(config)
    has_engines = asked and any(entry.get("event") == "fleet" for entry in run.ledger.read())
    if not has_engines or not is_available():
        return asked
    from rlpost.extensions.fleet.fleet_jobs import fleet_views

    missing = {
        group: number - sum(one.stays for one in fleet_views(run, group))
        for group, number in asked.items()
    }
    return {group: number for group, number in missing.items() if number > 0}


def _submit(config: Config, run: RunFolder, group: str, number: int, *, after: str) -> None:
    """Submit the engine jobs. The run is submitted already, so a failure does not end it."""
    from rlpost.extensions.fleet.fleet_folder import FleetFolder
    from rlpost.extensions.fleet.fleet_jobs import engine_settings, fleet_spec, submit_engines

    words = _words(group, number)
    try:
        spec = fleet_spec(run, engine_settings(config), number, group=group, after=after)
        print(f"submitted {submit_engines(spec, run)}: {words}")
    except UnknownJobError as error:  # neither submitted nor not
        print(f"note: {words}: {error}", file=sys.stderr)
    except (SlurmError, OSError) as error:
        command = FleetFolder(run.root, group).command.removesuffix("N")
        print(
            f"note: {words} were not submitted: {error}; {command}{number} tries again",
            file=sys.stderr,
        )


def _words(group: str, number: int) -> str:
    of_group = "its fleet" if group == POLICY else f"[engines.{group}]"
    return f"{counted(number, 'engine job')} of {of_group}"
