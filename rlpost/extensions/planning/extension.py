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
)
