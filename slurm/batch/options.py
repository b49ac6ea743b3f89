"""The options that a batch file passes to ``python3 -m slurm.batch``: one table, both directions.

``slurm.render`` writes them with ``words``, the batch host reads them with ``parse``. Each option is
one word ``--name=value``; options with their default value are left out. Further words follow in
groups, each after ``--``. Python 3.6.
"""

import re
from typing import Any, Dict, List, Mapping, NamedTuple, Sequence, Tuple

_VARIABLE_WORD = re.compile(r"\$([A-Z][A-Z0-9_]*)([A-Za-z0-9/._@%+=-]*)")


class OptionError(Exception):
    """Words that are no options of a batch file; the message says which."""


class Options(NamedTuple):
    """The values of a batch file that is rendered once and may run anywhere.

    In ``image``, ``mount``, ``reads``, ``save`` and the words of the agent a leading ``$NAME`` of a
    path stands for the value of that variable in the job.
    """

    script: str = ""
    """The batch file itself, for one that finds its code at run time; empty otherwise."""
    name: str = "rlpost"
    """Job name; part of the run folder's name where none is given."""
    run_folder: str = ""
    python: str = ""
    """Interpreter of the agents, in their container if any; found at run time if empty."""
    node_python: str = ""
    """Interpreter of the agents if the container ``auto`` resolves to none."""
    container: str = "none"
    """none, auto, pyxis, enroot or command."""
    container_command: str = ""
    """The template of ``slurm.container_command``."""
    image: str = ""
    """A .sqsh file, the name of an image in a registry, or ``$NAME``; what the command takes."""
    image_cache: str = ""
    mount: Tuple[str, ...] = ()
    environment: Tuple[str, ...] = ()
    """NAME=VALUE for the agents, set inside the container."""
    setup_command: Tuple[str, ...] = ()
    """Shell lines that each node runs before its agent, inside the container."""
    reads: Tuple[str, ...] = ()
    """Files and folders that must exist on submission."""
    gpus: int = 0
    """GPUs of each node."""
    nodes: int = 1
    spare_nodes: int = 0
    requeue: str = "requeue"
    """requeue, chain or never, see ``slurm.spec``."""
    max_preemptions: int = 100
    max_failures: int = 3
    max_stalled_attempts: int = 3
    exclude: Tuple[str, ...] = ()
    teardown_s: int = 60
    signal_lead_s: int = 120
    cores: int = 1
    """CPUs of a sandbox server."""
    save: str = ""
    """Target of a conversion."""


def words(options: Options) -> List[str]:
    """One word for each value that is not the default, in the order of the table."""
    result = []
    for name, default in _defaults().items():
        value = getattr(options, name)
        if value == default:
            continue
        values = value if isinstance(value, tuple) else (value,)
        result += [f"--{name.replace('_', '-')}={item}" for item in values]
    return result


def parse(arguments: Sequence[str]) -> Options:
    """Read the words that ``words`` wrote.

    Raises:
        OptionError: an unknown option, or a number that is none.
    """
    defaults = _defaults()
    values: Dict[str, Any] = {}
    for word in arguments:
        flag, equals, text = word.partition("=")
        name = flag[2:].replace("-", "_")
        if not flag.startswith("--") or not equals or name not in defaults:
            raise OptionError(f"{word}: no option of a batch file; write --NAME=VALUE")
        default = defaults[name]
        if isinstance(default, tuple):
            values[name] = (*values.get(name, ()), text)
        elif isinstance(default, int):
            if not re.fullmatch("[0-9]+", text):
                raise OptionError(f"{word}: not a number")
            values[name] = int(text)
        else:
            values[name] = text
    return Options(**values)


def split_groups(arguments: Sequence[str], count: int) -> List[List[str]]:
    """Split words at the first ``count - 1`` words ``--``; missing groups are empty."""
    groups: List[List[str]] = [[]]
    for word in arguments:
        if word == "--" and len(groups) < count:
            groups.append([])
        else:
            groups[-1].append(word)
    return groups + [[] for _ in range(count - len(groups))]


def expand(word: str, environ: Mapping[str, str]) -> str:
    """Replace a leading ``$NAME`` of a path; every other word stays as it is.

    >>> expand("$RLPOST_ASSETS/Qwen3-4B", {"RLPOST_ASSETS": "/data"})
    '/data/Qwen3-4B'
    >>> expand("$(touch x)", {})
    '$(touch x)'
    """
    match = _VARIABLE_WORD.fullmatch(word)
    if match is None:
        return word
    return environ.get(match.group(1), "") + match.group(2)


def expand_mount(mount: str, environ: Mapping[str, str]) -> str:
    """``expand`` for both paths of SOURCE:TARGET:MODE."""
    return ":".join(expand(part, environ) for part in mount.split(":"))


def needed_variables(options: Options, agent: Sequence[str] = ()) -> List[str]:
    """Names of the variables that must be set, in order; with ``auto`` the image is optional.

    ``agent``: the words of the agent.
    """
    texts = [] if options.container in ("none", "auto") else [options.image]
    texts += [part for mount in options.mount for part in mount.split(":")]
    texts += [*agent, options.save]
    names: List[str] = []
    for text in texts:
        match = _VARIABLE_WORD.fullmatch(text)
        if match is not None and match.group(1) not in names:
            names.append(match.group(1))
    return names


def _defaults() -> Dict[str, Any]:
    return dict(Options()._asdict())
