"""The row of engines in other Slurm jobs, which join a run and leave it."""

from rlpost.config.extensions import Extension, Verb

_CHECKS = "rlpost.extensions.fleet.fleet_checks"

EXTENSION = Extension(
    name="fleet",
    tables={"fleet": "rlpost.extensions.fleet.fleet_table:FleetConfig"},
    checks=(f"{_CHECKS}:fleet_problems", f"{_CHECKS}:group_problems"),
    model_checks=(f"{_CHECKS}:fleet_model_problems",),
    verbs={
        "fleet": Verb(
            "rlpost.extensions.fleet.fleet_verb:main",
            "engines that join a run on preemptible jobs (--engines, --scale, --drain, --stop)",
            after="cancel",
        )
    },
    job="rlpost.extensions.fleet.job_part:FLEET_JOBS",
    joining_engines="rlpost.extensions.fleet.fleet_sync:fleet_engines",
    engine_agent="rlpost.extensions.fleet.agent:main",
    moved={
        "rlpost.cli.fleet": "rlpost.extensions.fleet.fleet_verb",
        **{
            f"rlpost.cli.{name}": f"rlpost.extensions.fleet.{name}"
            for name in ("fleet_jobs", "fleet_view")
        },
        "rlpost.config.checks.fleet": "rlpost.extensions.fleet.fleet_checks",
        "rlpost.config.groups.fleet": "rlpost.extensions.fleet.fleet_table",
        "rlpost.driver.fleet": "rlpost.extensions.fleet",
        "rlpost.engines.fleet": "rlpost.extensions.fleet",
    },
)
