"""The options of sbatch: which settings have, which the job itself decides, and all others. Pure.

Input: words of ``[cluster] sbatch``, passed to sbatch as they are. Output: what is wrong with them.
An option with a setting of its own is a row of ``OF_SETTINGS``, a key of [cluster] and a field of
``JobSpec``. Python 3.6.
"""

import re
from typing import NamedTuple

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_NAMES = r"[A-Za-z0-9][A-Za-z0-9._,-]*"
# man sbatch, --constraint: features, AND, OR, counts, matching and exclusive or
_CONSTRAINT = r"[A-Za-z0-9_(\[][A-Za-z0-9_.,:&|*()\[\]=-]*"
_BY_NAME = "use letters, digits, '.', '_' and '-', a letter or digit first"
_WORD = re.compile(r"--(?P<name>[a-z][a-z0-9-]*)(?:=[^\\$`]*)?")


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

_GPUS = "use --gpu-request and --num-gpus-per-node"
_TASKS = "a job has one task on each node; use --nodes"
_LOG = "the log is in the run folder"
_ENVIRONMENT = "use --environment"
_WHOLE_NODES = "use --exclusive false to request a part of each node"
_ONE_JOB = "the job of a run is submitted once, and its id is read; leave the option out"

OF_WHOLE_NODES = ("exclusive", "mem", "mem-per-cpu", "mem-per-gpu", "oversubscribe")
"""Options that a job may have unless it requests whole nodes."""

RESERVED = {
    "array": "a run is one job; use rlpost sweep, or sbatch --array=... jobs/NAME.sbatch",
    "chdir": "the job changes to the folder of its code; use --runs-dir for its files",
    "clusters": "export SBATCH_CLUSTERS=...",
    "container": "use --container and --container-image",
    "dependency": "jobs of a run depend on each other; submit it when the other job has ended",
    "error": _LOG,
    "export": _ENVIRONMENT,
    "export-file": _ENVIRONMENT,
    "get-user-env": _ENVIRONMENT,
    "gid": "a job runs as the user who submits it",
    "gpus": _GPUS,
    "gpus-per-node": _GPUS,
    "gpus-per-socket": _GPUS,
    "gpus-per-task": _GPUS,
    "gres": _GPUS,
    "help": _ONE_JOB,
    "no-kill": "use --spare-nodes",
    "no-requeue": "use --requeue",
    "nodes": "use --nodes and --spare-nodes",
    "ntasks": _TASKS,
    "ntasks-per-core": _TASKS,
    "ntasks-per-gpu": _TASKS,
    "ntasks-per-node": _TASKS,
    "ntasks-per-socket": _TASKS,
    "open-mode": _LOG,
    "output": _LOG,
    "parsable": _ONE_JOB,
    "quiet": _ONE_JOB,
    "requeue": "use --requeue",
    "signal": "use --signal-lead-s",
    "test-only": "use rlpost submit --test-only",
    "uid": "a job runs as the user who submits it",
    "usage": _ONE_JOB,
    "verbose": _ONE_JOB,
    "version": _ONE_JOB,
    "wait": "use rlpost submit --wait",
    "wrap": "the script is that of the job; use --setup-commands",
    **{option.name: f"use --{option.name}" for option in OF_SETTINGS},
    **{name: _WHOLE_NODES for name in OF_WHOLE_NODES},
}
"""Options on which the job's script relies, and what to do instead."""


def word_problem(word: str, *, is_exclusive: bool) -> str:
    """What is wrong with an option that is passed through; empty if nothing.

    ``is_exclusive``: the job requests whole nodes.

    >>> word_problem("--licenses=site:8", is_exclusive=True)
    ''
    >>> word_problem("--part=gpu", is_exclusive=True)
    "sbatch: '--part=gpu'; the job states --partition itself; use --partition"
    """
    match = _WORD.fullmatch(word)
    if match is None:
        return (
            f"sbatch: {word!r}; write --NAME or --NAME=VALUE in one word, the long name of an option "
            "of sbatch, without a backslash, '$' or '`': nothing is expanded"
        )
    name = match.group("name")
    if name.startswith("container-"):  # of pyxis
        name = "container"
    # sbatch accepts the beginning of a name
    meant = name if name in RESERVED else next((o for o in RESERVED if o.startswith(name)), "")
    if not meant or (meant in OF_WHOLE_NODES and not is_exclusive):
        return ""
    return f"sbatch: {word!r}; the job states --{meant} itself; {RESERVED[meant]}"
