"""The result of a rehearsal: checks, memory by rank and phase, and the first fault. Pure.

Input: recordings of all ranks. Output: rows for a table, bars for a terminal, and one object
for programs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from common.units import counted
from rlpost.config.extensions import RankEstimate
from rlpost.config.plan.cards import RESERVE
from rlpost.extensions.rehearsal.all_ranks.distributed_calls import TRAIN, UPDATE, Recording

BAR = 40


@dataclass(frozen=True, slots=True)
class RehearsalCheck:
    """One question and its answer.

    Attributes:
        name: the question.
        faults: one line each; empty when there is none.
        extent: what was compared.
    """

    name: str
    faults: tuple[str, ...]
    extent: str


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of one rank on its GPU.

    Attributes:
        rank: the rank.
        held: bytes that stay between phases, by part, without what is in host memory.
        peaks: the largest sum of each phase, ``held`` included.
    """

    rank: int
    held: Mapping[str, int]
    peaks: Mapping[str, int]

    @property
    def highest(self) -> int:
        """The largest peak."""
        return max(self.peaks.values())


@dataclass(frozen=True, slots=True)
class Compared:
    """Bytes of one part of a rank as ``rlpost plan`` estimates them, and as rehearsed."""

    name: str
    planned: int
    rehearsed: int

    @property
    def columns(self) -> str:
        """Three columns: planner, rehearsal, difference relative to the rehearsal."""
        share = (self.planned - self.rehearsed) / self.rehearsed if self.rehearsed else 0.0
        return f"{gb(self.planned):>12}{gb(self.rehearsed):>12}{share:>+12.1%}"


@dataclass(frozen=True, slots=True)
class RehearsalResult:
    """The result of a rehearsal.

    Attributes:
        checks: in the order in which a run would meet the faults.
        memory: of every rank, in order.
        classes: ranks that do the same.
        ran: the ranks that ran; the others are in a class with two of them.
        num_calls: collectives and transfers of all ranks.
        micro_batches: rehearsed ones, and those of a step.
        gpu_bytes: memory of a GPU.
        planned_bytes: the estimate of ``rlpost plan`` for the fullest rank while it trains.
        compared: the parts of the fullest rank while it trains, with those of the planner for the
            layers that a rehearsal has, without TransformerEngine.
        seconds: that it took.
        peak_host_bytes: largest resident memory of the rehearsal itself.
    """

    checks: tuple[RehearsalCheck, ...]
    memory: tuple[MemoryUse, ...]
    classes: tuple[tuple[int, ...], ...]
    ran: tuple[int, ...]
    num_calls: int
    micro_batches: tuple[int, int]
    gpu_bytes: int
    planned_bytes: int
    compared: tuple[Compared, ...]
    seconds: float
    peak_host_bytes: int

    @property
    def first_fault(self) -> str | None:
        """The first fault in the order of the checks; None when there is none."""
        return next((one.faults[0] for one in self.checks if one.faults), None)


def memory_use(recording: Recording, *, offloaded_fraction: float) -> MemoryUse:
    """Bytes of a rank, without the part of the optimizer that is in host memory.

    In a recording all of the optimizer is on the device; a run keeps ``offloaded_fraction`` of it in
    host memory.
    """
    held, away = dict(recording.held), 0
    for part in ("optimizer", "critic optimizer"):
        if part in held:
            in_host_memory = round(held[part] * offloaded_fraction)
            held[part] -= in_host_memory
            away += in_host_memory
    # its optimizer left the device before the weights were sent
    without = {UPDATE} if recording.offload is not None else set()
    peaks = {
        phase: max(0, peak - (0 if phase in without else away))
        for phase, peak in recording.peaks.items()
        if phase != "build"
    }
    return MemoryUse(recording.rank, held, peaks)


def offload_check(recordings: Iterable[Recording]) -> RehearsalCheck:
    """Whether all bytes of a rank leave its GPU and return to where they were."""
    faults, largest = [], 0
    for one in recordings:
        if one.offload is None:
            continue
        faults += [f"rank {one.rank}: {fault}" for fault in one.offload.faults]
        if one.offload.returning != one.offload.leaving:
            leaving, returning = dict(one.offload.leaving), dict(one.offload.returning)
            faults.append(f"rank {one.rank}: {leaving} bytes leave its GPU, {returning} return")
        largest = max(largest, sum(one.offload.leaving.values()))
    extent = f"at most {gb(largest)} of a rank leave and return"
    return RehearsalCheck("offload while engines generate, and onload", tuple(faults), extent)


