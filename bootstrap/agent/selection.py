"""Select the hosts of the cluster from an allocation with spare or unfit hosts. Pure.

Input: hosts in order of topology, the number needed, unusable hosts with reasons. Output: the
selected hosts in rank order, or a ``BringupError`` whose verdict and ``exclude`` let the next
attempt start without the bad hosts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bootstrap.agent.rendezvous import BringupError
from bootstrap.agent.verdict import Word
from bootstrap.preflight.table import Preflight


def choose_hosts(
    hosts: Sequence[str],
    num_needed: int,
    preflight: Preflight,
    absent: Mapping[str, str],
    *,
    can_requeue: bool,
) -> tuple[str, ...]:
    """Return the first ``num_needed`` hosts, with a later fit host in the place of each bad one.

    The fit hosts keep their places, as when a spare replaces a node in the middle of a run. Moving
    them up instead would shift every later rank, and groups of ranks across blocks.

    The head runs the driver, and all nodes connect to its address, so an attempt cannot replace it.

    Args:
        absent: hosts that did not join or were lost, each with the reason.
        can_requeue: false outside Slurm, where nothing restarts the attempt on other hosts.

    Raises:
        BringupError: no host can run the job (verdict config), or too few hosts are fit (verdict
            requeue, with the unfit hosts excluded).
    """
    if preflight.fatal is not None:
        raise BringupError(preflight.fatal, verdict="config")
    bad = {**preflight.unfit, **absent}
    fit = tuple(host for host in hosts if host not in bad)
    if hosts[0] not in bad and len(fit) >= num_needed:
        spares = iter([host for host in hosts[num_needed:] if host not in bad])
        return tuple(next(spares) if host in bad else host for host in hosts[:num_needed])
    verdict: Word = "requeue" if can_requeue else "failed"
    listed = "\n".join(f"{host}: {reason}" for host, reason in bad.items())
    cause = f"{len(fit)} of {len(hosts)} nodes are fit, {num_needed} are needed (the head among them):\n{listed}"
    raise BringupError(cause, verdict=verdict, exclude=tuple(bad))
