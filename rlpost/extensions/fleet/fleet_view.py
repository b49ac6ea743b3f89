"""Combine what Slurm, the agent and the driver report of each engine of a fleet. Pure.

Input: queue entries, records of the fleet's files, the ledger. Output: one view for each engine,
and a table.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.fleet_name import last_served
from common.ledger import Entry
from rlpost.cli.terminal import aligned
from rlpost.extensions.fleet.records import EngineRecord, EngineState, Lease, Orders
from slurm.arrays import job_and_task
from slurm.job_id import number_of
from slurm.queue import QueueEntry
from slurm.states import JobState

HEADINGS = ("engine", "job", "agent", "driver", "host", "served")


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine.

    Attributes:
        job_id: for Slurm's commands: the engine's name, with its cluster.
        job_state: Slurm's state of the job; None for an engine that no job of the ledger started.
        agent: the last report of its agent; empty before the agent has started.
        driver: how the driver uses it; empty if the driver does not know the engine.
        served_s: seconds in which it served, up to the driver's last line in the ledger.
        stays: whether it counts for --scale: its job has not ended and nothing orders it to leave.
    """

    engine: str
    job_id: str
    job_state: JobState | None
    agent: str = ""
    driver: str = ""
    host: str = ""
    served_s: float = 0.0
    stays: bool = True


def used_of(ledger: Sequence[Entry]) -> dict[str, float]:
    """Return the seconds in which each engine served, summed over the attempts."""
    total: dict[str, float] = defaultdict(float)
    for entry in last_served(ledger):
        for engine, seconds in entry["used"].items():
            total[engine] += float(seconds)
    return dict(total)


def views(
    jobs: Mapping[str, QueueEntry],
    records: Sequence[EngineRecord],
    lease: Lease | None,
    orders: Orders,
    ledger: Sequence[Mapping[str, object]],
) -> list[EngineView]:
    """Return a view of every engine whose job has not ended, or that has a file."""
    used, by_name = used_of(ledger), {record.engine: record for record in records}
    by_engine = {number_of(job): entry for job, entry in jobs.items()}
    waiting = [name for name, entry in by_engine.items() if not entry.is_over]
    engine_views = []
    for engine in sorted({*by_name, *waiting}, key=_in_order):
        record, job = by_name.get(engine), by_engine.get(engine)
        has_ended = job is not None and job.is_over
        # The record of an engine that was preempted says "gone" until its job runs again.
        is_gone = job is None and record is not None and record.state is EngineState.GONE
        engine_views.append(
            EngineView(
                engine=engine,
                job_id=engine if job is None else job.job_id,
                job_state=None if job is None else job.state,
                agent=_agent(record),
                driver="" if lease is None or has_ended else lease.engines.get(engine, ""),
                host="" if record is None else record.host,
                served_s=used.get(engine, 0.0),
                stays=not (has_ended or is_gone or orders.says_leave(engine)),
            )
        )
    return engine_views


def surplus(staying: Sequence[EngineView], number: int) -> list[str]:
    """Return the engines to drain so that ``number`` stay: first those that serve least."""

    def worth(one: EngineView) -> tuple[bool, bool, float]:
        is_serving = one.driver.startswith("serves")
        return is_serving, one.job_state is not JobState.PENDING, one.served_s

    by_worth = sorted(reversed(staying), key=worth)
    return [one.engine for one in by_worth[: max(0, len(staying) - number)]]


def table(
    found: Sequence[EngineView],
    lease: Lease | None,
    title: str = "",
    command: str = "rlpost fleet RUN --engines N",
) -> str:
    """Return the engines as text, with a line about the driver; ``command`` submits some."""
    titles = [title] if title else []
    if not found:
        return "\n".join([*titles, f"no engine of a fleet; {command} submits some"])
    lines = aligned([HEADINGS, *map(_row, found)], None)
    return "\n".join([*titles, *lines, "", _driver(lease)])


def _row(one: EngineView) -> tuple[str, ...]:
    state = "-" if one.job_state is None else str(one.job_state)
    served = f"{one.served_s / 3600:.2f} h" if one.served_s else "-"
    return (one.engine, state, one.agent or "-", one.driver or "-", one.host or "-", served)


def _agent(record: EngineRecord | None) -> str:
    if record is None:
        return ""
    return f"{record.state}: {record.reason}" if record.reason else str(record.state)


def _driver(lease: Lease | None) -> str:
    if lease is None:
        return "driver: none has asked for engines yet; the run may wait in the queue"
    version = "no weights yet" if lease.version is None else f"version {lease.version}"
    return f"driver: attempt {lease.attempt} on {lease.host or 'an unknown host'}, {version}"


def _in_order(engine: str) -> tuple[int, int, str]:
    found = job_and_task(engine)
    return (int(found[0]), found[1], "") if found else (-1, 0, engine)
