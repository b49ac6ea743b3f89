"""Seconds that a death costs by role: with a new attempt, and with recovery within the attempt.

    python -m benchmarks.crash --by-role --kills 25 [--roles trainer driver node]
    [--modes sync fully_async] [--before-kills 2] [--seed 1] [--write]

    python -m benchmarks.crash --by-role --local ...

On a real Slurm (the tests' lab, root needed), or with --local without one and without new attempts,
as ``benchmarks.crash``: for each mode and role, runs whose processes of that role are killed by KILL
at random instants of their work. *Seconds lost* is the time between the two metrics lines around the
kill, less the median of this time without a kill. Synchronous runs must end with the weights, metrics
and prompts of an undisturbed one. In the asynchronous mode timing decides which weights generate a
group, so only the prompts are compared.

The node that loses its power has one of two trainer ranks. A run loses as many nodes as it has
spares; then another run begins.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.crashed_run import DEADLINE_S, CrashedRun, wait_for
from benchmarks.kills import (
    Kill,
    bring_back_if_lost,
    crash_lab,
    differences,
    finish,
    repeated,
    strike,
)
from benchmarks.page import machine, show, table
from tests.cluster.lab import REPOSITORY, Lab
from tests.cluster.lab_config import LabOptions, node_names

HEADING = "## Recovery by role"
POLL_S = 0.05
STEPS_BETWEEN, SPARE_STEPS, LONGEST_WAIT_S = 3, 6, 3.0
PLACES = {"trainer": "actor", "driver": "driver"}
SPARES = 3  # nodes that a run can lose
ON_TWO_NODES = (
    *("--nodes", "2", "--actor-num-nodes", "2", "--actor-num-gpus-per-node", "1"),
    *("--rollout-num-gpus", "2", "--num-gpus-per-node", "2"),
)
NO_LIMIT = ("--max-trainer-recoveries", "1000")
SETTINGS = {"node": ON_TWO_NODES}
"""Settings of a role's runs, the undisturbed one included."""
OFF = {
    "trainer": ("--max-trainer-recoveries", "0"),
    "driver": ("--max-driver-restarts", "0"),
    "node": ("--spare-nodes", "0"),
}
"""Settings with which the death of a role ends the attempt."""
ON = {
    "trainer": {
        "new processes": (*NO_LIMIT, "--trainer-standby", "false"),
        "standbys": (*NO_LIMIT, "--trainer-standby", "true"),
    },
    "driver": {"new driver": ("--max-driver-restarts", "1000")},
    "node": {"spare": (*NO_LIMIT, "--spare-nodes", str(SPARES))},
}
"""Kinds of recovery within the attempt, by role."""
MODES = {
    "sync": (),
    "fully_async": ("--rollout-mode", "fully_async", "--max-staleness", "8"),
}
FAILURE_RATE = 0.1  # a failure every ten steps, the rate at which RobustRL states its ETTR
STEP_SECONDS = (10.0, 60.0)  # for which the ETTR is stated besides the step of these runs


class LocalRun(CrashedRun):
    """A run on this machine without Slurm: the end of its attempt is the end of the run."""

    def __init__(self, folder: Path, name: str, num_steps: int, settings: Sequence[str]) -> None:
        place: Any = SimpleNamespace(shared=folder)  # of a lab only the folder is used
        super().__init__(place, name, num_steps, settings=settings)

    def _submit(self, *more: str) -> str:
        own = [word for word in self.flags(*more) if word not in ("--partition", "batch")]
        command = [sys.executable, "-m", "rlpost.submit", *own, "--local"]
        with (self.folder.parent / f"{self.folder.name}.out").open("w") as out:
            self.process = subprocess.Popen(
                command, cwd=REPOSITORY, stdout=out, stderr=subprocess.STDOUT
            )
        return ""

    @property
    def is_over(self) -> bool:
        return self.process.poll() is not None

    @property
    def is_held(self) -> bool:
        return False

    def bring_back(self) -> None:
        raise RuntimeError(f"the attempt ended\n{self.tell()}")


