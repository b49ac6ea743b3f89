"""A run on a real Slurm whose two engines are both in a fleet: one is preempted and returns, one is
killed, one is drained.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.cluster.lab import Lab
from tests.e2e.crashed_run import wait_for
from tests.e2e.fleet_run import FleetRun, until_admitted
from tests.e2e.kills import finish

LORA = ("--lora-rank", "8", "--lr", "3e-3", "--update-weight-transport", "disk")
"""Both runs train adapters. The fleet gets merged weights, the other run's engine adapters alone."""
NO_OWN_ENGINES = ("--rollout-num-gpus", "0", "--min-engines", "1")
SLOWNESS = 16.0
"""Factor of the answers' seconds while engines join and leave: the run must not end before."""


@dataclass(frozen=True)
class FleetOutcome:
    """The finished run, and the names of its two engines.

    Attributes:
        table: what ``rlpost fleet`` printed while both served.
        preempted: the engine that a job of a higher partition preempted; it was drained after its
            return.
        killed: the engine whose server was killed.
    """

    run: FleetRun
    table: str
    preempted: str
    killed: str


def run_with_fleet(lab: Lab, num_steps: int) -> FleetOutcome:
    """Run ``num_steps`` steps while one engine is preempted and drained, and the other is killed."""
    settings = (*LORA, *NO_OWN_ENGINES)
    run = FleetRun(lab, "undisturbed", num_steps, settings=settings, pace=SLOWNESS)
    engines = run.add(2, partition="low", node=lab.nodes[-1])
    until_admitted(run, engines)
    wait_for(run, "answers of both", lambda: all(map(run.answers_at, engines)))
    table = run.fleet()
    # Three of four GPUs: one of the two engines has to leave.
    run.preempt(engines[0], gpus=3)
    wait_for(run, "a preemption", lambda: any(_has_left(run, engine) for engine in engines))
    (preempted,) = [engine for engine in engines if _has_left(run, engine)]
    (killed,) = set(engines) - {preempted}
    run.kill_server(killed)
    wait_for(run, "answers after a preemption", lambda: _answered_again(run, preempted))
    run.drain(preempted)
    wait_for(run, "a drain", lambda: run.job_is_over(preempted))
    wait_for(run, "answers after a kill", lambda: _answered_again(run, killed))
    run.set_pace(1)
    finish(run)
    return FleetOutcome(run, table, preempted, killed)


def _has_left(run: FleetRun, engine: str) -> bool:
    return run.job_info(engine).num_restarts > 0 or not run.is_admitted(engine)


def _answered_again(run: FleetRun, engine: str) -> bool:
    """Whether the engine has answered since its job was last started again."""
    starts, answers = run.starts_at(engine), run.answers_at(engine)
    return len(starts) > 1 and bool(answers) and answers[-1] > starts[-1]
