"""``rlpost VERB``: one door to everything a person does from the login node.

In: a verb and its words. Out: the verb's exit code. A verb's module is imported when it is called, so that none pays
for another.
"""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Sequence

from rlpost.cli.entry import run_command
from rlpost.cli.secret_flags import hide_keys
from rlpost.errors import ConfigError, suggestion

# verb: module and function, and what it does
VERBS = {
    "submit": (
        "rlpost.cli.submit:submit_main",
        "check a recipe and submit it (--dry-run, --test-only, --wait, --local)",
    ),
    "check": ("rlpost.cli.check:main", "check a recipe and show its arithmetic"),
    "plan": ("rlpost.cli.plan:main", "what a recipe needs of GPUs, nodes and disks (--suggest: better layouts)"),
    "fetch": ("rlpost.cli.fetch:main", "a recipe's model and data from the Hugging Face hub to the shared folder"),
    "status": ("rlpost.cli.status:status_main", "where a run stands (--watch: a live page)"),
    "list": ("rlpost.cli.status:list_main", "all runs, the newest first"),
    "logs": ("rlpost.cli.logs:main", "the log of the driver, or of any other process (-f, --of NAME, --level, --grep)"),
    "attach": ("rlpost.cli.attach:attach_main", "a shell on a node of a run"),
    "exec": ("rlpost.cli.attach:exec_main", "a command on every node of a run"),
    "tunnel": ("rlpost.cli.attach:tunnel_main", "the way to Ray's dashboard"),
    "requeue": ("rlpost.cli.control:requeue_main", "save, requeue and go on, as at a preemption"),
    "cancel": ("rlpost.cli.control:cancel_main", "end a run; it does not come back"),
    "report": ("rlpost.cli.report:main", "a run as a page with plots, answers, recipe, and as text"),
    "journal": ("rlpost.cli.journal:main", "what a run would go on with after a crash (--records: every record)"),
    "compare": ("rlpost.cli.compare:main", "several runs over each other, as a page"),
    "doctor": ("rlpost.cli.main:doctor", "look for what is wrong with this machine, or with an image (--image)"),
}
_DOCTOR = "bootstrap.preflight.doctor"


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry of ``rlpost`` and ``python -m rlpost``."""
    if arguments is None and sys.argv[1:2] in (["submit"], ["check"], ["plan"], ["fetch"]):
        hide_keys()
    return run_command(_verb, arguments)


def verbs() -> dict[str, str]:
    """The verbs that this installation has, and what each does."""
    has_doctor = importlib.util.find_spec(_DOCTOR) is not None
    return {verb: text for verb, (_, text) in VERBS.items() if verb != "doctor" or has_doctor}


def doctor(arguments: Sequence[str]) -> int:
    """The checks of one machine live with the agent, which runs them on every node; --image looks at an image."""
    if "--image" in arguments:
        words = [word for word in arguments if word != "--image"]
        if any(word.partition("=")[0] == "--cluster" for word in words):
            from rlpost.cli.image_doctor import main as look

            return look(words)
        if any(word.endswith(".toml") for word in words):
            from rlpost.cli.image_doctor import words_of_recipes

            words = words_of_recipes(words)
        # Without a recipe no package of ours need be there.
        return subprocess.run([sys.executable, "-m", "bootstrap.image.doctor", *words]).returncode
    return subprocess.run([sys.executable, "-m", _DOCTOR, *arguments]).returncode


def _verb(arguments: Sequence[str]) -> int:
    known = verbs()
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print("usage: rlpost VERB [...]; rlpost VERB --help says more\n")
        print("\n".join(f"  {verb:<9}{text}" for verb, text in known.items()))
        print("\nA run is named by its folder, its name or its job id; the newest is meant when none is named.")
        return 0
    verb, *rest = arguments
    if verb.endswith(".toml"):
        raise ConfigError(f"{verb}: a verb comes before the recipe; use rlpost check {verb} or rlpost submit {verb}")
    if verb not in known:
        raise ConfigError(f"{verb}: no such verb{suggestion(verb, known) or '; there are ' + ', '.join(known)}")
    module, _, function = VERBS[verb][0].partition(":")
    return getattr(importlib.import_module(module), function)(rest)