class Progress:
    """When each step was first reached, and how many groups were finished by then."""

    def __init__(self, run: CrashedRun) -> None:
        self._run = run
        self.step = 0
        self.reached: dict[int, float] = {}
        self._ended = threading.Event()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Poll in a thread while the block runs."""
        thread = threading.Thread(target=self._poll, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def _poll(self) -> None:
        while not self._ended.wait(POLL_S):
            step, now = self._run.step, time.monotonic()
            for passed in range(self.step + 1, step + 1):
                self.reached[passed] = now
            self.step = max(self.step, step)


@dataclass
class Losses:
    """Costs of the kills of one kind."""

    role: str
    mode: str
    kind: str
    seconds: list[float] = field(default_factory=list)
    usual: list[float] = field(default_factory=list)  # between two lines without a kill
    attempts: int = 0  # beyond the first of each run
    in_flight: list[float] = field(default_factory=list)  # answers, from a kill to the next line
    usually_in_flight: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def row(self) -> list[str]:
        """Cells of the table."""
        cells = [self.role, self.mode, self.kind, str(len(self.seconds))]
        cells += [f"{statistics.median(self.seconds):.1f}", f"{max(self.seconds):.1f}"]
        cells += [str(self.attempts)]
        cells += [f"{_mean(self.in_flight):.1f} ({_mean(self.usually_in_flight):.1f})"]
        return [*cells, "; ".join(self.wrong) or "equal"]

    def ettr_row(self) -> list[str]:
        """Cells of the table of the effective training time ratio."""
        lost, own_step_s = statistics.fmean(self.seconds), statistics.median(self.usual)
        ratios = [ettr(lost, step_s) for step_s in (own_step_s, *STEP_SECONDS)]
        cells = [self.role, self.mode, self.kind, f"{lost:.1f}", f"{own_step_s:.1f}"]
        return [*cells, *(f"{100 * ratio:.0f} %" for ratio in ratios)]


HEADER = (
    *("role", "mode", "recovery", "kills", "seconds lost: median", "most", "new attempts"),
    *("answers in flight (usually)", "result"),
)
ETTR_HEADER = (
    *("role", "mode", "recovery", "seconds lost: mean", "seconds a step", "ETTR"),
    *(f"with steps of {seconds:g} s" for seconds in STEP_SECONDS),
)


def ettr(lost_s: float, step_s: float) -> float:
    """Return the effective training time ratio: the share of time spent on steps that count.

    A failure that costs ``lost_s`` occurs in a share FAILURE_RATE of the steps.
    """
    return step_s / (step_s + FAILURE_RATE * lost_s)


def mean_in_flight(answers: Iterable[tuple[float, float]], begin: float, end: float) -> float:
    """Return the mean number of ``answers`` in flight between ``begin`` and ``end``.

    An answer is its begin and end in seconds, on the same clock.
    """
    overlaps = (min(last, end) - max(first, begin) for first, last in answers)
    return sum(overlap for overlap in overlaps if overlap > 0) / (end - begin)


def hosts_of(ledger: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the nodes of the newest attempt, the head first."""
    hosts: list[str] = []
    for line in ledger:
        if line["event"] == "started":
            hosts = list(line["nodes"])
        elif line["event"] == "recovered" and line["role"] == "node":
            hosts = [line["replacement"] if host == line["host"] else host for host in hosts]
    return hosts


def kill_role(run: CrashedRun, role: str) -> Kill | None:
    """Kill a process of the role, or cut the power of the second node; None if there is none now."""
    if role != "node":
        return strike(run, PLACES[role], signal.SIGKILL)
    hosts = hosts_of(run.ledger)
    if run.is_done or not run.is_ready or len(hosts) < 2:
        return None
    readies, attempts = run.count("ready"), run.count("attempt")
    kill = Kill(role, signal.SIGKILL, run.step, "work", time.monotonic(), readies, attempts)
    run.lab.kill_node(hosts[1])
    return kill


def until_past(run: CrashedRun, progress: Progress, step: int, kill: Kill) -> None:
    """Wait until the run has passed ``step`` or is done; resubmit it if necessary."""

    def is_past() -> bool:
        bring_back_if_lost(run, kill)
        return progress.step > step or run.is_done

    wait_for(run, f"step {step + 1} after {kill}", is_past, deadline_s=2 * DEADLINE_S)


def kill_repeatedly(run: CrashedRun, losses: Losses, kills: int, rng: random.Random) -> list[float]:
    """Kill a run ``kills`` times, wait for its end, and add to ``losses``; return the times of the kills."""
    progress, struck = Progress(run), dict[int, float]()  # step: time of the kill
    with progress.watched():
        wait_for(run, "the first step", lambda: progress.step > 0)
        while len(struck) < kills and not run.is_done:
            time.sleep(rng.uniform(0.0, LONGEST_WAIT_S))
            step = progress.step
            kill = kill_role(run, losses.role)
            if kill is None:
                continue
            struck[step] = kill.at
            # One step further than the one with the kill: an undisturbed step shows the usual time.
            until_past(run, progress, step + 1, kill)
        finish(run)
    times, answers = progress.reached, run.answers_in_time()
    between = {step: (times[step], times[step + 1]) for step in range(1, max(times))}
    undisturbed = [span for step, span in between.items() if step not in struck]
    usual_s = statistics.median(end - begin for begin, end in undisturbed)
    losses.usual.append(usual_s)
    losses.usually_in_flight += [mean_in_flight(answers, *span) for span in undisturbed]
    for step, killed_at in struck.items():
        begin, end = between[step]
        losses.seconds.append(end - begin - usual_s)
        losses.in_flight.append(mean_in_flight(answers, killed_at, end))
    losses.attempts += run.count("attempt") - 1
    for line in run.ledger:
        if line["event"] == "verdict" and line["verdict"] != "done":
            print(f"{run.folder.name}: {line}", file=sys.stderr, flush=True)
    return list(struck.values())


