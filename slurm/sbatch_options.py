"""The options of sbatch: which settings have, which a job itself decides, and all others. Pure.

Input: words of ``[cluster] sbatch``, passed to sbatch as they are. Output: what is wrong with them.
An option with a setting of its own is a row of ``OF_SETTINGS``, a key of [cluster] and a field of
``JobSpec``. An option is refused only where it collides with something that the job states or
relies on; ``_REFUSED`` says with what. Python 3.6.
"""

import re
from typing import List, NamedTuple, Sequence, Tuple

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_NAMES = r"[A-Za-z0-9][A-Za-z0-9._,-]*"
# man sbatch, --constraint: features, AND, OR, counts, matching and exclusive or
_CONSTRAINT = r"[A-Za-z0-9_(\[][A-Za-z0-9_.,:&|*()\[\]=-]*"
_BY_NAME = "use letters, digits, '.', '_' and '-', a letter or digit first"
_WORD = re.compile(r"--(?P<name>[a-z][a-z0-9-]*)(?:=(?P<value>[^\\$`]*))?")


class Option(NamedTuple):
    """An option of sbatch, and the key of [cluster] of the same name and meaning."""

    key: str
    pattern: str = ""
    """Allowed values; empty: the job's specification checks the value."""
    syntax: str = _BY_NAME
    """What the pattern allows, as a remedy."""
    has_variable: bool = False
    """SBATCH_NAME of the submitting shell is respected."""

    @property
    def name(self) -> str:
        """The option without its dashes."""
        return self.key.replace("_", "-")


OF_SETTINGS = (
    Option("job_name", NAME),
    Option("time"),
    Option("partition", _NAMES, has_variable=True),
    Option("account", NAME, has_variable=True),
    Option("qos", NAME, has_variable=True),
    Option("reservation", _NAMES, has_variable=True),
    Option(
        "constraint",
        _CONSTRAINT,
        "use features with & | , * ( ) [ ] between them",
        has_variable=True,
    ),
    Option("segment"),
    Option("exclude"),
)
GPU_TYPE = r"[A-Za-z0-9][A-Za-z0-9._+-]*"
"""Type of a GPU in a request of Slurm: h100, or a MIG profile such as 1g.10gb."""

OF_WHOLE_NODES = ("exclusive", "mem", "mem-per-cpu", "mem-per-gpu", "oversubscribe")
"""Options that a job may have unless it requests whole nodes."""

GPU_REQUESTS = ("gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task")
"""Options that request GPUs alone."""
RESOURCES = ("gres", "tres-per-task")
"""Options that list resources, GPUs or others."""
_BESIDE_GPUS = (
    "cpus-per-gpu",
    "gpu-bind",
    "gpu-freq",
    "gres-flags",
    "mem-per-gpu",
    "tres-bind",
)
"""Options that mean nothing without a request for GPUs."""
_GPU = re.compile(r"(?:gres[/:])?(?:gpu|mps|shard)(?![^:/=])")
"""An entry of a list of resources that names GPUs. Slurm rejects gpu beside mps or shard (src/
interfaces/gres.c, have_gres_shared)."""
_OF_THE_RUN = ("dependency", "kill-on-invalid-dep", "nodelist", "nodefile", "batch")
"""Options that belong to the job of a run alone, not to its engines and sandboxes on other jobs."""


class Job(NamedTuple):
    """What a job states itself, where that depends on its settings."""

    is_exclusive: bool
    gpu_request: str
    requeue: str


_STATED = "the job states --{} itself"
_REFUSED = (
    # names, why (empty: the job states it itself), what to do instead
    (
        "ntasks ntasks-per-gpu ntasks-per-node ntasks-per-tres tasks-per-node",
        "a job has one task on each node",
        "use --nodes",
    ),
    ("gid uid", "a job runs as the user who submits it", "leave the option out"),
    (
        "array",
        "a run is one job",
        "use rlpost sweep, where installed, or sbatch --array=... jobs/NAME.sbatch",
    ),
    (
        "clusters cluster",
        "all commands for a run read the cluster where they look for its jobs",
        "export SBATCH_CLUSTERS=...",
    ),
    ("chdir", "the job changes to the folder of its code", "use --runs-dir for its files"),
    (
        "autocomplete help usage version",
        "sbatch would answer without submitting anything",
        "leave the option out",
    ),
    ("parsable", "", "leave the option out"),
    ("quiet", "sbatch would not print the id of the job", "leave the option out"),
    ("external", "Slurm would start no batch script", "leave the option out"),
    ("error", "the run folder has one log for output and errors", "leave the option out"),
    ("open-mode output", "", "leave the option out: the log is in the run folder"),
    ("wrap", "the script is that of the job", "use --setup-commands"),
    (
        "container container-id container-type",
        "the batch script must run on the node itself",
        "use --container and --container-image",
    ),
    (
        "export export-file get-user-env",
        "variables of a run are a setting, which holds inside containers too",
        "use --environment, or export SBATCH_EXPORT=NONE or SBATCH_GET_USER_ENV=... in the shell",
    ),
    ("nodes", "", "use --nodes and --spare-nodes"),
    ("no-kill", "without spare nodes a run needs all of its nodes", "use --spare-nodes"),
    ("requeue no-requeue", "", "use --requeue"),
    ("signal", "", "use --signal-lead-s"),
    ("test-only", "sbatch would submit nothing", "use rlpost submit --test-only"),
    ("wait", "the run is followed through its folder", "use rlpost submit --wait"),
    *((option.name, "", f"use --{option.name}") for option in OF_SETTINGS),
)
_REMEDIES = {name: (why, remedy) for names, why, remedy in _REFUSED for name in names.split()}
_KNOWN = (
    *_REMEDIES,
    *(*OF_WHOLE_NODES, *GPU_REQUESTS, *RESOURCES, *_BESIDE_GPUS, *_OF_THE_RUN),
)
"""Full names of the options that this module treats differently from all others."""


