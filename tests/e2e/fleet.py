"""A run on a real Slurm whose two engines are both in a fleet: one is preempted and comes back, one
is killed, one is drained.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.crash import finish, num_steps
from benchmarks.crashed_run import wait_for
from benchmarks.fleet_run import FleetRun, until_admitted
from tests.cluster.jobs import job_info
from tests.cluster.lab import Lab

NUM_KILLS = 7  # of the run without a fleet: one in each place; this run has as many steps
NO_OWN_ENGINES = ("--rollout-num-gpus", "0", "--min-engines", "1")
SLOWNESS = 10.0  # of the answers while engines come and go: steps must not run out


@dataclass(frozen=True)
class FleetStory:
    """The run, and the names of its two engines.

    Attributes:
        shown: what ``rlpost fleet`` printed while both served.
        preempted: the engine that a job of a higher partition pushed off its node; when it was
            back it was drained.
        killed: the engine whose server was killed.
    """

    run: FleetRun
    shown: str
    preempted: str
    killed: str


def tell(lab: Lab) -> FleetStory:
    """Let it happen; the run is done afterwards."""
    steps = num_steps(NUM_KILLS)
    run = FleetRun(lab, "undisturbed", steps, settings=NO_OWN_ENGINES, pace=SLOWNESS)
    engines = run.add(2, partition="low")
    until_admitted(run, engines)
    wait_for(run, "answers of both", lambda: all(map(run.answers_at, engines)))
    shown = run.fleet()
    # Three of four GPUs: one of the two engines has to leave.
    run.preempt(engines[0], gpus=3)
    wait_for(run, "a preemption", lambda: any(_has_left(run, one) for one in engines))
    (preempted,) = [one for one in engines if _has_left(run, one)]
    (killed,) = set(engines) - {preempted}
    run.kill_server(killed)
    wait_for(run, "answers after a preemption", lambda: _answered_again(run, preempted))
    run.drain(preempted)
    wait_for(run, "a drain", lambda: run.job_is_over(preempted))
    wait_for(run, "answers after a kill", lambda: _answered_again(run, killed))
    run.set_pace(1)
    finish(run)
    return FleetStory(run, shown, preempted, killed)


def _has_left(run: FleetRun, engine: str) -> bool:
    return job_info(run.lab, engine).num_restarts > 0 or not run.is_admitted(engine)


def _answered_again(run: FleetRun, engine: str) -> bool:
    """Whether it gave an answer after its job was started again."""
    starts, answers = run.starts_at(engine), run.answers_at(engine)
    return len(starts) > 1 and bool(answers) and answers[-1] > starts[-1]
