"""The ``srun`` commands of a job. Pure.

Input: the options of the batch file, the place of the job. Output: argument lists. Behaviour of pyxis
0.24 and enroot 4.1, and the consequences:

- Of two --container-mounts options the last one silently wins: pass a single list.
- The image's /etc/environment overrides the host's variables: --container-env lists those that the
  host must set, and ``env`` sets the settings' variables inside the container.
- PATH and working directory come from the image: use an interpreter of the image, and pass the
  working directory.
- A named container outlives its step: its name contains the job and its restart count and, with raw
  enroot, the node, because nodes may share ENROOT_DATA_PATH.
- An entrypoint may print, fork or change the directory: disable it.
- A raw .sqsh is mounted by a process of the step, which a signal to the step kills: extract the
  image first (``enroot.py``).

Python 3.6.
"""

from typing import List, Sequence

from slurm.batch.options import Options
from slurm.batch.place import Place
from slurm.container_command import Mount, command_words

HOST_VARIABLES = ("PYTHONPATH", "RLPOST_HOME")
"""Host variables that override the image's."""
ONE_TASK_PER_NODE = ("--ntasks-per-node=1", "--cpu-bind=none", "--mpi=none")
_ON_EACH_NODE = ("srun", "--ntasks-per-node=1", "--overlap", "--mpi=none")
KEEP_OTHER_TASKS = ("--kill-on-bad-exit=0", "--wait=0")


def output_pattern(folder: str, name: str) -> str:
    """srun's option for the output of the tasks; srun expands ``%`` in the whole of it."""
    return f"--output={folder}/{name}"


def in_container(place: Place) -> List[str]:
    """Words of the srun command that enter the container; empty for the node itself."""
    if place.container == "none":
        return []
    if place.container == "command":
        return [*command_prefix(place), "sh", f"{place.home}/slurm/enter.sh", place.home]
    always = [f"{path}:{path}" for path in (place.run_folder, place.home)]
    mounts = [*always, *map(_both_ends, place.mounts)]
    if place.container == "pyxis":
        return [
            f"--container-image={place.image}",
            f"--container-name={place.container_name}",
            "--container-writable",
            f"--container-mounts={','.join(mounts)}",
            f"--container-workdir={place.home}",
            "--no-container-mount-home",
            "--no-container-entrypoint",
            f"--container-env={','.join(HOST_VARIABLES)}",
        ]
    start = [*enroot_program(place), "start", place.image, place.container_name]
    return [*start, *map(_enroot_mount, mounts), "--"]


def command_prefix(place: Place) -> List[str]:
    """The words of ``--container-command`` for this job; further steps use the same.

    A code folder below the run folder is not mounted twice: some runtimes create each target.
    """
    always = [place.run_folder]
    if not place.home.startswith(f"{place.run_folder}/"):
        always.append(place.home)
    mounts = [Mount(path, path) for path in always]
    for mount in map(_both_ends, place.mounts):
        source, target, *mode = mount.split(":")
        mounts.append(Mount(source, target, "ro" if mode else "rw"))
    return command_words(place.command, place.image, mounts)


def enroot_program(place: Place) -> List[str]:
    """The program that each node runs outside the container, see ``slurm.enroot``."""
    return ["python3", "-I", f"{place.home}/slurm/enroot.py"]


def prepared(environment: Sequence[str], setup_commands: Sequence[str], home: str) -> List[str]:
    """Words before a node's command: set variables, then run the setup commands."""
    words = ["env", *environment] if environment else []
    if setup_commands:
        words += ["bash", f"{home}/slurm/prepare.sh", *setup_commands, "--"]
    return words


def agents_step(
    options: Options,
    place: Place,
    attempt_dir: str,
    *,
    agent: Sequence[str],
    driver: Sequence[str],
) -> List[str]:
    """The step of the agents: one on each node, with the driver's command."""
    srun = ["srun", *ONE_TASK_PER_NODE, *KEEP_OTHER_TASKS]
    sizes: List[str] = []
    if options.spare_nodes:
        srun.append("--no-kill")
        sizes = ["--num-nodes", str(options.nodes), "--spare-nodes", str(options.spare_nodes)]
    python = [place.python, "-u", "-m"]
    return [
        *srun,
        output_pattern(attempt_dir, "agent-%N.log"),
        *in_container(place),
        *prepared(options.environment, options.setup_command, place.home),
        *[*python, "bootstrap.agent", "--attempt-dir", attempt_dir],
        *["--num-gpus", str(options.gpus), *sizes, *agent, "--"],
        *[*python, "rlpost.train", *driver],
    ]


def page_step(place: Place) -> List[str]:
    """The command that writes the run's page again; on this node, in the container if there is one.

    Without the setup commands, which may be what failed.
    """
    report = [place.python, "-m", "rlpost", "report", place.run_folder]
    words = ["sh", "-c", 'exec "$@" > /dev/null 2>&1', "page", *report]
    if place.container == "none":
        return words
    return [
        "srun",
        "--nodes=1",
        "--ntasks=1",
        "--overlap",
        "--mpi=none",
        *in_container(place),
        *words,
    ]


def watch_step(options: Options, attempt_dir: str) -> List[str]:
    """The step that restarts the job if the batch host is lost; with spare nodes only.

    It runs on as many other nodes as can be lost, and one.
    """
    num_nodes = options.nodes + options.spare_nodes
    watching = min(options.spare_nodes + 1, num_nodes - 1)
    policy = "requeue" if options.requeue == "requeue" else "cancel"
    return [
        *["srun", "--no-kill", "--overlap", "--relative=1", f"--nodes={watching}"],
        *ONE_TASK_PER_NODE,
        output_pattern(attempt_dir, "watch-%N.log"),
        *["python3", "-m", "slurm.batch", "watch", policy, str(num_nodes)],
    ]


def stale_removal_step(place: Place) -> List[str]:
    """The step before the agents that removes what earlier pyxis containers left on each node.

    Otherwise a disk needs space for two images. Raw enroot does so itself, before it extracts the
    image.
    """
    return [*_ON_EACH_NODE, *enroot_program(place), "remove-stale", "pyxis"]


def removal_step(place: Place, folder: str) -> List[str]:
    """The step after the agents in which each node removes its extracted image.

    Raw enroot always leaves one. pyxis leaves one with its default scope "global"; removal is best
    effort there. In ``folder``, if one is given, nodes note that they freed space of earlier starts.
    """
    remove = [*enroot_program(place), "remove", place.container, place.container_name]
    return [*_ON_EACH_NODE, *remove, *([folder] if folder else [])]


def _both_ends(mount: str) -> str:
    """SOURCE:TARGET[:ro] of a mount with or without a target; ``rw`` is the default."""
    source, *rest = mount.split(":")
    mode = rest.pop() if rest and rest[-1] in ("ro", "rw") else ""
    target = rest[0] if rest else source
    return ":".join([source, target, "ro"] if mode == "ro" else [source, target])


def _enroot_mount(mount: str) -> str:
    source, target, *mode = mount.split(":")
    return f"{source}:{target}:x-create=auto,rbind" + (",ro" if mode else "")