def compared(
    run: CrashedRun, undisturbed: CrashedRun | None, killed_at: Sequence[float]
) -> list[str]:
    """Return differences from an undisturbed run; without one, groups that were finished twice."""
    if undisturbed is not None:
        return differences(run, undisturbed, killed_at)
    twice = repeated(run.finished_in_time(), killed_at)
    return [f"groups finished twice: prompts {twice[:10]}"] if twice else []


Begin = Callable[[str, int, Sequence[str]], CrashedRun]
"""Starts a run with a name, a number of steps and settings."""


def measured(
    begin: Begin, role: str, mode: str, kills: int, before: int, seed: int
) -> Iterator[Losses]:
    """Yield the losses of a role in a mode: with new attempts, and with each kind of recovery."""
    settings = (*MODES[mode], *SETTINGS.get(role, ()))
    kinds = {"new attempt": (OFF[role], before)}
    kinds |= {kind: (flags, kills) for kind, flags in ON[role].items()}
    kills_a_run = SPARES if role == "node" else max(kills, before)
    num_steps = SPARE_STEPS + STEPS_BETWEEN * kills_a_run
    undisturbed = None
    if mode == "sync":
        undisturbed = begin(f"{role}-undisturbed", num_steps, settings)
        finish(undisturbed)
    rng = random.Random(seed)
    for kind, (flags, count) in kinds.items():
        losses = Losses(role, mode, kind)
        for first in range(0, count, kills_a_run):
            name = f"{role}-{mode}-{kind}-{first}".replace(" ", "-")
            run = begin(name, num_steps, [*settings, *flags])
            killed_at = kill_repeatedly(run, losses, min(kills_a_run, count - first), rng)
            losses.wrong += compared(run, undisturbed, killed_at)
        if losses.seconds:
            yield losses


@contextmanager
def nodes_lab() -> Iterator[Begin]:
    """A lab all of whose nodes are up when a run begins."""
    names = node_names(2 + SPARES)
    with Lab(len(names), options=LabOptions(num_gpus_per_node=2, grace_time_s=60)) as lab:

        def begin(name: str, num_steps: int, flags: Sequence[str]) -> CrashedRun:
            for node in names:
                if not lab.has_power(node):
                    lab.start_node(node)
            lab.wait_idle(names)
            return CrashedRun(lab, name, num_steps, settings=flags)

        yield begin


@contextmanager
def beginning(role: str, *, local: bool) -> Iterator[Begin]:
    """Where runs begin: in a lab, or on this machine."""
    if local:
        with tempfile.TemporaryDirectory(prefix="rlpost-roles-") as folder:
            yield lambda name, steps, flags: LocalRun(Path(folder), name, steps, flags)
    elif role == "node":
        with nodes_lab() as begin:
            yield begin
    else:
        with crash_lab() as lab:
            yield lambda name, steps, flags: CrashedRun(lab, name, steps, settings=flags)


def by_role(kills: int, seed: int, *, write: bool, arguments: Sequence[str]) -> int:
    """Measure and print the tables; 1 when a run differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--roles", nargs="+", choices=sorted(OFF), default=sorted(OFF))
    parser.add_argument("--modes", nargs="+", choices=sorted(MODES), default=sorted(MODES))
    parser.add_argument("--before-kills", type=int, default=2, help="with a new attempt for each")
    parser.add_argument(
        "--local", action="store_true", help="without Slurm, and without new attempts"
    )
    options = parser.parse_args(arguments)
    before = 0 if options.local else options.before_kills
    where, began = machine(), time.monotonic()
    found: list[Losses] = []
    for role in options.roles:
        with beginning(role, local=options.local) as begin:
            for mode in options.modes:
                for losses in measured(begin, role, mode, kills, before, seed):
                    print(" | ".join(losses.row()), flush=True)
                    found.append(losses)
    words = ["--kills", str(kills), "--seed", str(seed), *arguments, "--write"]
    lines = [
        f"`python -m benchmarks.crash --by-role {' '.join(words)}`: runs of the tiny model on Slurm",
        "22.05 of the tests' lab, whose processes of one role are killed by KILL at random instants of",
        "their work; a node loses its power. *Seconds lost*: between the two metrics lines around the",
        "kill, less the median without one. *Answers in flight*: mean number from the kill to the next",
        "line, and between other lines. *Result*: synchronous runs beside an undisturbed one (weights,",
        "metrics, prompts), asynchronous ones by their prompts.",
        f"Machine: {where}; the whole took {time.monotonic() - began:.0f} s.",
        "",
        *table(HEADER, [losses.row() for losses in found]),
        "",
        f"Effective training time ratio when {100 * FAILURE_RATE:.0f} % of the steps have a failure of",
        "the role, computed as step / (step + rate x mean seconds lost). RobustRL (arXiv 2512.22492)",
        "states above 80 % for itself and 60 % for ByteRobust at a failure injection of 10 %, on 256 GPUs",
        "with Qwen3-8B. The seconds lost here are those of a tiny model: nothing large is loaded.",
        "",
        *table(ETTR_HEADER, [losses.ettr_row() for losses in found]),
    ]
    show(HEADING, lines, write=write)
    return int(any(losses.wrong for losses in found))


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else float("nan")
