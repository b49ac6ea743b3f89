"""A command beside what a job runs already, on the host or in the job's container, as the words of one ``srun``. Pure.

Comes in: job, nodes, command, and the container that the agents run in. Goes out: an argv.

A container is entered by its name with all its mounts: pyxis joins the running one and ignores the mounts, or, where it
does not find the running one (its data on a bind mount), starts a second on the same files, and then they matter.
enroot is entered by the id of the process that runs in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm.container import HOST_VARIABLES, Container
from slurm.errors import JobError

# enroot list -f prints NAME PID COMM STATE ...; a container's name holds no blank.
_ENTER_ENROOT = """\
pid=$(enroot list -f | awk -v name="$0" '$1 == name && $2 ~ /^[0-9]+$/ {print $2; exit}')
[ -n "$pid" ] || { echo "no container $0 runs on $(hostname)" >&2; exit 1; }
exec enroot exec "$pid" "$@"\
"""


@dataclass(frozen=True, slots=True)
class Inside:
    """Where a step goes: the run's folder, its code and, with the job's restarts, the container if there is one."""

    run_folder: Path
    code: Path
    container: Container | None = None
    num_restarts: int = 0


def step_argv(
    job_id: str, command: Sequence[str], *, nodes: Sequence[str], inside: Inside, terminal: bool = False
) -> list[str]:
    """The ``srun`` that runs a command once on each of ``nodes``, in the code's folder.

    Args:
        terminal: give the command a terminal instead of numbering the lines of several nodes.

    Raises:
        JobError: there are no nodes; srun would choose one.
    """
    if not nodes:
        raise JobError(f"job {job_id} has no nodes")
    count = len(nodes)
    argv = ["srun", f"--jobid={job_id}", "--overlap", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1"]
    argv += [f"--nodelist={','.join(nodes)}", "--cpu-bind=none", "--mpi=none"]
    argv += ["--pty"] if terminal else ["--label"] if count > 1 else []
    container = inside.container
    if container is None:
        return [*argv, f"--chdir={inside.code}", *command]
    name = f"rlpost_{job_id}_{inside.num_restarts}"
    if container.backend == "enroot":
        return [*argv, "bash", "-c", _ENTER_ENROOT, name, *command]
    mounts = [f"{path}:{path}" for path in (inside.run_folder, inside.code)]
    mounts += map(_both_ends, container.mounts)
    argv += [f"--container-name={name}", f"--container-mounts={','.join(mounts)}", f"--container-workdir={inside.code}"]
    argv += ["--no-container-mount-home", "--no-container-entrypoint", f"--container-env={','.join(HOST_VARIABLES)}"]
    return [*argv, *command]


def _both_ends(mount: str) -> str:
    """SOURCE as SOURCE:SOURCE, with or without a mode; pyxis wants both."""
    source, *rest = mount.split(":")
    return mount if rest and rest[0].startswith("/") else ":".join((source, source, *rest))
