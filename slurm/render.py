"""Render a job spec as the text of a batch file. Pure.

Input: a ``JobSpec``. Output: a file for ``sbatch`` of at most 30 lines, ``shellcheck``-clean: the
``#SBATCH`` lines, and one call of ``slurm.batch`` on the batch host, which does the rest and gives
the reason for each step.

A spec without ``home``, ``python`` and ``run_folder`` renders a file that finds them at run time,
for plain ``sbatch jobs/NAME.sbatch`` from the project folder. Its head names the variables that a
user may set. Outside a job such a file checks and submits itself (``login.py``).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from slurm.arrays import FleetSpec, SandboxSpec
from slurm.batch.options import Options, needed_variables, words
from slurm.sbatch_options import OF_SETTINGS, split_gres
from slurm.spec import JobSpec
from slurm.variables import OURS

LINE_WIDTH = 96
ALWAYS_READ = ("RLPOST_HOME", "RLPOST_RUN_FOLDER", "RLPOST_PYTHON")
FOR_AUTO = ("RLPOST_IMAGE", "RLPOST_IMAGE_CACHE", "RLPOST_CONTAINER")


def render_sbatch(spec: JobSpec) -> str:
    """Render the batch file of a run."""
    agent = spec.agent_args
    groups = ["--", *map(shlex.quote, agent), "--", *map(shlex.quote, spec.driver_args)]
    return _file(spec, "run", directives(spec), [*groups, "--", '"$@"'], agent=agent)


def render_fleet(spec: FleetSpec) -> str:
    """Render the batch file of a fleet's engine jobs, an array of independent tasks."""
    first = [[f"--array=0-{spec.num_engines - 1}"]]
    if spec.after is not None:
        # A requeue of the run's job does not restore the dependency: engines wait for the run
        # instead.
        first.append([f"--dependency=after:{spec.after}"])
    head = directives(spec.job, first=first)
    return _file(spec.job, "engine", head, ["--", *map(shlex.quote, spec.job.agent_args)])


def render_sandbox(spec: SandboxSpec) -> str:
    """Render the batch file of sandbox servers, an array of tasks on nodes of a CPU partition."""
    array = [f"--array=0-{spec.num_servers - 1}", f"--cpus-per-task={spec.cores}"]
    if spec.memory_mib and not spec.job.exclusive:
        array.append(f"--mem={spec.memory_mib}M")
    if spec.after is not None:
        array.append(f"--dependency=after:{spec.after}")
    server = [spec.module, "--places", str(spec.places), "--warm", str(spec.warm)]
    if spec.image is not None:
        server += ["--image", spec.image]
    for path in spec.read_only:
        server += ["--read-only", path]
    head = directives(spec.job, first=[array])
    groups = ["--", *map(shlex.quote, server)]
    return _file(spec.job, "sandbox", head, groups, cores=spec.cores, gpus=0)


def render_conversion(spec: JobSpec, save: str) -> str:
    """Render the batch file that converts weights into ``save`` (``rlpost convert``).

    ``driver_args`` are the tool's direction and arguments. A leading variable of ``save`` is
    expanded in the job.
    """
    head = directives(spec, is_warned=False)
    groups = ["--", *map(shlex.quote, spec.driver_args), "--", '"$@"']
    return _file(spec, "convert", head, groups, agent=spec.driver_args, save=save)


def render_look(spec: JobSpec) -> str:
    """Render the batch file that runs ``bootstrap.image.doctor`` where agents would run.

    ``driver_args`` are the tool's arguments.
    """
    head = directives(spec, is_warned=False)
    return _file(spec, "doctor", head, ["--", *map(shlex.quote, spec.driver_args)])


def directives(
    spec: JobSpec, *, is_warned: bool = True, first: Sequence[Sequence[str]] = ()
) -> str:
    """Render the ``#SBATCH`` lines, with the options of ``first`` before those of the spec.

    ``is_warned``: the batch shell gets USR2 before the time limit.
    """
    nodes = [f"--nodes={spec.nodes + spec.spare_nodes}", "--ntasks-per-node=1"]
    nodes += ["--no-kill"] if spec.spare_nodes else []
    nodes += ["--exclusive", "--mem=0"] if spec.exclusive else []
    gpus = ":".join(filter(None, (spec.gpu_type, str(spec.num_gpus_per_node))))
    further, gres = split_gres(spec.sbatch)
    if spec.gpu_request == "gres":
        gres.insert(0, f"gpu:{gpus}")
    elif spec.gpu_request == "gpus-per-node":
        nodes.append(f"--gpus-per-node={gpus}")
    nodes += [_option("gres", ",".join(gres))] if gres else []
    stated = {option.name: getattr(spec, option.key) for option in OF_SETTINGS}
    stated["exclude"] = ",".join(spec.exclude)
    name, time, *place = [_option(name, value) for name, value in stated.items() if value]
    again = ["--requeue"] if spec.requeue == "requeue" else ["--no-requeue"]
    again += ["--dependency=singleton"] if spec.requeue == "chain" else []
    warning = [f"--signal=B:USR2@{spec.signal_lead_s}"] if is_warned else []
    # Of an option that is stated twice sbatch takes the last: the job's own come after any other.
    lines = [*([_option(*word[2:].split("=", 1))] for word in further), *first]
    lines += [[name], nodes, place, [time, *warning, *again, "--open-mode=append"]]
    lines.append([_option("output", spec.output or "slurm-%j.out")])
    return "#!/bin/bash\n" + "".join(f"#SBATCH {' '.join(line)}\n" for line in lines if line)