def word_problem(word: str, job: Job) -> str:
    """What is wrong with an option that is passed through; empty if nothing.

    >>> job = Job(is_exclusive=True, gpu_request="gres", requeue="requeue")
    >>> word_problem("--licenses=site:8", job)
    ''
    >>> word_problem("--part=gpu", job)
    "sbatch: '--part=gpu'; the job states --partition itself; use --partition"
    """
    match = _WORD.fullmatch(word)
    if match is None:
        return (
            f"sbatch: {word!r}; write --NAME or --NAME=VALUE in one word, the long name of an option "
            "of sbatch, without a backslash, '$' or '`': nothing is expanded"
        )
    name = _full_name(match.group("name"))
    why, remedy = _REMEDIES.get(name) or _collision(name, match.group("value") or "", job)
    if not remedy:
        return ""
    return f"sbatch: {word!r}; {why or _STATED.format(name)}; {remedy}"


def _full_name(name: str) -> str:
    """The option that sbatch takes for this name: it accepts the beginning of a name."""
    if name.startswith("container-"):  # of pyxis
        return "container"
    if name in _KNOWN:
        return name
    return next((one for one in _KNOWN if one.startswith(name)), name)


def _collision(name: str, value: str, job: Job) -> Tuple[str, str]:
    """Why an option collides with the settings of this job, and the remedy; empty if it does not."""
    if name in OF_WHOLE_NODES and job.is_exclusive:
        return "the job requests whole nodes with all their memory", "use --exclusive false"
    if name == "dependency" and job.requeue == "chain":
        return "with --requeue chain the job states --dependency itself", (
            "submit it when the other job has ended"
        )
    is_for_gpus = name in GPU_REQUESTS or (name in RESOURCES and has_gpus(value))
    if is_for_gpus and job.gpu_request != "none":
        return f"the job states --{job.gpu_request} itself", (
            "use --num-gpus-per-node and --gpu-type, or --gpu-request none beside this option"
        )
    return "", ""


def has_gpus(resources: str) -> bool:
    """Whether a list of resources names GPUs, or parts of them.

    >>> has_gpus("nvme:1,gpu:h100:4"), has_gpus("cpu:8,gres/shard=2"), has_gpus("gpu_memory:1")
    (True, True, False)
    """
    return any(_GPU.match(entry) for entry in resources.split(","))


def split_gres(words: Sequence[str]) -> Tuple[List[str], List[str]]:
    """The words but for --gres, and the resources of all --gres: sbatch would take the last alone.

    >>> split_gres(["--gres=nvme:1", "--nice", "--gres=tmpfs:4"])
    (['--nice'], ['nvme:1', 'tmpfs:4'])
    """
    flag = "--gres="
    others = [word for word in words if not word.startswith(flag)]
    return others, [word[len(flag) :] for word in words if word.startswith(flag)]


def words_of_engines(words: Sequence[str], gpu_request: str) -> Tuple[List[str], bool]:
    """The words of a run that hold for its engines on other jobs; and whether GPUs are requested.

    Left out are the requests for GPUs, which are the trainer's, and what belongs to one job.
    """
    kept, has_request = [], False
    for word in words:
        name, value = _name_and_value(word)
        is_request = name in GPU_REQUESTS
        if name in RESOURCES:
            others = [entry for entry in value.split(",") if not _GPU.match(entry)]
            is_request = has_gpus(value)
            word = f"--{name}={','.join(others)}" if others else ""
        has_request = has_request or is_request
        is_beside = gpu_request == "none" and name in _BESIDE_GPUS
        if word and not (name in GPU_REQUESTS or is_beside or name in _OF_THE_RUN):
            kept.append(word)
    return kept, has_request


def words_of_sandboxes(words: Sequence[str]) -> List[str]:
    """The words of a run that hold for its sandbox servers, on CPU nodes with their own memory."""
    left_out = (*_OF_THE_RUN, *GPU_REQUESTS, *RESOURCES, *_BESIDE_GPUS, "mem-per-cpu")
    return [word for word in words if _name_and_value(word)[0] not in left_out]


def _name_and_value(word: str) -> Tuple[str, str]:
    name, _, value = word[2:].partition("=")
    return _full_name(name), value
