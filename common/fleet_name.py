"""Where a run has a fleet: its folder, its lines of the ledger. Python 3.6, for batch hosts."""

from typing import List, Sequence

from common.ledger import Entry

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


def last_served(entries: Sequence[Entry]) -> List[Entry]:
    """The newest ``fleet`` line of each attempt and group, which replaces those before it."""
    last = {
        (str(entry.get("attempt")), entry.get("group")): entry
        for entry in entries
        if entry.get("event") == "fleet" and "used" in entry
    }
    return list(last.values())