def _option(name: str, *value: object) -> str:
    """An option of sbatch, with its value if it takes one."""
    return "=".join([f"--{name}", *(shlex.quote(str(text)) for text in value)])


def _file(
    spec: JobSpec,
    verb: str,
    head: str,
    groups: Sequence[str],
    *,
    agent: Sequence[str] = (),
    **values: object,
) -> str:
    """The text of a batch file. ``groups``: quoted words after the options."""
    options = _options(spec, **values)
    script_option = ['--script="$0"'] if spec.home is None else []
    arguments = [*script_option, *map(shlex.quote, words(options)), *groups]
    command = _wrapped(["exec python3 -m slurm.batch", verb, *arguments])
    if spec.home is None:
        about, home = _variables(spec, options, agent), _HOME_AT_RUN_TIME
    else:
        about, home = "", shlex.quote(spec.home)
    return f"{head}{about}{_BODY.replace('@HOME@', home)}{command}\n"


_HOME_AT_RUN_TIME = '${RLPOST_HOME:-${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}}'
_BODY = """\
home=@HOME@
cd "$home/slurm/.." || { echo "no rlpost in $home; sbatch there or set RLPOST_HOME"; exit 78; }
command -v python3 >/dev/null || { echo "no python3 on $HOSTNAME; install 3.6 or newer"; exit 78; }
export RLPOST_HOME=$PWD PYTHONPATH=$PWD
trap '' USR2 # slurm.batch handles it; until then it must not end the job
"""


def _options(spec: JobSpec, **values: object) -> Options:
    """The spec's values for the batch host."""
    container = spec.container
    fields = {
        "name": spec.job_name,
        "run_folder": spec.run_folder or "",
        "python": spec.python or "",
        "node_python": spec.host_python or "",
        "environment": tuple(f"{name}={value}" for name, value in spec.environment),
        "setup_command": spec.setup_commands,
        "reads": spec.reads,
        "gpus": spec.num_gpus_per_node,
        "nodes": spec.nodes,
        "spare_nodes": spec.spare_nodes,
        "requeue": spec.requeue,
        "max_preemptions": spec.max_preemptions,
        "max_failures": spec.max_failures,
        "max_stalled_attempts": spec.max_stalled_attempts,
        "exclude": spec.exclude,
        "teardown_s": spec.teardown_s,
        "signal_lead_s": spec.signal_lead_s,
    }
    if container is not None:
        fields |= {
            "container": container.backend,
            "container_command": container.command,
            "image": container.image,
            "image_cache": container.cache or "",
            "mount": container.mounts,
        }
    return Options(**{**fields, **values})  # type: ignore[arg-type]


def _variables(spec: JobSpec, options: Options, agent: Sequence[str]) -> str:
    """Comments that name the variables of a user."""
    needed = needed_variables(options, agent)
    lines = [
        "",
        "Submit with: sbatch FILE [FLAGS]; or call the file, which checks everything first.",
        "Variables, exported before that:",
    ]
    for name, meaning in OURS.items():
        if (
            name in needed
            or name in ALWAYS_READ
            or (options.container == "auto" and name in FOR_AUTO)
        ):
            text = meaning.format(name=spec.job_name)
            lines.append(f"  {name:<19} {text}{' (required)' if name in needed else ''}")
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def _wrapped(arguments: Iterable[str]) -> str:
    """Words on lines of at most LINE_WIDTH columns, as far as the words allow."""
    lines: list[str] = []
    for word in arguments:
        if lines and len(lines[-1]) + 1 + len(word) <= LINE_WIDTH and word != "--":
            lines[-1] += " " + word
        else:
            lines.append(("  " if lines else "") + word)
    return " \\\n".join(lines)
