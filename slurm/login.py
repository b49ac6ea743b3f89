"""Check a batch file, then submit it: ``./jobs/NAME.sbatch [FLAGS]`` outside a job.

Input: rendering parameters of the script (container, variables, recipe), its path, training flags.
Output: that of ``sbatch``; or exit code 78 and all problems with their remedies. If the project's
environment is installed, ``rlpost check`` validates all settings; otherwise only the existence of
the recipe's files is checked. Options of sbatch come from its own variables (SBATCH_ACCOUNT,
SBATCH_PARTITION). Only the standard library of Python 3.8 and later, see ``common.ledger``.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

HOME = Path(__file__).resolve().parents[1]
# a script finds slurm/ there, whose queue.py hides that of the standard library
sys.path[0] = str(HOME)

from common.exit_codes import EXIT_CONFIG  # noqa: E402

MAGIC = b"hsqs"  # of squashfs
FILE_KEYS = ("hf_checkpoint", "ref_load", "prompt_data")
"""Recipe settings that name required files; found without tomllib, which Python 3.8 lacks."""


def image_problem(image: str) -> str:
    """Problem with an image file, or empty; a missing folder may be on the nodes."""
    path = Path(image)
    if not path.is_absolute() or not path.parent.is_dir():
        return ""
    if not path.is_file():
        return f"image {image}: no such file; import it (docs/containers.md), or use the name of a registry image"
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            return f"image {image}: not a squashfs file; create it with enroot import -o {path.name} NAME"
    return ""


def recipe_files(text: str, flags: list[str]) -> dict[str, str]:
    """Paths in a recipe that no flag overrides, by flag and path."""
    found = {}
    for key in FILE_KEYS:
        flag = "--" + key.replace("_", "-")
        line = re.search(rf"(?m)^{key} = (.*)$", text)
        given = any(word.split("=")[0] == flag for word in flags)
        if line and not given:
            found.update({f"{flag} {path}": path for path in re.findall(r'"([^"]+)"', line[1])})
    return found


def file_problem(name: str, path: str) -> str:
    """Problem with a recipe's file, or empty; a path may contain $VARIABLE and a slice."""
    variable, _, rest = path[1:].partition("/") if path.startswith("$") else ("", "", path)
    if variable and not os.environ.get(variable):
        return f"{name}: {variable} is not set; export {variable}=FOLDER"
    place = HOME / os.environ.get(variable, "") / rest.partition("@[")[0]
    if place.exists():
        return ""
    return f"{name}: {place} does not exist; rlpost fetch RECIPE downloads models and data"


def container(options: argparse.Namespace) -> subprocess.CompletedProcess[str]:
    """Run ``container.sh`` on this host; enroot may be installed on the compute nodes only."""
    words = ["bash", str(HOME / "slurm/container.sh"), options.container, options.image]
    words += [
        name for name in options.needs if name != "RLPOST_IMAGE" or options.container == "auto"
    ]
    return subprocess.run(words, capture_output=True, text=True)


def checked_in_full(recipe: list[str], chosen: str) -> str:
    """Problems found by ``rlpost check``, or empty.

    Raises FileNotFoundError if it cannot run here.
    """
    python = str(HOME / ".venv/bin/python")
    if subprocess.run([python, "-c", "import pydantic"], stderr=subprocess.DEVNULL).returncode != 0:
        raise FileNotFoundError(python)
    environ = {
        **os.environ,
        "RLPOST_HOME": str(HOME),
        "PYTHONPATH": str(HOME),
        "RLPOST_CONTAINER": chosen,
    }
    done = subprocess.run(
        [python, "-m", "rlpost", "check", *recipe],
        env=environ,
        cwd=str(HOME),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    return done.stderr.strip() if done.returncode != 0 else ""


def problems(options: argparse.Namespace) -> list[str]:
    """All problems: one line each, or the output of the program that found them."""
    late = subprocess.run(
        ["bash", str(HOME / "slurm/cluster_flags.sh"), *options.flags],
        stderr=subprocess.PIPE,
        text=True,
    )
    found = [late.stderr.strip()] if late.returncode != 0 else []
    chosen = "none"
    if options.container == "none":
        found += [
            f"{name} is not set; export {name}=..."
            for name in options.needs
            if not os.environ.get(name)
        ]
    else:
        done = container(options)
        chosen = done.stdout.strip()
        if done.returncode != 0:
            found.append(done.stderr.strip())
        else:
            print(done.stderr.strip(), file=sys.stderr)
    if chosen != "none" and options.image:
        found.append(image_problem(options.image))
    if found := [text for text in found if text]:
        return found  # checking the settings would only report consequences of these
    return [text for text in settings_problems(options, chosen) if text]


def settings_problems(options: argparse.Namespace, chosen: str) -> list[str]:
    """Problems in the recipe with its flags, else in the files that the script reads."""
    if not options.recipe:
        return [file_problem("this script reads", path) for path in options.reads]
    flags = [*options.recipe[1:], *options.flags]
    try:
        return [checked_in_full([options.recipe[0], *flags], chosen)]
    except FileNotFoundError as error:
        print(
            f"note: {error.filename or error} cannot import pydantic; the job checks the settings",
            file=sys.stderr,
        )
    text = (HOME / options.recipe[0]).read_text()
    return [file_problem(name, path) for name, path in recipe_files(text, flags).items()]


def parse(words: list[str]) -> argparse.Namespace:
    """Parse RENDERED... FILE -- RECIPE... -- FLAGS..."""
    rendered, rest = words[: words.index("--")], words[words.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--container", default="none")
    parser.add_argument("--image", default="")
    parser.add_argument("--needs", action="append", default=[])
    parser.add_argument("--reads", action="append", default=[])
    parser.add_argument("file")
    options = parser.parse_args(rendered)
    end = rest.index("--")
    options.recipe, options.flags = rest[:end], rest[end + 1 :]
    return options


def main() -> int:
    """The command line."""
    options = parse(sys.argv[1:])
    os.environ.setdefault("RLPOST_HOME", str(HOME))
    script = [options.file, *options.flags]
    try:
        found = problems(options)
        if found:
            print("\n".join(found) + f"\nnot submitted: {options.file}", file=sys.stderr)
            return EXIT_CONFIG
        asked = subprocess.run(
            ["sbatch", "--test-only", *script], stderr=subprocess.PIPE, text=True
        )
    except FileNotFoundError as error:
        print(
            f"{error.filename} is not on the PATH of this host; run {options.file} on a login node",
            file=sys.stderr,
        )
        return EXIT_CONFIG
    if asked.returncode != 0:
        remedy = f"set SBATCH_ACCOUNT, SBATCH_PARTITION etc., or run sbatch OPTIONS {options.file}"
        print(
            f"sbatch --test-only rejected {options.file}:\n{asked.stderr.strip()}\n{remedy}",
            file=sys.stderr,
        )
        return EXIT_CONFIG
    return subprocess.run(["sbatch", *script]).returncode


if __name__ == "__main__":
    sys.exit(main())
