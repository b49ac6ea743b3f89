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

OF_WHOLE_NODES = ("exclusive", "mem", "mem-per-cpu", "mem-per-gpu", "oversubscribe")
"""Options that a job may have unless it requests whole nodes."""

_OPTIONS_BY_REMEDY = {
    "a job has one task on each node; use --nodes": (
        "ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket"
    ),
    "a job runs as the user who submits it": "gid uid",
    "a run is one job; use rlpost sweep, or sbatch --array=... jobs/NAME.sbatch": "array",
    "export SBATCH_CLUSTERS=...": "clusters",
    "jobs of a run depend on each other; submit it when the other job has ended": "dependency",
    "the job changes to the folder of its code; use --runs-dir for its files": "chdir",
    "the job of a run is submitted once, and its id is read; leave the option out": (
        "help parsable quiet usage verbose version"
    ),
    "the log is in the run folder": "error open-mode output",
    "the script is that of the job; use --setup-commands": "wrap",
    "use --container and --container-image": "container",
    "use --environment": "export export-file get-user-env",
    "use --gpu-request and --num-gpus-per-node": (
        "gpus gpus-per-node gpus-per-socket gpus-per-task gres"
    ),
    "use --nodes and --spare-nodes": "nodes no-kill",
    "use --requeue": "requeue no-requeue",
    "use --signal-lead-s": "signal",
    "use rlpost submit --test-only": "test-only",
    "use rlpost submit --wait": "wait",
    "use --exclusive false to request a part of each node": " ".join(OF_WHOLE_NODES),
    **{f"use --{option.name}": option.name for option in OF_SETTINGS},
}
RESERVED = {name: remedy for remedy, names in _OPTIONS_BY_REMEDY.items() for name in names.split()}
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
