"""Report of a hang: which ranks are to blame, and the files that show why.

Input: a call that hangs, and ranks that answer queries during it. Output: ``Hang`` with the ranks to
blame, which ``rlpost.observe.progress.odd_rank`` determines. The stacks of all ranks are in
``hang.txt`` of the attempt's folder, and torch's record of collectives in ``flight-RANK.json`` where
torch keeps one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from common.units import first_names
from rlpost.driver.worker_groups import Actor, ActorGroup, remote
from rlpost.durable.daemon_threads import in_daemon
from rlpost.errors import Hang
from rlpost.observe.progress.odd_rank import OddRanks, compare, describe
from rlpost.observe.progress.overdue import OverdueRule
from rlpost.observe.progress.position import Position

logger = logging.getLogger(__name__)

ANSWER_S, WRITE_S = 5.0, 10.0
"""Deadlines for the answer of a rank, and for writing the files."""
HANG_FILE = "hang.txt"


class Overdue(Exception):
    """A call hangs: its name, seconds, those of the longest earlier call, where each rank is."""

    def __init__(
        self, call: str, elapsed_s: float, longest_s: float, positions: Sequence[Position | None]
    ) -> None:
        super().__init__(call)
        self.call, self.elapsed_s, self.longest_s = call, elapsed_s, longest_s
        self.positions = positions


class HangReport:
    """Writes the files of a hang of one group of ranks."""

    def __init__(self, folder: Path, *, hosts: Mapping[str, str]) -> None:
        """``hosts`` are by address."""
        self._folder, self._hosts = folder, hosts

    async def write(self, overdue: Overdue, rule: OverdueRule, ranks: ActorGroup) -> Hang:
        """Write stacks and records of collectives; return the error."""
        positions = overdue.positions
        finding, names = compare(positions), [self._name(name) for name in ranks.workers.names]
        for name, position in zip(names, positions, strict=True):
            logger.error("%s hangs: %s: %s", overdue.call, name, describe(position))
        path = self._folder / HANG_FILE
        await self._write(path, stacks_text(overdue.call, names, positions, finding))
        write = remote(Actor.write_flight_record, str(self._folder))
        for record in await ranks.answers(write, within_s=ANSWER_S):
            if record is not None:
                logger.error("record of collectives: %s", record)
        blamed = [names[rank] for rank in finding.ranks]
        hosts = sorted({self._host(ranks.workers.names[rank]) for rank in finding.ranks})
        details = {
            "call": overdue.call,
            "role": "trainer",
            "ranks": list(finding.ranks),
            "hosts": hosts,
            "why": finding.why,
            "seconds": round(overdue.elapsed_s, 1),
            "stacks": str(path),
        }
        return Hang(_message(overdue, rule, blamed, finding, path), details)

    async def _write(self, path: Path, text: str) -> None:
        """Write the stacks; storage that fails or hangs does not hide the hang."""
        try:
            async with asyncio.timeout(WRITE_S):
                await in_daemon(partial(path.write_text, text))
        except OSError as error:  # TimeoutError is one
            logger.error("the stacks were not written to %s: %s", path, error or "storage hangs")

    def _host(self, name: str) -> str:
        address = name.rpartition(" on ")[2]
        return self._hosts.get(address, address)

    def _name(self, name: str) -> str:
        own, _, address = name.rpartition(" on ")
        return f"{own} on {self._hosts.get(address, address)}"


def _message(
    overdue: Overdue, rule: OverdueRule, blamed: Sequence[str], finding: OddRanks, path: Path
) -> str:
    positions = overdue.positions
    text = f"{overdue.call} hangs"
    if blamed:
        text += f" because of {first_names(blamed)}"
    text += f": {finding.why}"
    first = finding.ranks[0] if finding.ranks else 0
    text += f" (rank {first}: {describe(positions[first])}"
    other = next((rank for rank in range(len(positions)) if rank not in finding.ranks), None)
    if finding.ranks and other is not None:
        text += f"; rank {other}: {describe(positions[other])}"
    return (
        f"{text}). It runs for {overdue.elapsed_s:.0f} s and no rank moves; the longest of the "
        f"last calls took {overdue.longest_s:.1f} s (--hang-factor {rule.factor:g}, --hang-min-s "
        f"{rule.min_s:g}). Stacks of all ranks: {path}; see docs/troubleshooting.md"
    )


def stacks_text(
    call: str, names: Sequence[str], positions: Sequence[Position | None], finding: OddRanks
) -> str:
    """Return the text of HANG_FILE: the finding, then counts and stack of every rank. Pure."""
    blamed = ", ".join(names[rank] for rank in finding.ranks) or "no rank"
    lines = [f"{call} hangs because of {blamed}: {finding.why}"]
    for name, position in zip(names, positions, strict=True):
        lines += ["", f"{name}: {describe(position)}"]
        if position is not None:
            lines += [f"  {one.entered} collectives of {one}" for one in position.groups]
            lines += [f"  {frame}" for frame in position.stack]
    return "\n".join(lines) + "\n"
