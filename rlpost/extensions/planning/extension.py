"""The row of estimates and plans."""

from rlpost.config.extensions import Extension, Verb

EXTENSION = Extension(
    name="planning",
    notes="rlpost.extensions.planning.check_lines:notes",
    arithmetic="rlpost.extensions.planning.check_lines:arithmetic",
    rank_memory="rlpost.extensions.planning.check_lines:rank_memory",
    verbs={
        "plan": Verb(
            "rlpost.extensions.planning.plan_verb:main",
            "memory, nodes and disks that a recipe needs (--suggest: better layouts)",
            takes_settings=True,
            after="check",
        )
    },
    moved={
        "rlpost.cli.plan": "rlpost.extensions.planning.plan_verb",
        **{
            f"rlpost.config.plan.{name}": f"rlpost.extensions.planning.{name}"
            for name in (
                "activations",
                "adapters",
                "engine_memory",
                "estimate",
                "nccl_memory",
                "planned_slices",
                "rank_memory",
                "save_interval",
                "shortages",
                "update_weights",
            )
        },
        "rlpost.observe.earlier_runs": "rlpost.extensions.planning.earlier_runs",
    },
)
