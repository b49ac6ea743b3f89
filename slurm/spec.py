"""What a job asks of Slurm and which commands it runs: a frozen value, checked when it is made.

Comes in: plain values from the command line. Goes out: a ``JobSpec`` that ``render`` may put into a script as it is.

Invariant: no value of a spec can begin a new line of the script, end a quoted word or pass for an option.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Literal

from slurm.errors import SpecError

GpuRequest = Literal["gres", "gpus-per-node", "none"]
GPU_REQUESTS = ("gres", "gpus-per-node", "none")
MAX_SIGNAL_LEAD_S = 65535  # man sbatch, --signal

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_NAMES = re.compile(r"[A-Za-z0-9][A-Za-z0-9._,-]*")
# The six forms of man sbatch, --time: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S.
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")


@dataclass(frozen=True, slots=True)
class JobSpec:
    """One job: ``nodes`` machines, one agent on each, one driver.

    Attributes:
        gpu_request: how this site asks for GPUs: ``--gres=gpu:N``, ``--gpus-per-node=N`` or not at all.
        time: limit of one attempt, in any form that sbatch takes.
        signal_lead_s: seconds before that limit at which Slurm sends USR2 to the batch shell.
        driver_args: arguments of ``python -m rlpost.train``, before those that the script adds: a recipe comes first.
        agent_args: more arguments of ``python -m bootstrap.agent``.
        home: folder with the code; where the script is to find it out at run time, None (see ``render``).
        python: interpreter; None as above.
        run_folder: None as above.
        output: log of the batch script, an sbatch pattern; None is ``slurm-%j.out`` where sbatch was called.

    Raises:
        SpecError: names the field, what it holds and what it may hold.
    """

    job_name: str = "rlpost"
    nodes: int = 1
    num_gpus_per_node: int = 8
    gpu_request: GpuRequest = "gres"
    time: str = "04:00:00"
    partition: str | None = None
    account: str | None = None
    signal_lead_s: int = 120
    driver_args: tuple[str, ...] = ()
    agent_args: tuple[str, ...] = ()
    home: str | None = None
    python: str | None = None
    run_folder: str | None = None
    output: str | None = None

    def __post_init__(self) -> None:
        self._check_text()
        self._check_numbers()
        self._check_paths()
        if "--" in self.agent_args:
            raise SpecError("agent_args: '--' ends the agent's arguments; put the driver's into driver_args")

    def _check_text(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            for text in value if isinstance(value, tuple) else (value,):
                if isinstance(text, str) and not text.isprintable():
                    raise SpecError(f"{field.name}: {text!r} holds a line break or another control character")
        for name, pattern in (("job_name", _NAME), ("partition", _NAMES), ("account", _NAME)):
            value = getattr(self, name)
            if value is not None and not pattern.fullmatch(value):
                raise SpecError(f"{name}: {value!r}; use letters, digits, '.', '_' and '-', a letter or digit first")
        if self.gpu_request not in GPU_REQUESTS:
            raise SpecError(f"gpu_request: {self.gpu_request!r}; choose one of {', '.join(GPU_REQUESTS)}")

    def _check_numbers(self) -> None:
        for name, low, high in (
            ("nodes", 1, None),
            ("num_gpus_per_node", 0 if self.gpu_request == "none" else 1, None),
            ("signal_lead_s", 1, MAX_SIGNAL_LEAD_S),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low or value > (high or value):
                raise SpecError(f"{name}: {value!r}; give a whole number from {low}" + (f" to {high}" if high else ""))
        if self.time_limit_s <= self.signal_lead_s:
            raise SpecError(
                f"time: {self.time!r} is not longer than signal_lead_s={self.signal_lead_s}; the warning would come "
                "before the job begins: give more time or a shorter lead"
            )

    def _check_paths(self) -> None:
        for name in ("home", "python", "run_folder"):
            value = getattr(self, name)
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
