"""Build the ``srun`` command for another step, on a host or in its container. Pure.

Input: job, nodes, command, and the agents' container. Output: an argv.

A pyxis container is entered by name, with all its mounts. pyxis joins the running container and
ignores the mounts; if it does not find the running one (its data on a bind mount), it starts a
second one on the same files, which needs the mounts, and reports that. An enroot container is
entered by the pid of a process in it (``enroot.py``). A container of ``--container-command`` is
started again, with the words that its batch host wrote: the same files, mounts and processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm.batch.place import container_name
from slurm.batch.steps import HOST_VARIABLES
from slurm.container import Container
from slurm.errors import JobError
from slurm.job_id import cluster_option, number_of

# Runs in the container before the command. If enroot's data folder is a bind mount, pyxis does not
# recognise the running container. The roots of the agent's container and of this one have the same
# mount id only if the containers are the same (proc(5), mountinfo). The brackets keep grep from
# matching its own command line.
_WARN_OF_SECOND_CONTAINER = """\
root_of() { while read -r id _ _ _ point _; do [ "$point" != / ] || echo "$id"; done <"/proc/$1/mountinfo"; }
here=$(root_of self 2>/dev/null) agent='' same=''
for file in $(grep -ls 'bootstrap[.]agent' /proc/[0-9]*/cmdline 2>/dev/null); do
  pid=${file#/proc/}; agent=$(root_of "${pid%/cmdline}" 2>/dev/null)
  [ -z "$agent" ] || [ "$agent" != "$here" ] || same=1
done
[ -z "$agent" ] || [ "$same" ] || echo "note: pyxis did not find the agents' container and started a second one on the \
same files (is ENROOT_DATA_PATH a bind mount? docs/containers.md): /tmp is not that of the run" >&2
exec "$@"\
"""


@dataclass(frozen=True, slots=True)
class Inside:
    """The location and environment of a step.

    Attributes:
        run_folder: the run's folder, which is mounted into its container.
        home: folder of the run's code, the step's working directory; outside the run's folder after
            a plain sbatch.
        container: the agents' container; None for the node itself.
        num_restarts: restart count of the job, part of the container's name.
        environment: (name, value) of variables that the recipe and Ray's commands need in addition
            to the environment of srun.
        prefix: words before a command with the backend ``command``.
    """

    run_folder: Path
    home: Path
    container: Container | None = None
    num_restarts: int = 0
    environment: tuple[tuple[str, str], ...] = ()
    prefix: tuple[str, ...] = ()


def step_argv(
    job_id: str,
    command: Sequence[str],
    *,
    nodes: Sequence[str],
    inside: Inside,
    terminal: bool = False,
) -> list[str]:
    """The ``srun`` command that runs ``command`` once on each of ``nodes``.

    The command runs in the code's folder with the agents' environment.

    Args:
        job_id: of a job or, for a task of an array, the task's own number; with its cluster.
        terminal: allocate a terminal; otherwise label the output lines of several nodes.

    Raises:
        JobError: ``nodes`` is empty, and srun would choose one.
    """
    if not nodes:
        raise JobError(f"job {job_id} has no nodes")
    count = len(nodes)
    argv = ["srun", *cluster_option(job_id), f"--jobid={number_of(job_id)}"]
    argv += ["--overlap", f"--nodes={count}"]
    argv += [f"--ntasks={count}", "--ntasks-per-node=1"]
    argv += [f"--nodelist={','.join(nodes)}", "--cpu-bind=none", "--mpi=none"]
    if terminal:
        argv.append("--pty")
    elif count > 1:
        argv.append("--label")
    # env sets them inside the container: with pyxis the image's /etc/environment overrides srun's
    # environment, and enroot exec uses only the environment of the process that it joins.
    pairs = [f"{name}={value}" for name, value in inside.environment]
    command = ["env", *pairs, *command] if pairs else list(command)
    container = inside.container
    if container is None:
        return [*argv, f"--chdir={inside.home}", *command]
    if container.backend == "command":
        enter = ["sh", f"{inside.home}/slurm/enter.sh", str(inside.home)]
        return [*argv, *inside.prefix, *enter, *command]
    name = container_name(number_of(job_id), str(inside.num_restarts))
    if container.backend == "enroot":
        return [*argv, "python3", "-I", f"{inside.home}/slurm/enroot.py", "exec", name, *command]
    mounts = [f"{path}:{path}" for path in (inside.run_folder, inside.home)]
    mounts += map(_both_ends, container.mounts)
    argv += [f"--container-name={name}", f"--container-mounts={','.join(mounts)}"]
    argv += [f"--container-workdir={inside.home}", "--no-container-mount-home"]
    argv += ["--no-container-entrypoint", f"--container-env={','.join(HOST_VARIABLES)}"]
    return [*argv, "sh", "-c", _WARN_OF_SECOND_CONTAINER, "sh", *command]


def _both_ends(mount: str) -> str:
    """Expand SOURCE to SOURCE:SOURCE, with or without a mode; pyxis requires both."""
    source, *rest = mount.split(":")
    return mount if rest and rest[0].startswith("/") else ":".join((source, source, *rest))
