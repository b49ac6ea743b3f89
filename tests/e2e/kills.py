"""Kill the processes of a run at random instants, and compare it with an undisturbed run.

Input: a ``CrashedRun``. Output: its kills and what each cost; the differences from another run.
"""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psutil

from tests.cluster.jobs import job_info
from tests.cluster.lab import Lab
from tests.cluster.lab_config import LabOptions
from tests.e2e.crashed_run import DEADLINE_S, POLL_S, CrashedRun, wait_for

STEPS_A_KILL, SPARE_STEPS, MOST_STEPS = 3, 5, 2
# A kill comes at most this long after an attempt begins, or after it is ready.
LONGEST_START_S, LONGEST_WORK_S = 15.0, 4.0
SHARE_IN_START = 0.25
# Signals by place. The batch shell never requeues after TERM, which is the signal of scancel, and
# KILL ends the job: then the user submits the run again with --resume. SIGTERM to the driver ends
# the attempt.
PLACES = {
    "agent": (signal.SIGKILL, signal.SIGTERM),
    "node": (signal.SIGKILL,),
    "batch shell": (signal.SIGUSR2, signal.SIGTERM, signal.SIGKILL),
    "driver": (signal.SIGKILL, signal.SIGTERM),
    "actor": (signal.SIGKILL,),
    "engine": (signal.SIGKILL, signal.SIGTERM),
}
# The first kills of a run: those that no other test of whole runs has. USR2 announces a preemption.
FIRST = (("batch shell", signal.SIGUSR2), ("agent", signal.SIGKILL), ("node", signal.SIGKILL))
QUEUED_S = 0.5
"""A group that was finished within this many seconds of a kill may not be on disk."""


@dataclass
class Kill:
    """One kill and what it cost."""

    place: str
    signal: signal.Signals
    step: int  # trained before
    when: str  # "start-up" or "work"
    at: float  # time.monotonic
    ready: int  # attempts that had been ready before
    attempts: int  # attempts before; `recover` replaces it by the number of new ones
    seconds: float = 0.0  # until the run passed its earlier progress
    resubmitted: bool = False  # by the user, with --resume

    @property
    def keeps_attempt(self) -> bool:
        """Whether the run continues without a new attempt."""
        also = (("batch shell", signal.SIGTERM), ("driver", signal.SIGKILL))
        return self.place in ("engine", "actor") or (self.place, self.signal) in also

    @property
    def name(self) -> str:
        return f"{self.place}, {self.signal.name.removeprefix('SIG')}"

    def __str__(self) -> str:
        text = f"{self.name} at step {self.step} in {self.when}: {self.seconds:.1f} s, {self.attempts} attempts"
        return text + ", resubmitted by the user" * self.resubmitted


def finish(run: CrashedRun) -> None:
    """Wait for the end of the run."""
    wait_for(
        run, "the end of the run", lambda: run.is_done or run.is_over, deadline_s=3 * DEADLINE_S
    )
    if not run.is_done:
        raise RuntimeError(f"the run ended without being done\n{run.tell()}")
    wait_for(run, "the end of the job", lambda: run.is_over)


def strike(run: CrashedRun, place: str, number: signal.Signals) -> Kill | None:
    """Kill a process of the place; return None if the run is done or has no such process now."""
    if run.is_done:
        return None
    when = "work" if run.is_ready else "start-up"
    kill = Kill(
        place, number, run.step, when, time.monotonic(), run.count("ready"), run.count("attempt")
    )
    if place == "node":
        node = job_info(run.lab, run.job).nodelist
        if not node:
            return None
        run.lab.kill_node(node)
        run.lab.start_node(node)
        return kill
    targets = run.processes(place)
    if not targets:
        return None
    with contextlib.suppress(psutil.NoSuchProcess):
        targets[0].send_signal(number)
        return kill
    return None


def recover(run: CrashedRun, kills: Sequence[Kill]) -> None:
    """Wait until the run has passed its progress at all ``kills``, or is done.

    Resubmits or releases the run if it does not restart by itself.
    """
    last = kills[-1]
    # Steps after which a run counts as recovered without a new attempt.
    repaired = 2 if last.keeps_attempt else run.num_steps

    def is_further() -> bool:
        if run.is_done:
            return True
        bring_back_if_lost(run, last)
        step = max(kill.step for kill in kills)
        return run.step > step + (0 if run.count("ready") > last.ready else repaired)

    wait_for(run, f"progress after {last.name} at step {last.step}", is_further)
    for kill in kills:
        kill.seconds = time.monotonic() - kill.at
        kill.attempts = run.count("attempt") - kill.attempts


def bring_back_if_lost(run: CrashedRun, kill: Kill) -> None:
    """Submit or release the run if its job ended early or does not restart automatically."""
    if (run.is_over and not run.is_done) or run.is_held:
        run.bring_back()
        kill.resubmitted = True


