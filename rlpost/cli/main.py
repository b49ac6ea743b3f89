"""``rlpost VERB``: the command line of the login node.

Input: a verb and its arguments. Output: the verb's exit code. The module of a verb is imported on
demand, to keep startup fast.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from rlpost import __version__
from rlpost.cli.entry import run_command
from rlpost.cli.secret_file import hide_keys
from rlpost.cli.terminal import named_lines
from rlpost.config import extensions
from rlpost.config.extensions import Verb
from rlpost.errors import ConfigError, suggestion

VERBS = {
    "submit": Verb(
        "rlpost.cli.submit:submit_main",
        "check a recipe and submit it (--dry-run, --test-only, --wait, --local)",
        takes_settings=True,
    ),
    "recipes": Verb("rlpost.cli.recipes:main", "recipes, models and clusters that have a name"),
    "check": Verb(
        "rlpost.cli.check:main", "check a recipe and show its arithmetic", takes_settings=True
    ),
    "requeue": Verb(
        "rlpost.cli.control:requeue_main", "save, requeue and resume, as at a preemption"
    ),
    "cancel": Verb("rlpost.cli.control:cancel_main", "end a run without a restart"),
}
"""The verbs of the core."""
OTHER_NAMES = {
    "resume": "rlpost submit RECIPE --resume --run-folder RUN",
    "train": "rlpost submit RECIPE",
    "run": "rlpost submit RECIPE",
    "start": "rlpost submit RECIPE",
    "stop": "rlpost cancel RUN, which saves first",
    "kill": "rlpost cancel RUN, which saves first",
    "install": "make install, in the folder of the code",
}
OF_EXTENSIONS = {"ls": "list", "tail": "logs RUN --follow", "eval": "evaluate RECIPE"}
"""Verbs of other tools, and what stands for them here; the second by words of ``rlpost``."""
PACKAGES = ("rlpost", "slurm", "bootstrap", "common")
PROJECT = Path(__file__).parents[2]
HELP_WIDTH = 79


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry of ``rlpost`` and ``python -m rlpost``."""
    if arguments is None:
        verb = VERBS.get(" ".join(sys.argv[1:2]))
        # Before an extension is loaded: that may take long, or fail.
        if verb is None or verb.takes_settings:
            hide_keys()
    return run_command(_verb, arguments)


def known_verbs() -> dict[str, Verb]:
    """Return the verbs of this installation, those of its extensions included."""
    added = extensions.verbs(VERBS)
    known: dict[str, Verb] = {}

    def add(name: str, verb: Verb) -> None:
        known[name] = verb
        for follower in [one for one, row in added.items() if row.after == name]:
            add(follower, added.pop(follower))

    for name, verb in VERBS.items():
        add(name, verb)
    return known | added


def verbs() -> dict[str, str]:
    """Return the verbs of this installation and their descriptions."""
    return {name: verb.text for name, verb in known_verbs().items()}


def verb_function(name: str) -> Callable[[Sequence[str]], int]:
    """Return the function of a verb. Raises ConfigError if a library that it needs is missing."""
    module, _, function = known_verbs()[name].main.partition(":")
    found: Callable[[Sequence[str]], int] = getattr(_import(module), function)
    return found


def help_page(known: Mapping[str, str]) -> str:
    """Return the help of ``rlpost``: at most 80 columns, one screen."""
    width = max(map(len, known)) + 4
    lines = ["usage: rlpost VERB [...]; rlpost VERB --help says more", ""]
    lines += named_lines([(f"  {verb}", text) for verb, text in known.items()], width, HELP_WIDTH)
    lines += [
        "",
        "A run is named by its folder, its name or its job id; without one, the newest",
        "run is used. --version prints the version.",
    ]
    return "\n".join(lines)


def _verb(arguments: Sequence[str]) -> int:
    if arguments and arguments[0] in ("-V", "--version"):
        print(f"rlpost {__version__}")
        return 0
    known = verbs()
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(help_page(known))
        return 0
    verb, *rest = arguments
    if verb.endswith(".toml"):
        raise ConfigError(
            f"{verb}: a verb comes before the recipe; use rlpost check {verb} or rlpost submit {verb}"
        )
    if verb in OTHER_NAMES:
        raise ConfigError(f"{verb}: no such verb; use {OTHER_NAMES[verb]}")
    if verb in OF_EXTENSIONS:
        raise ConfigError(f"{verb}: no such verb; use {extensions.command(OF_EXTENSIONS[verb])}")
    if verb not in known:
        raise ConfigError(
            f"{verb}: no such verb{suggestion(verb, known) or '; there are ' + ', '.join(known)}"
        )
    return verb_function(verb)(rest)


def _import(module: str) -> ModuleType:
    """Import a verb's module; raise ConfigError if this interpreter lacks a library of it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in PACKAGES:
            raise
        venv = PROJECT / ".venv" / "bin"
        remedy = f"make install, in {PROJECT}"
        if (venv / "python").exists() and venv != Path(sys.executable).parent:
            remedy = f"source {venv / 'activate'}"
        raise ConfigError(
            f"{error.name}: missing in {sys.executable}, another Python environment; use {remedy}"
        ) from None