def memory_check(memory: Sequence[MemoryUse], gpu_bytes: int, *, context: int) -> RehearsalCheck:
    """Whether each rank has enough memory in each phase.

    As in ``rlpost plan``, CUDA and NCCL take ``context`` bytes, and sums may fill a part of the GPU.
    """
    limit = round(gpu_bytes * RESERVE) - context
    faults = []
    for one in memory:
        phase = max(one.peaks, key=lambda name: one.peaks[name])
        if one.peaks[phase] > limit:
            faults.append(
                f"rank {one.rank}: {phase} takes {gb(one.peaks[phase])}, and {gb(limit)} of a GPU of "
                f"{gb(gpu_bytes)} are free for it"
            )
    extent = counted(len(memory), "rank")
    return RehearsalCheck("peak memory of each rank", tuple(faults), extent)


def fullest(result: RehearsalResult) -> MemoryUse:
    """The rank with the highest peak."""
    return max(result.memory, key=lambda one: one.highest)


def compared_parts(
    memory: Sequence[MemoryUse], ranks: Sequence[RankEstimate]
) -> tuple[Compared, ...]:
    """Compare the rank that is fullest while it trains with the planner's of its stage.

    Args:
        memory: of all ranks, in order; those of a pipeline stage are adjacent.
        ranks: the planner's, one for each stage.
    """
    most = max(memory, key=lambda one: one.peaks[TRAIN])
    planned = ranks[most.rank * len(ranks) // len(memory)]
    critic_bytes = sum(size for part, size in most.held.items() if part.startswith("critic"))
    passing = most.peaks[TRAIN] - sum(most.held.values())
    rehearsed = {name: most.held[name] for name in ("weights", "gradients", "optimizer")}
    if critic_bytes:
        rehearsed["critic"] = critic_bytes
    rehearsed["activations, logits"] = passing
    parts = [Compared(name, planned.parts.get(name, 0), size) for name, size in rehearsed.items()]
    whole = Compared("all while training", planned.total - planned.context, most.peaks[TRAIN])
    return (*parts, whole)


def bars(result: RehearsalResult) -> list[str]:
    """One line for each class and phase, as long as its part of a GPU."""
    lines = []
    by_rank = {one.rank: one for one in result.memory}
    for members in result.classes:
        fullest = max((by_rank[rank] for rank in members), key=lambda one: one.highest)
        lines.append(f"ranks {shortened(members)}")
        for phase, peak in fullest.peaks.items():
            filled = min(BAR, round(BAR * peak / result.gpu_bytes))
            over = ">" if peak > result.gpu_bytes else "|"
            bar = "█" * filled + " " * (BAR - filled) + over
            lines.append(f"  {phase:<14}{bar} {gb(peak)} of {gb(result.gpu_bytes)}")
    return lines


def as_object(result: RehearsalResult) -> dict[str, object]:
    """The result for programs; sizes in bytes."""
    return {
        "passed": result.first_fault is None,
        "first_fault": result.first_fault,
        "checks": [asdict(one) for one in result.checks],
        "memory": [asdict(one) for one in result.memory],
        "classes": [list(members) for members in result.classes],
        "ran": list(result.ran),
        "num_calls": result.num_calls,
        "micro_batches": {
            "rehearsed": result.micro_batches[0],
            "of_a_step": result.micro_batches[1],
        },
        "gpu_bytes": result.gpu_bytes,
        "planned_bytes": result.planned_bytes,
        "compared": [
            {"part": one.name, "planned": one.planned, "rehearsed": one.rehearsed}
            for one in result.compared
        ],
        "seconds": result.seconds,
        "peak_host_bytes": result.peak_host_bytes,
    }


def shortened(ranks: Sequence[int]) -> str:
    """``0, 1, 2 ... 15 (16)``."""
    if len(ranks) <= 4:
        return ", ".join(map(str, ranks))
    return f"{ranks[0]}, {ranks[1]} ... {ranks[-1]} ({len(ranks)})"


def gb(size: float) -> str:
    """Bytes as GB."""
    return f"{size / 1e9:.1f} GB"
