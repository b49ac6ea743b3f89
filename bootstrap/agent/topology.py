"""Order the hosts of an allocation by the network's topology. Pure.

Input: hosts in rank order and the switches or the block above each, from SLURM_TOPOLOGY_ADDR. Output:
the hosts in an order in which those below one switch, or in one block, are neighbours. Ranks fill
nodes in this order, so tensor and expert groups cross a block only where they must.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Levels = tuple[str, ...]
"""Names of the levels above a host, the outermost first: ``("s0", "s1")``, or ``("block1",)``."""


def topology_path(environ: Mapping[str, str]) -> Levels:
    """Levels above this host; empty where Slurm has no topology (man srun, SLURM_TOPOLOGY_ADDR).

    The address ends in the host's name, and its pattern (``switch.switch.node``) says how many
    levels come before it, because a host name may contain dots.
    """
    levels = environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").count(".")
    return tuple(environ.get("SLURM_TOPOLOGY_ADDR", "").split(".", levels)[:levels])


def by_topology(hosts: Sequence[str], paths: Mapping[str, Levels]) -> tuple[str, ...]:
    """Order hosts so that those with a common prefix of their paths are neighbours.

    The first host stays first, because the head cannot be replaced. Prefixes follow each other as
    in ``hosts``, and so do hosts of equal path. A host without a path has not joined: it is taken
    to be beside its predecessor in ``hosts``, where a spare then takes its place.
    """
    first_with: dict[Levels, int] = {(): 0}
    assumed: dict[str, Levels] = {}
    path: Levels = ()
    for index, host in enumerate(hosts):
        path = assumed[host] = paths.get(host) or path
        for level in range(1, len(path) + 1):
            first_with.setdefault(path[:level], index)

    def position(host: str) -> tuple[int, ...]:
        if host == hosts[0]:
            return (-1,)
        path = assumed[host]
        return tuple(first_with[path[:level]] for level in range(len(path) + 1))

    return tuple(sorted(hosts, key=position))
