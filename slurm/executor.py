"""Submit a job: to Slurm through submitit, or to this machine if there is no Slurm.

Input: a ``JobSpec`` and the run folder. Output: a job id. submitit writes and submits the batch
script; ``render`` supplies its text, because submitit's own script runs a pickled function in every
task and requeues from inside the container, which may have no scontrol.
"""

from __future__ import annotations

import io
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path
from typing import Literal

import submitit

from common.files import write_atomic
from common.fleet_name import POLICY, fleet_name, group_of
from common.run_folder import RunFolder
from slurm.arrays import FleetSpec, SandboxSpec
from slurm.client import explain_with_sinfo
from slurm.errors import SlurmError, SubmitError, UnknownJobError
from slurm.job_id import (
    cluster_option,
    explain_submission,
    find_by_script,
    number_of,
    on_cluster,
    printed_ids,
    read_submission,
)
from slurm.local import LocalAttempt, start_detached
from slurm.render import render_fleet, render_sandbox, render_sbatch
from slurm.spec import JobSpec, completed
from slurm.submissions import (
    LOOKUP_S,
    Submission,
    announce,
    is_refused,
    look_up,
    may_be_queued,
    record,
    reject,
)
from slurm.variables import submission_environment

Where = Literal["slurm", "local", "debug"]
logger = logging.getLogger(__name__)


