"""Submit a job through submitit: to Slurm, or to this machine if there is no Slurm.

Input: a ``JobSpec`` and the run folder. Output: a job id. submitit writes and submits the batch
script; ``render`` supplies its text, because submitit's own script runs a pickled function in every
task and requeues from inside the container, which may have no scontrol.
"""

from __future__ import annotations

import hashlib
import math
import os
import shlex
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

import submitit

from common.files import write_atomic
from common.run_folder import RunFolder
from slurm.environment import for_script
from slurm.errors import SlurmError, SubmitError
from slurm.local import LocalAttempt
from slurm.render import render_sbatch
from slurm.render_fleet import FleetSpec, render_fleet
from slurm.render_sandbox import SandboxSpec, render_sandbox
from slurm.spec import JobSpec

Where = Literal["slurm", "local", "debug"]


class RunExecutor(submitit.SlurmExecutor):
    """submitit's Slurm executor with our batch script.

    Args:
        folder: submitit's folder.
        script: text of the batch script.
        num_nodes: number of tasks, one per node.
    """

    def __init__(self, folder: Path, *, script: str, num_nodes: int) -> None:
        super().__init__(folder=folder)
        self._script = script
        self.update_parameters(nodes=num_nodes, ntasks_per_node=1)

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self._script

    def submit_script(self) -> str:
        """Write the script into submitit's folder, sbatch it, return the job id."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # submitit marks this "not recommended" because such a job has no pickled result.
        return self._submit_command("").job_id


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


def submit(spec: JobSpec, run: RunFolder, *, home: Path, where: Where) -> str:
    """Submit a run and return its job id: from Slurm, or ``local-PID`` for a run on this machine.

    Args:
        spec: the job; ``completed`` fills the paths that it leaves open.
        run: the run folder, which must exist.
        home: folder with the code to run, usually ``run.code``.
        where: ``slurm``; ``local``, this machine under submitit's LocalExecutor; or ``debug``, this
            process under its DebugExecutor: the run is over when this returns, and a failure enters
            the debugger.

    Raises: SubmitError: sbatch rejected the job (with its output), or several nodes were requested
        on this machine.
    """
    spec = completed(spec, run, home=home)
    if where != "slurm":
        return _submit_locally(spec, run, debug=where == "debug")
    num_nodes = spec.nodes + spec.spare_nodes
    make_log_folder(spec.output or "")
    job_id = submit_script(
        render_sbatch(spec), run.script, num_nodes, os.environ, folder=run.submitit
    )
    run.ledger.append("submitted", job_id=job_id, nodes=spec.nodes)
    return job_id


def submit_fleet(spec: FleetSpec, run: RunFolder, environ: Mapping[str, str]) -> str:
    """Submit the engine jobs of a run's fleet, as ``submit_script``; return the array's id."""
    path = run.root / "fleet" / "job.sbatch"
    return submit_script(render_fleet(spec), path, 1, environ, folder=run.submitit)


def submit_sandboxes(spec: SandboxSpec, run: RunFolder, environ: Mapping[str, str]) -> str:
    """Submit the sandbox servers of a run, as ``submit_script``; return the array's id."""
    path = run.root / "sandboxes" / "job.sbatch"
    path.parent.mkdir(exist_ok=True, mode=0o700)
    return submit_script(render_sandbox(spec), path, 1, environ, folder=run.submitit)


def make_log_folder(output: str) -> None:
    """Create the folder of a job's log, unless its name contains a pattern of sbatch.

    Slurm before 23.02 fails a job whose folder is missing; later versions create it on the node,
    where a folder that is not shared is lost.
    """
    folder = Path(output).parent
    if "%" not in str(folder):
        folder.mkdir(parents=True, exist_ok=True)


def submit_script(
    script: str,
    path: Path,
    num_nodes: int,
    environ: Mapping[str, str],
    *,
    folder: Path | None = None,
) -> str:
    """Write a batch script to ``path`` and submit it; return the id of the job.

    Args:
        environ: environment of sbatch, which sends it to Slurm; without keys.
        folder: submitit's folder; by default ``submitit`` beside ``path``.

    Raises: SubmitError: sbatch rejected the job (with its output).
    """
    folder = folder or path.parent / "submitit"
    write_atomic(path, script, mode=0o700)
    try:
        with _environment(for_script(environ, script)):
            return RunExecutor(folder, script=script, num_nodes=num_nodes).submit_script()
    except RuntimeError as error:
        raise SubmitError(f"sbatch rejected {path}: {error}") from error


@contextmanager
def _environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """Reduce ``os.environ`` to ``wanted`` for the block: submitit passes it to sbatch unchanged."""
    others = {name: os.environ.pop(name) for name in os.environ.keys() - wanted.keys()}
    try:
        yield
    finally:
        os.environ.update(others)


def _submit_locally(spec: JobSpec, run: RunFolder, *, debug: bool) -> str:
    if spec.nodes != 1:
        raise SubmitError(f"nodes={spec.nodes} needs Slurm; without it (or with --local) use 1")
    if spec.container:
        raise SubmitError(
            f"container={spec.container.backend!r} needs Slurm; without it (or with --local) use 'none'"
        )
    assert spec.home and spec.python
    if debug:
        job_id = f"local-{os.getpid()}"
        run.ledger.append("submitted", job_id=job_id, nodes=1, host=socket.gethostname())
        with suppress(SlurmError):  # the attempt's folder holds the verdict
            submitit.DebugExecutor(folder=run.submitit).submit(LocalAttempt(spec)).result()
        return job_id
    # The process must import this package from any working directory. It must also keep the user's
    # GPUs: submitit sets CUDA_VISIBLE_DEVICES to 0, 1, ...
    variables = [f"PYTHONPATH={spec.home}"]
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        variables.append(f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']}")
    python = shlex.join(["env", *variables, spec.python])
    executor = submitit.LocalExecutor(folder=run.submitit, python=python)
    executor.update_parameters(
        # A fallback: the attempt itself ends at the time limit.
        timeout_min=math.ceil(spec.time_limit_s / 60) + 1,
        signal_delay_s=spec.signal_lead_s + 60,
        gpus_per_node=spec.num_gpus_per_node,
    )
    job_id = f"local-{executor.submit(LocalAttempt(spec)).job_id}"
    run.ledger.append("submitted", job_id=job_id, nodes=1, host=socket.gethostname())
    return job_id