def work_for(run: CrashedRun, seconds: float) -> None:
    """Wait for ``seconds``, but for at most MOST_STEPS steps: the run must not end before the last kill."""
    end, step = time.monotonic() + seconds, run.step
    while time.monotonic() < end and run.step < step + MOST_STEPS and not run.is_done:
        time.sleep(POLL_S)


def in_start_up(run: CrashedRun, kill: Kill, rng: random.Random) -> None:
    """Wait for a random instant in the start-up of the attempt after ``kill``."""

    def has_begun() -> bool:
        bring_back_if_lost(run, kill)
        return run.count("attempt") > kill.attempts or run.is_done

    wait_for(run, f"an attempt after {kill.name}", has_begun)
    time.sleep(rng.uniform(0.0, LONGEST_START_S))


def killed(run: CrashedRun, num_kills: int, rng: random.Random) -> list[Kill]:
    """Kill the run ``num_kills`` times unless it is done before; wait for its end."""
    kills: list[Kill] = []
    targets = list(reversed(FIRST))  # taken from the end; then all places equally often

    def strikes() -> list[Kill]:
        if not targets:
            places = rng.sample(sorted(PLACES), len(PLACES))
            targets.extend((place, rng.choice(PLACES[place])) for place in places)
        kill = strike(run, *targets[-1])
        if kill is None:  # the process does not exist yet: try this place again later
            return []
        targets.pop()
        return [kill]

    wait_for(run, "the first checkpoint", lambda: run.count("committed") > 0)
    while len(kills) < num_kills and not run.is_done:
        work_for(run, rng.uniform(0.0, LONGEST_WORK_S))
        fresh = strikes()
        if not fresh:
            continue
        if (
            not fresh[0].keeps_attempt
            and len(kills) + 1 < num_kills
            and rng.random() < SHARE_IN_START
        ):
            in_start_up(run, fresh[0], rng)
            fresh += strikes()
        recover(run, fresh)
        for kill in fresh:
            kills.append(kill)
            print(f"kill {len(kills)}: {kill}", file=sys.stderr, flush=True)
    finish(run)
    return kills


def repeated(finished: Sequence[tuple[int, float]], killed_at: Sequence[float] = ()) -> list[int]:
    """Return the prompts whose finished group was generated again, sorted.

    The journal writes a group to disk in the moments after it is finished: a group that a kill
    took from this queue is generated again, and does not count (``rlpost.durable.journal``).

    Args:
        finished: prompt and time in s of each finished group.
        killed_at: times of the kills on the same clock.
    """
    by_prompt: dict[int, list[float]] = {}
    for prompt, at in finished:
        by_prompt.setdefault(prompt, []).append(at)

    def may_be_lost(at: float) -> bool:
        return any(abs(kill - at) <= QUEUED_S for kill in killed_at)

    found = []
    for prompt, times in by_prompt.items():
        earlier = sorted(times)[:-1]
        if not all(map(may_be_lost, earlier)):
            found.append(prompt)
    return sorted(found)


def differences(
    run: CrashedRun, undisturbed: CrashedRun, killed_at: Sequence[float] = ()
) -> list[str]:
    """Differences from the undisturbed run, as messages; empty if there are none.

    ``killed_at``: when the run was killed, in seconds of ``time.monotonic``.
    """
    found = []
    if run.weights() != undisturbed.weights():
        found.append("the final weights differ")
    if run.lines() != undisturbed.lines():
        pairs = list(zip(run.lines(), undisturbed.lines(), strict=False))
        steps = [
            f"{ours['step']}: {_unequal(ours, theirs)}" for ours, theirs in pairs if ours != theirs
        ]
        found.append(
            f"the metrics of {len(run.lines())} and {len(undisturbed.lines())} steps differ: {steps[:5]}"
        )
    twice = repeated(run.finished_in_time(), killed_at)
    if twice:
        found.append(f"groups finished twice: prompts {twice[:10]}")
    finished = run.finished()
    if set(finished) != set(undisturbed.finished()):
        found.append(f"other prompts: {sorted(set(finished) ^ set(undisturbed.finished()))[:10]}")
    return found


@contextlib.contextmanager
def crash_lab() -> Iterator[Lab]:
    """A lab of three nodes: for two runs, and for the engines of one of them."""
    with Lab(3, options=LabOptions(num_gpus_per_node=4, grace_time_s=60, kill_wait_s=30)) as lab:
        yield lab


def num_steps(num_kills: int) -> int:
    """Return a number of steps that suffices: a kill takes two steps, sometimes five."""
    return SPARE_STEPS + STEPS_A_KILL * num_kills


def _unequal(
    ours: dict[str, float], theirs: dict[str, float]
) -> dict[str, tuple[float | None, float | None]]:
    keys = sorted(ours.keys() | theirs.keys())
    return {
        key: (ours.get(key), theirs.get(key)) for key in keys if ours.get(key) != theirs.get(key)
    }
