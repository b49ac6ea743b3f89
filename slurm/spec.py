"""Specification of a Slurm job and its commands: frozen, and validated on construction.

Input: plain values from the command line. Output: a ``JobSpec`` that ``render`` can insert into a
script verbatim.

Invariant: no value of a spec can start a new line of the script, end a quoted word or be parsed as
an option.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

from common.host_lists import HostListError, expand
from common.run_folder import RunFolder
from slurm.container import Container, check_mountable
from slurm.errors import SpecError
from slurm.sbatch_options import GPU_TYPE, NAME, OF_SETTINGS, Job, word_problem

GpuRequest = Literal["gres", "gpus-per-node", "none"]
GPU_REQUESTS = ("gres", "gpus-per-node", "none")
RequeuePolicy = Literal["requeue", "chain", "never"]
REQUEUE_POLICIES = ("requeue", "chain", "never")
MAX_SIGNAL_LEAD_S = 65535  # man sbatch, --signal

_NAME = re.compile(NAME)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# The six forms of man sbatch, --time: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S.
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """One job: ``nodes`` machines, one agent on each, one driver.

    Fields without a default have the names and meanings of settings, which have the defaults.

    Attributes:
        spare_nodes: extra nodes to allocate; the agents use the healthy ones.
        gpu_request: how this site requests GPUs: ``--gres=gpu:N``, ``--gpus-per-node=N`` or not at
            all.
        gpu_type: type of the GPUs in that request, ``--gres=gpu:TYPE:N``; None: any.
        time: limit of one attempt, in any form that sbatch accepts.
        segment: nodes of each group that Slurm places within one block (topology/block only).
        exclusive: allocate whole nodes with all their memory; otherwise the site's defaults per
            task.
        exclude: hosts to exclude, as host lists.
        sbatch: further options of sbatch, ``--name`` or ``--name=value``.
        requeue: how a run restarts: by Slurm's requeue, as a new job that waits for this one (for
            sites that forbid requeueing), or never.
        max_preemptions: maximum restarts after a preemption or time limit.
        max_failures: maximum restarts after a failure.
        max_stalled_attempts: consecutive attempts without a new checkpoint after which the run is
            not restarted.
        container: container of the agents; None: run on the node itself.
        environment: (name, value) of variables for the agents and their children, set inside the
            container. No secrets: the script contains them in plain text.
        setup_commands: shell lines that each node runs before its agent, inside the container.
        teardown_s: maximum seconds to wait for srun after the verdict (srun lingers after a node
            failure); less if the job ends sooner.
        signal_lead_s: seconds before the time limit at which Slurm sends USR2 to the batch shell.
        driver_args: arguments of ``python -m rlpost.train``, before those that the script adds; a
            recipe comes first.
        agent_args: further arguments of ``python -m bootstrap.agent``.
        home: folder with the code; None: the script finds it at run time (see ``render``).
        python: interpreter; None: found at run time, python3 in a container.
        host_python: interpreter on the node, for a container ``auto`` that resolves to none.
        reads: files and folders that must exist when a script without ``home`` submits itself; they
            may begin with a variable. Empty if ``driver_args`` begin with a recipe, which names
            them.
        run_folder: None: found at run time.
        output: log of the batch script, an sbatch pattern; None: ``slurm-%j.out`` in the submit
            directory.

    Raises:
        SpecError: names the field, its value and the allowed values.
    """

    job_name: str
    nodes: int
    spare_nodes: int
    num_gpus_per_node: int
    gpu_request: GpuRequest
    gpu_type: str | None
    time: str
    partition: str | None
    account: str | None
    qos: str | None
    reservation: str | None
    constraint: str | None
    segment: int | None
    exclusive: bool
    exclude: tuple[str, ...]
    sbatch: tuple[str, ...]
    requeue: RequeuePolicy
    max_preemptions: int
    max_failures: int
    max_stalled_attempts: int
    container: Container | None
    environment: tuple[tuple[str, str], ...]
    setup_commands: tuple[str, ...]
    teardown_s: int = 60
    signal_lead_s: int
    driver_args: tuple[str, ...] = ()
    agent_args: tuple[str, ...] = ()
    home: str | None = None
    python: str | None
    host_python: str | None = None
    run_folder: str | None = None
    reads: tuple[str, ...] = ()
    output: str | None = None

    def __post_init__(self) -> None:
        self._check_text()
        self._check_numbers()
        self._check_paths()
        if "--" in self.agent_args:
            raise SpecError(
                "agent_args: '--' ends the agent's arguments; use driver_args for the driver's"
            )
        if "--" in self.driver_args:
            raise SpecError("driver_args: '--' ends them in the batch file; leave it out")

    def _check_text(self) -> None:
        for field in fields(self):
            for text in _texts(getattr(self, field.name)):
                if not text.isprintable():
                    raise SpecError(
                        f"{field.name}: {text!r} contains a line break or another control character"
                    )
        for option in OF_SETTINGS:
            value = getattr(self, option.key)
            if option.pattern and value is not None and not re.fullmatch(option.pattern, value):
                raise SpecError(f"{option.key}: {value!r}; {option.syntax}")
        self._check_gpu_type()
        job = Job(self.exclusive, self.gpu_request, self.requeue)
        for word in self.sbatch:
            if problem := word_problem(word, job):
                raise SpecError(problem)
        for hosts in self.exclude:
            try:
                names = expand(hosts)
            except HostListError as error:
                raise SpecError(f"exclude: {error}") from None
            if not names or not all(_NAME.fullmatch(name) for name in names):
                raise SpecError(f"exclude: {hosts!r} is not a host list; write n01 or n[01-03,07]")
        if self.requeue not in REQUEUE_POLICIES:
            raise SpecError(
                f"requeue: {self.requeue!r}; choose one of {', '.join(REQUEUE_POLICIES)}"
            )
        for name, value in self.environment:
            if not _VARIABLE.fullmatch(name) or name.startswith("SLURM_"):
                raise SpecError(
                    f"environment: {name!r}={value!r}: use letters, digits and '_'; not SLURM_*"
                )

    def _check_gpu_type(self) -> None:
        if self.gpu_request not in GPU_REQUESTS:
            raise SpecError(
                f"gpu_request: {self.gpu_request!r}; choose one of {', '.join(GPU_REQUESTS)}"
            )
        if self.gpu_type is None:
            return
        if not re.fullmatch(GPU_TYPE, self.gpu_type):
            raise SpecError(
                f"gpu_type: {self.gpu_type!r}; give a type as sinfo --format=%G lists it, such as h100 or 1g.10gb"
            )
        if self.gpu_request == "none":
            raise SpecError(
                f"gpu_type: {self.gpu_type!r} has no effect with --gpu-request none; use --gpu-request gres or "
                f"gpus-per-node, or --sbatch=--gres=gpu:{self.gpu_type}:{self.num_gpus_per_node} instead"
            )

    def _check_numbers(self) -> None:
        for name, low, high in (
            ("nodes", 1, None),
            ("spare_nodes", 0, None),
            ("max_preemptions", 0, None),
            ("max_failures", 0, None),
            ("max_stalled_attempts", 1, None),
            ("teardown_s", 1, None),
            ("num_gpus_per_node", 0 if self.gpu_request == "none" else 1, None),
            ("signal_lead_s", 1, MAX_SIGNAL_LEAD_S),
        ):
            value = getattr(self, name)
            if (
                not isinstance(value, int)
                or isinstance(value, bool)
                or value < low
                or value > (high or value)
            ):
                raise SpecError(
                    f"{name}: {value!r}; use an integer from {low}"
                    + (f" to {high}" if high else "")
                )
        num_nodes = self.nodes + self.spare_nodes
        if self.segment is not None and (self.segment < 1 or num_nodes % self.segment):
            divisors = [str(size) for size in range(1, num_nodes + 1) if num_nodes % size == 0]
            raise SpecError(
                f"segment: {self.segment} does not divide the {num_nodes} nodes, spare ones "
                f"included; use one of {', '.join(divisors)}"
            )
        if self.time_limit_s <= self.signal_lead_s:
            raise SpecError(
                f"time: {self.time!r} is not longer than --signal-lead-s {self.signal_lead_s}, so the signal would "
                "come before the job starts; use more time or a shorter lead"
            )

    def _check_paths(self) -> None:
        for name in ("home", "python", "host_python", "run_folder"):
            value = getattr(self, name)
            if self.container is not None and "python" not in name:
                check_mountable(name, value)
            if (
                name == "python"
                and self.container is not None
                and _NAME.fullmatch(value or "python3")
            ):
                continue  # found on the image's PATH
            if value is not None and not value.startswith("/"):
                raise SpecError(
                    f"{name}: {value!r} is not an absolute path; the job starts in another folder"
                )
        if "%" in (self.run_folder or ""):
            raise SpecError(
                f"run_folder: {self.run_folder!r} contains '%', which Slurm replaces in the names of log "
                "files (25.11 and later even where it is doubled); choose another path"
            )
        for name in ("run_folder", "output"):
            if "\\" in (getattr(self, name) or ""):
                raise SpecError(
                    f"{name}: {getattr(self, name)!r} contains a backslash, which Slurm reads as an escape"
                )
        if ":" in (self.home or ""):
            raise SpecError(
                f"home: {self.home!r} contains ':', which separates folders in PYTHONPATH; choose another path"
            )
        if self.output is not None and not self.output.strip():
            raise SpecError("output: empty; omit it for slurm-%j.out")

    def with_python(self, interpreter: str) -> JobSpec:
        """Copy with ``interpreter`` as default on the node, python3 in a container."""
        if self.python is not None:
            return self
        if self.container is None:
            return replace(self, python=interpreter)
        if self.container.backend == "auto":
            return replace(self, host_python=interpreter)
        return replace(self, python="python3")

    @property
    def time_limit_s(self) -> int:
        """``time`` in seconds.

        Raises:
            SpecError: not a form that sbatch accepts.
        """
        match = _TIME.fullmatch(self.time)
        if match is None:
            raise SpecError(
                f"time: {self.time!r}; write minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S"
            )
        first, second, third = (int(match[name] or 0) for name in ("first", "second", "third"))
        if match["days"] is not None:
            return int(match["days"]) * 86400 + first * 3600 + second * 60 + third
        if match["third"] is not None:
            return first * 3600 + second * 60 + third
        return first * 60 + second


def _texts(value: object) -> Iterator[str]:
    """Every text in a field."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _texts(part)


def completed(spec: JobSpec, run: RunFolder, *, home: Path) -> JobSpec:
    """Fill the paths that a spec leaves open: interpreter (unless in a container), run folder, log.

    Jobs of a chain wait for each other by name, so the name becomes unique to the run.
    """
    name = spec.job_name
    if spec.requeue == "chain":
        name += "-" + hashlib.sha256(str(run.root).encode()).hexdigest()[:8]
    return replace(
        spec.with_python(sys.executable),
        job_name=name,
        home=spec.home or str(home),
        run_folder=spec.run_folder or str(run.root),
        output=spec.output or f"{run.root}/slurm-%j.out",
    )