class RunExecutor(submitit.SlurmExecutor):
    """submitit's Slurm executor with our batch script, and the job id from ``--parsable``.

    submitit takes the first number after "job " in the output, also in a banner of a site's script.

    Args:
        folder: submitit's folder.
        script: text of the batch script.
        num_nodes: number of tasks, one per node.
        cluster: cluster to submit to; empty: as the environment says, else that of this host.
        announce: called with the path of the submission file before sbatch is.
    """

    def __init__(
        self,
        folder: Path,
        *,
        script: str,
        num_nodes: int,
        cluster: str = "",
        announce: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(folder=folder)
        self._script = script
        self._options = ["--parsable", *cluster_option(on_cluster("", cluster))]
        self._announce = announce
        self.file = ""
        self._job_id = ""
        self.update_parameters(nodes=num_nodes, ntasks_per_node=1)

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self._script

    def submit_script(self) -> str:
        """Write the script into submitit's folder, sbatch it, return the job id."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # submitit marks this "not recommended" because such a job has no pickled result.
        self._submit_command("")
        return self._job_id

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        self.file = str(submission_file_path)  # a new one for each submission
        if self._announce is not None:
            self._announce(self.file)
        return ["sbatch", *self._options, self.file]

    def _get_job_id_from_submission_command(self, string: str | bytes) -> str:  # type: ignore[override]
        output = string if isinstance(string, str) else string.decode(errors="replace")
        self._job_id = read_submission(output)
        if not self._job_id:
            self._job_id = self._find_job(output)
        return number_of(self._job_id)

    def _find_job(self, output: str) -> str:
        jobs = find_by_script(self.file, os.environ)
        if not jobs:
            raise UnknownJobError(explain_submission(output, self.file))
        return jobs[0]

    def job_after_error(self, error: RuntimeError) -> str:
        """The job that Slurm accepted although sbatch ended with an error; empty if there is none.

        Raises:
            UnknownJobError: Slurm may have the job, and squeue does not show it.
        """
        output = str(getattr(error.__cause__, "output", "") or "")
        words, printed = str(error), " or ".join(printed_ids(output))
        code = int(getattr(error.__cause__, "returncode", 1))
        seconds = LOOKUP_S if may_be_queued(words, printed, code) else 0.0
        jobs = look_up(self.file, os.environ, seconds=seconds)
        if jobs:
            logger.warning("sbatch ended with an error, and job %s is queued: %s", jobs[0], words)
            return printed if number_of(printed) == number_of(jobs[0]) else jobs[0]
        if is_refused(words, printed, code, jobs):
            return ""
        named = f" (sbatch printed the id {printed})" if printed else ""
        raise UnknownJobError(
            f"{words or f'sbatch ended with {code} and no message'}{named}; the job may be queued (squeue --me)"
        )


def submit(spec: JobSpec, run: RunFolder, *, home: Path, where: Where) -> str:
    """Submit a run and return its job id: from Slurm, or ``local-PID`` for a run on this machine.

    Args:
        spec: the job; ``completed`` fills the paths that it leaves open.
        run: the run folder, which must exist.
        home: folder with the code to run, usually ``run.code``.
        where: ``slurm``; ``local``, a detached process on this machine; or ``debug``, this process
            under submitit's DebugExecutor: the run is over when this returns, and a failure enters
            the debugger.

    Raises: SubmitError: sbatch rejected the job (with its output), or several nodes were requested
        on this machine.
    """
    spec = completed(spec, run, home=home)
    if where != "slurm":
        return _submit_locally(spec, run, debug=where == "debug")
    num_nodes = spec.nodes + spec.spare_nodes
    make_log_folder(spec.output or "")
    intent = Submission("", "submitted", {"nodes": spec.nodes})
    script = render_sbatch(spec)
    return _submit_and_record(intent, script, run.script, run, os.environ, num_nodes=num_nodes)


def submit_fleet(
    spec: FleetSpec, run: RunFolder, environ: Mapping[str, str], *, cluster: str = ""
) -> str:
    """Submit the engine jobs of a run's fleet and record them, as ``submit``; the array's id."""
    group = group_of(spec.job.agent_args)
    path = run.root / fleet_name(group) / "job.sbatch"
    details = {"engines": spec.num_engines, **({} if group == POLICY else {"group": group})}
    intent = Submission("", "fleet", details)
    return _submit_and_record(intent, render_fleet(spec), path, run, environ, cluster=cluster)


def submit_sandboxes(
    spec: SandboxSpec, run: RunFolder, environ: Mapping[str, str], *, cluster: str = ""
) -> str:
    """Submit the sandbox servers of a run and record them, as ``submit``; the array's id."""
    path = run.root / "sandboxes" / "job.sbatch"
    path.parent.mkdir(exist_ok=True, mode=0o700)
    intent = Submission("", "sandboxes", {"servers": spec.num_servers})
    script = render_sandbox(spec)
    return _submit_and_record(intent, script, path, run, environ, cluster=cluster)


def _submit_and_record(
    intent: Submission,
    script: str,
    path: Path,
    run: RunFolder,
    environ: Mapping[str, str],
    *,
    num_nodes: int = 1,
    cluster: str = "",
) -> str:
    """Submit a script of a run as ``submit_script``; the ledger has it before and after."""
    clusters = cluster or environ.get("SBATCH_CLUSTERS", "")
    intents: list[Submission] = []

    def note(file: str) -> None:
        intents.append(intent._replace(file=file, clusters=clusters))
        announce(run.ledger, intents[0])

    try:
        job_id = submit_script(
            script,
            path,
            num_nodes,
            environ,
            folder=run.submitit,
            cluster=cluster,
            announce=note,
        )
    except UnknownJobError as error:
        remedy = f"the next rlpost command for {run.root} looks it up; nothing else is submitted until then"
        raise UnknownJobError(f"{error}; {remedy}") from error
    except SubmitError as error:
        if intents:
            reject(run.ledger, intents[0], str(error).splitlines()[-1])
        raise
    record(run.ledger, intents[0], job_id)
    return job_id


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
    cluster: str = "",
    announce: Callable[[str], None] | None = None,
) -> str:
    """Write a batch script to ``path`` and submit it; return the id of the job (``job_id``).

    If sbatch fails, squeue is asked whether Slurm has the job all the same.

    Args:
        environ: environment of sbatch, which sends it to Slurm; without keys.
        folder: submitit's folder; by default ``submitit`` beside ``path``.
        cluster: cluster to submit to; empty: as ``environ`` says, else that of this host.
        announce: called with the file that sbatch gets, before it is called.

    Raises:
        SubmitError: sbatch rejected the job (with its message and the remedy).
        UnknownJobError: the job may be queued, but its id is not known.
    """
    folder = folder or path.parent / "submitit"
    write_atomic(path, script, mode=0o700)
    with _environment(submission_environment(environ, script)):
        executor = RunExecutor(
            folder, script=script, num_nodes=num_nodes, cluster=cluster, announce=announce
        )
        try:
            # submitit prints sbatch's message and raises it: it is shown once, with the remedy.
            with redirect_stderr(io.StringIO()):
                return executor.submit_script()
        except RuntimeError as error:
            if job_id := executor.job_after_error(error):
                return job_id
            explained = explain_with_sinfo(str(error), cluster)
            raise SubmitError(f"sbatch rejected {path}: {explained}") from error


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
    job_id = f"local-{start_detached(spec, run.submitit)}"
    run.ledger.append("submitted", job_id=job_id, nodes=1, host=socket.gethostname())
    return job_id
