"""A run of the tiny model on the tests' Slurm with engines of a fleet, and what happens to them.

``FleetRun`` submits the run and its engine jobs, and drains, preempts and kills them.
"""

from __future__ import annotations

import contextlib
import re
import signal
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import psutil

from rlpost.extensions.fleet.fleet_folder import FleetFolder
from rlpost.extensions.fleet.records import EngineRecord, EngineState
from tests.cluster.jobs import sbatch
from tests.cluster.lab import REPOSITORY, Lab
from tests.e2e import crash_answers
from tests.e2e.crashed_run import CrashedRun, wait_for
from tests.processes import living, output_of

URGENT = "#!/bin/bash\n#SBATCH --partition=high --gres=gpu:{gpus} -w {node}\nsrun sleep 1\n"
STAMP = r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\].*POST /generate HTTP/1.1. 200"


class FleetRun(CrashedRun):
    """A run and its fleet."""

    def __init__(
        self,
        lab: Lab,
        name: str,
        num_steps: int,
        *,
        settings: Sequence[str] = (),
        pace: float = 1.0,
    ) -> None:
        """``settings``: as of ``CrashedRun``; ``pace``: see ``set_pace``."""
        self.pace_file = lab.shared / f"{name}_answers{crash_answers.SLOWNESS.suffix}"
        self.set_pace(pace)
        # a line for each request, see ``answers_at``
        logged = ("--sglang-log-level-http", "info")
        super().__init__(lab, name, num_steps, settings=[*settings, *logged])
        self.fleet_folder = FleetFolder(self.folder)
        self.num_urgent = 0

    def set_pace(self, number: float) -> None:
        """Set the factor of the answers' pauses from now on; what is trained does not change."""
        new = self.pace_file.with_suffix(".new")
        new.write_text(f"{number:g}")
        new.replace(self.pace_file)

    def fleet(self, *words: str) -> str:
        """Run ``rlpost fleet`` on the login node."""
        command = [sys.executable, "-m", "rlpost", "fleet", str(self.folder), *words]
        return self.lab.run("ctl", command, cwd=REPOSITORY).stdout

    def add(self, number: int, *, partition: str, node: str) -> list[str]:
        """Submit engine jobs for one node; return the engines' names."""
        where = ("--partition", partition, f"--sbatch=--nodelist={node}")
        said = self.fleet("--engines", str(number), *where)
        found = re.match(r"submitted (\d+):", said)
        assert found, said
        return [f"{found[1]}_{task}" for task in range(number)]

    # -- its engines

    def record(self, engine: str) -> EngineRecord | None:
        return self.fleet_folder.engine(engine)

    def is_admitted(self, engine: str) -> bool:
        """Whether requests may be sent to it."""
        lease, record = self.fleet_folder.lease(), self.record(engine)
        return lease is not None and record is not None and record.incarnation in lease.in_use

    def job_is_over(self, engine: str) -> bool:
        return bool(self.job_info(engine).state.is_over)

    def servers(self, engine: str) -> list[psutil.Process]:
        """The processes of an engine's server."""
        log = str(self.fleet_folder.logs / f"{engine}-server.log")
        return [one for one in living() if output_of(one) == log]

    # -- disturbances

    def kill_server(self, engine: str) -> bool:
        return _send(self.servers(engine), signal.SIGKILL)

    def drain(self, engine: str) -> bool:
        """As the user: it leaves and does not come back."""
        return "asked to leave" in self.fleet("--drain", engine)

    def preempt(self, engine: str, *, gpus: int = 0) -> bool:
        """Let a job of a higher partition take its node, or ``gpus`` of it."""
        record = self.record(engine)
        if record is None or record.state is EngineState.GONE:
            return False
        self.take_node(record.host, gpus=gpus)
        return True

    def take_node(self, node: str, *, gpus: int = 0) -> str:
        """Submit a job that needs all of a node, or ``gpus`` of it, and preempts others for that;
        return its id.
        """
        self.num_urgent += 1
        name = f"{self.folder.name}-urgent-{self.num_urgent}.sbatch"
        return sbatch(
            self.lab,
            name,
            URGENT.format(node=node, gpus=gpus or self.lab.options.num_gpus_per_node),
        )

    # -- facts from the logs

    def answers_at(self, engine: str) -> list[float]:
        """Seconds since 1970, in whole seconds, of each answer of an engine."""
        log = self.fleet_folder.logs / f"{engine}-server.log"
        return [] if not log.exists() else _stamps(log, STAMP)

    def starts_at(self, engine: str) -> list[float]:
        """When each of its jobs began; whole seconds since 1970."""
        log = self.fleet_folder.logs / f"{engine}.batch"
        return _stamps(log, r"^(\S+ \S+) engine .*: job \d+, start ") if log.exists() else []


def until_admitted(run: FleetRun, engines: Sequence[str]) -> None:
    """Wait until all these engines get requests."""
    wait_for(
        run,
        f"engines {', '.join(engines)} serve",
        lambda: all(run.is_admitted(one) for one in engines),
    )


def _send(targets: Sequence[psutil.Process], number: signal.Signals) -> bool:
    for one in targets[:1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.send_signal(number)
            return True
    return False


def _stamps(log: Path, pattern: str) -> list[float]:
    text = log.read_text(errors="replace")
    found = re.findall(pattern, text, re.MULTILINE)
    return [datetime.fromisoformat(stamp).timestamp() for stamp in found]
