"""What a job asks of Slurm and which commands it runs: a frozen value, checked when it is made.

Comes in: plain values from the command line. Goes out: a ``JobSpec`` that ``render`` may put into a script as it is.

Invariant: no value of a spec can begin a new line of the script, end a quoted word or pass for an option.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from slurm.container import Container, check_mountable
from slurm.errors import NodelistError, SpecError
from slurm.nodelist import expand

GpuRequest = Literal["gres", "gpus-per-node", "none"]
GPU_REQUESTS = ("gres", "gpus-per-node", "none")
RequeuePolicy = Literal["requeue", "chain", "never"]
REQUEUE_POLICIES = ("requeue", "chain", "never")
MAX_SIGNAL_LEAD_S = 65535  # man sbatch, --signal

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_NAMES = re.compile(r"[A-Za-z0-9][A-Za-z0-9._,-]*")
# man sbatch, --constraint: features, AND, OR, counts, matching and exclusive or
_CONSTRAINT = re.compile(r"[A-Za-z0-9_(\[][A-Za-z0-9_.,:&|*()\[\]=-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# The six forms of man sbatch, --time: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S.
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")


@dataclass(frozen=True, slots=True)
class JobSpec:
    """One job: ``nodes`` machines, one agent on each, one driver.

    Attributes:
        spare_nodes: nodes that are allocated beyond those; the agents take the healthy ones.
        gpu_request: how this site asks for GPUs: ``--gres=gpu:N``, ``--gpus-per-node=N`` or not at all.
        time: limit of one attempt, in any form that sbatch takes.
        exclusive: whole nodes with all their memory; else what the site gives a task.
        exclude: host lists to do without.
        requeue: how a run comes back: Slurm's requeue, a new job that waits for this one (for sites that forbid
            requeueing), or not at all.
        max_preemptions: times that a run comes back after a preemption or time limit.
        max_failures: times that it comes back after a failure.
        max_stalled_attempts: attempts in a row without a new checkpoint after which it does not.
        container: what the agents run in; None is the node itself.
        environment: (name, value) of variables of the agents and all below, set inside the container. No secrets: they
            stand in the script.
        setup_commands: lines of shell that each node runs before its agent, inside the container.
        teardown_s: seconds after the verdict at which srun is not waited for any more (it lingers when a node died), or
            sooner where the job ends.
        signal_lead_s: seconds before that limit at which Slurm sends USR2 to the batch shell.
        driver_args: arguments of ``python -m rlpost.train``, before those that the script adds: a recipe comes first.
        agent_args: more arguments of ``python -m bootstrap.agent``.
        home: folder with the code; where the script is to find it out at run time, None (see ``render``).
        python: interpreter; None as above, and in a container its python3.
        host_python: interpreter of the node itself, for a container ``auto`` that turns out to be none.
        reads: files and folders that must be there when a script without ``home`` submits itself; they may begin with
            a variable. None where ``driver_args`` begin with a recipe, which names them.
        run_folder: None as above.
        output: log of the batch script, an sbatch pattern; None is ``slurm-%j.out`` where sbatch was called.

    Raises:
        SpecError: names the field, what it holds and what it may hold.
    """

    job_name: str = "rlpost"
    nodes: int = 1
    spare_nodes: int = 0
    num_gpus_per_node: int = 8
    gpu_request: GpuRequest = "gres"
    time: str = "04:00:00"
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None
    constraint: str | None = None
    exclusive: bool = True
    exclude: tuple[str, ...] = ()
    requeue: RequeuePolicy = "requeue"
    max_preemptions: int = 100
    max_failures: int = 3
    max_stalled_attempts: int = 3
    container: Container | None = None
    environment: tuple[tuple[str, str], ...] = ()
    setup_commands: tuple[str, ...] = ()
    teardown_s: int = 60
    signal_lead_s: int = 120
    driver_args: tuple[str, ...] = ()
    agent_args: tuple[str, ...] = ()
    home: str | None = None
    python: str | None = None
    host_python: str | None = None
    run_folder: str | None = None
    reads: tuple[str, ...] = ()
    output: str | None = None

    def __post_init__(self) -> None:
        self._check_text()
        self._check_numbers()
        self._check_paths()
        if "--" in self.agent_args:
            raise SpecError("agent_args: '--' ends the agent's arguments; put the driver's into driver_args")

    def _check_text(self) -> None:
        for field in fields(self):
            for text in _texts(getattr(self, field.name)):
                if not text.isprintable():
                    raise SpecError(f"{field.name}: {text!r} holds a line break or another control character")
        for name, pattern in (
            ("job_name", _NAME),
            ("partition", _NAMES),
            ("account", _NAME),
            ("qos", _NAME),
            ("reservation", _NAMES),
        ):
            value = getattr(self, name)
            if value is not None and not pattern.fullmatch(value):
                raise SpecError(f"{name}: {value!r}; use letters, digits, '.', '_' and '-', a letter or digit first")
        if self.constraint is not None and not _CONSTRAINT.fullmatch(self.constraint):
            raise SpecError(f"constraint: {self.constraint!r}; use features with & | , * ( ) [ ] between them")
        for hosts in self.exclude:
            try:
                names = expand(hosts)
            except NodelistError as error:
                raise SpecError(f"exclude: {error}") from None
            if not names or not all(_NAME.fullmatch(name) for name in names):
                raise SpecError(f"exclude: {hosts!r} is no list of hosts; write n01 or n[01-03,07]")
        if self.requeue not in REQUEUE_POLICIES:
            raise SpecError(f"requeue: {self.requeue!r}; choose one of {', '.join(REQUEUE_POLICIES)}")
        for name, value in self.environment:
            if not _VARIABLE.fullmatch(name) or name.startswith("SLURM_"):
                raise SpecError(f"environment: {name!r}={value!r}: not a name that a variable of yours may have")
        if self.gpu_request not in GPU_REQUESTS:
            raise SpecError(f"gpu_request: {self.gpu_request!r}; choose one of {', '.join(GPU_REQUESTS)}")

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
            if not isinstance(value, int) or isinstance(value, bool) or value < low or value > (high or value):
                raise SpecError(f"{name}: {value!r}; give a whole number from {low}" + (f" to {high}" if high else ""))
        if self.time_limit_s <= self.signal_lead_s:
            raise SpecError(
                f"time: {self.time!r} is not longer than --signal-lead-s {self.signal_lead_s}, so the warning would "
                "come before the job begins; use more time or a shorter lead"
            )

    def _check_paths(self) -> None:
        for name in ("home", "python", "host_python", "run_folder"):
            value = getattr(self, name)
            if self.container is not None and "python" not in name:
                check_mountable(name, value)
            if name == "python" and self.container is not None and _NAME.fullmatch(value or "python3"):
                continue  # found on the image's PATH
            if value is not None and not value.startswith("/"):
                raise SpecError(f"{name}: {value!r} is not an absolute path; the job starts in another folder")
        for name in ("run_folder", "output"):
            if "\\" in (getattr(self, name) or ""):
                raise SpecError(f"{name}: {getattr(self, name)!r} holds a backslash, which Slurm reads as an escape")
        if ":" in (self.home or ""):
            raise SpecError(
                f"home: {self.home!r} holds ':', which separates folders in PYTHONPATH; choose another place"
            )
        if self.output is not None and not self.output.strip():
            raise SpecError("output: empty; leave it out for slurm-%j.out")

    def with_python(self, interpreter: str) -> JobSpec:
        """The same job with ``interpreter`` wherever no other is given and none of an image is meant."""
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
            SpecError: not a form that sbatch takes.
        """
        match = _TIME.fullmatch(self.time)
        if match is None:
            raise SpecError(f"time: {self.time!r}; write minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S")
        first, second, third = (int(match[name] or 0) for name in ("first", "second", "third"))
        if match["days"] is not None:
            return int(match["days"]) * 86400 + first * 3600 + second * 60 + third
        if match["third"] is not None:
            return first * 3600 + second * 60 + third
        return first * 60 + second


def _texts(value: Any) -> Iterator[str]:
    """Every text in a field."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _texts(part)
