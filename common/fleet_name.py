"""Name of a fleet's folder in the run folder. Python 3.6 and later, because batch hosts use it."""

from typing import Sequence

POLICY = "policy"
"""The group of the engines that generate answers, beside the groups that a recipe names."""
GROUP = "--group"
"""Option of an engine's agent with the name of its group; without it, the group is the policy's."""


def fleet_name(group: str) -> str:
    """Return the name of the folder of a group's fleet.

    >>> fleet_name("policy"), fleet_name("judge")
    ('fleet', 'fleet-judge')
    """
    return "fleet" if group == POLICY else "fleet-" + group


def group_of(words: Sequence[str]) -> str:
    """Return the group among the arguments of an engine's agent.

    >>> group_of(["--num-gpus", "2"]), group_of(["--num-gpus", "2", "--group", "judge"])
    ('policy', 'judge')
    """
    return words[words.index(GROUP) + 1] if GROUP in words else POLICY
