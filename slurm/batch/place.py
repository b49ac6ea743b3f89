"""Where a job runs: code, run folder, interpreter, container. Found before anything waits for nodes.

Input: the options of the batch file, the environment. Output: a ``Place``, or an error that names
every missing variable and wrong value. Python 3.6.
"""

import os
import shutil
import socket
from typing import Mapping, NamedTuple, Sequence, Tuple

from common.attempt import job_name
from slurm.batch.options import Options, expand, expand_mount, needed_variables
from slurm.container_choice import choose
from slurm.container_command import program_of
from slurm.errors import SpecError


class Place(NamedTuple):
    """The folders and programs of a job.

    Attributes:
        home: folder of the code.
        run_folder: absolute; one for each task of an array.
        python: interpreter of the agents, in their container if any.
        container: none, pyxis, enroot or command.
        image: path or name of the image; empty without a container.
        container_name: name of this start's container on every node.
        mounts: SOURCE:TARGET[:MODE] beside the run folder and the code.
        command: the template of ``slurm.container_command``; empty for other containers.
    """

    home: str
    run_folder: str
    python: str
    container: str
    image: str
    container_name: str
    mounts: Tuple[str, ...]
    command: str = ""


def find_place(
    options: Options, agent: Sequence[str], run_folder: str, environ: Mapping[str, str]
) -> Tuple[Place, str]:
    """The place of this job, and a line about its container; empty without a choice.

    ``agent``: the words of the agent, which may name variables.

    Raises:
        SpecError: something is missing; with the remedy.
    """
    home = environ["RLPOST_HOME"]
    image = expand(options.image, environ)
    needed = needed_variables(options, agent)
    if options.container == "none":
        container, why = "none", ""
        missing = [name for name in needed if not environ.get(name)]
        if missing:
            raise SpecError(f"not set: {' '.join(missing)}; export before sbatch")
    else:
        container, why = choose(options.container, image, needed, environ)
        if container == "command":
            _require_program(program_of(options.container_command), environ)
    if container == "none":
        python = _python_of_the_node(options, environ)
    else:
        python = options.python or environ.get("RLPOST_PYTHON", "") or "python3"
    place = Place(
        home=home,
        run_folder=run_folder,
        python=python,
        container=container,
        image="" if container == "none" else image,
        container_name=container_name(
            environ["SLURM_JOB_ID"], environ.get("SLURM_RESTART_COUNT") or "0"
        ),
        mounts=tuple(expand_mount(mount, environ) for mount in options.mount),
        command=options.container_command,
    )
    return place, why


def _require_program(program: str, environ: Mapping[str, str]) -> None:
    if shutil.which(program, path=environ.get("PATH", os.defpath)) is None:
        raise SpecError(
            f"--container-command {program}: not on the PATH of {socket.gethostname()}; give its absolute path, or "
            "load its module where sbatch is called"
        )


def container_name(job_id: str, num_restarts: str) -> str:
    """Name of the container of one start of a job, because a named one may outlive its step.

    Raw enroot appends the node, because nodes may share the data folder; pyxis prepends ``pyxis_``
    (scope "global") or ``pyxis_JOB_`` (scope "job").
    """
    return f"rlpost_{job_id}_{num_restarts}"


def _python_of_the_node(options: Options, environ: Mapping[str, str]) -> str:
    given = options.python or options.node_python or environ.get("RLPOST_PYTHON", "")
    python = given or f"{environ['RLPOST_HOME']}/.venv/bin/python"
    if shutil.which(python) is None:
        raise SpecError(
            f"no {python} on {socket.gethostname()}; make install there, or export RLPOST_PYTHON"
        )
    return python


def find_run_folder(options: Options, environ: Mapping[str, str]) -> str:
    """The run folder of this job, absolute. Pure.

    Raises:
        SpecError: the tasks of an array would share one, or Slurm cannot write logs into it.
    """
    task = environ.get("SLURM_ARRAY_TASK_ID", "")
    if options.run_folder:
        if task:
            raise SpecError(
                f"--array: all tasks would write to {options.run_folder}, the run folder of this "
                "file; submit jobs/NAME.sbatch with --array, which gives each task a folder"
            )
        return options.run_folder
    home = environ["RLPOST_HOME"]
    run_folder = environ.get("RLPOST_RUN_FOLDER", "")
    folder = os.path.join(home, f"{run_folder}-{task}" if task else run_folder)
    if not run_folder:
        folder = f"{home}/runs/{options.name}-{job_name(environ)}"
    if "%" in folder:
        raise SpecError(
            f"RLPOST_RUN_FOLDER={folder}: contains '%', which srun replaces in the names of log files; "
            "choose another path"
        )
    return folder
