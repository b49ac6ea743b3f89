"""Check a batch file, then submit it: ``./jobs/NAME.sbatch [FLAGS]`` outside a job.

Input: the options of the file, its recipe, training flags. Output: that of ``sbatch``; or exit code
78 and all problems with their remedies. If the project's environment is installed, ``rlpost check``
validates all settings; otherwise only the existence of the recipe's files is checked. Options of
sbatch come from its own variables (SBATCH_ACCOUNT, SBATCH_PARTITION). Python 3.6.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Dict, List, Mapping, Sequence

from common.exit_codes import EXIT_CONFIG
from slurm.batch.options import Options, expand, needed_variables
from slurm.container_choice import choose
from slurm.errors import SpecError
from slurm.late_flags import late_flags
from slurm.variables import submission_environment

HOME = Path(__file__).resolve().parents[1]
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
    try:
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
    except OSError as error:
        return f"image {image}: cannot be read: {error.strerror}"
    if magic != MAGIC:
        return (
            f"image {image}: not a squashfs file; create it with enroot import -o {path.name} NAME"
        )
    return ""


def recipe_text(path: Path) -> str:
    """Text of a recipe, followed by that of its base."""
    text = path.read_text()
    base = re.search(r'(?m)^base = "(\w+)"', text)
    return text + (path.parent / f"{base[1]}.toml").read_text() if base else text


def recipe_files(text: str, flags: Sequence[str]) -> Dict[str, str]:
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
    return f"{name}: {place} does not exist; rlpost fetch RECIPE, where installed, downloads models and data"


def settings_error(python: str, recipe: Sequence[str], container: str) -> str:
    """What ``rlpost check`` says against the settings; empty if nothing.

    Args:
        python: interpreter of the project's environment.
        recipe: the recipe and all flags.
        container: what a job would get, see ``container_choice``.
    """
    variables = {"RLPOST_HOME": str(HOME), "PYTHONPATH": str(HOME), "RLPOST_CONTAINER": container}
    done = subprocess.run(
        [python, "-m", "rlpost", "check", *recipe],
        env={**os.environ, **variables},
        cwd=str(HOME),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        universal_newlines=True,
    )
    return done.stderr.strip() if done.returncode != 0 else ""


def has_pydantic(python: str) -> bool:
    """Whether this interpreter can read settings."""
    try:
        return subprocess.call([python, "-c", "import pydantic"], stderr=subprocess.DEVNULL) == 0
    except OSError:
        return False


def settings_problems(
    options: Options, recipe: Sequence[str], flags: Sequence[str], container: str
) -> List[str]:
    """Problems in the recipe with its flags, else in the files that the batch file reads."""
    if not recipe:
        return [file_problem("this script reads", path) for path in options.reads]
    flags = [*recipe[1:], *flags]
    python = str(HOME / ".venv/bin/python")
    if has_pydantic(python):
        return [settings_error(python, [recipe[0], *flags], container)]
    print(f"note: {python} cannot import pydantic; the job checks the settings", file=sys.stderr)
    text = recipe_text(HOME / recipe[0])
    return [file_problem(name, path) for name, path in recipe_files(text, flags).items()]


def problems(
    options: Options, agent: Sequence[str], recipe: Sequence[str], flags: Sequence[str]
) -> List[str]:
    """All problems that this host can see; those of the settings if there are no others."""
    lines = late_flags(flags)
    image, container = expand(options.image, os.environ), "none"
    needed = needed_variables(options, agent)
    if options.container == "none":
        missing = [name for name in needed if not os.environ.get(name)]
        lines += [f"{name} is not set; export {name}=..." for name in missing]
    else:
        try:
            container, why = choose(options.container, image, needed)
            print(f"container: {why}", file=sys.stderr)
        except SpecError as error:
            lines += str(error).splitlines()
    if container in ("pyxis", "enroot") and image and image_problem(image):
        lines.append(image_problem(image))
    if lines:
        return lines  # checking the settings would only report consequences of these
    return [text for text in settings_problems(options, recipe, flags, container) if text]


def submit(
    options: Options, agent: Sequence[str], recipe: Sequence[str], *, flags: Sequence[str]
) -> int:
    """Check the batch file ``options.script``, then submit it; return the exit code."""
    os.environ.setdefault("RLPOST_HOME", str(HOME))
    # The batch file changes to the project folder after it was called with this name.
    called = os.path.join(os.environ.get("OLDPWD", ""), options.script)
    script = [called, *flags]
    lines = problems(options, agent, recipe, flags)
    if lines:
        print("\n".join(lines) + f"\nnot submitted: {called}", file=sys.stderr)
        return EXIT_CONFIG
    environ = submission_environment(os.environ)
    try:
        return _sbatch(script, environ)
    except FileNotFoundError as error:
        print(
            f"{error.filename} is not on the PATH of this host; run {called} on a login node",
            file=sys.stderr,
        )
        return EXIT_CONFIG


def _sbatch(script: Sequence[str], environ: Mapping[str, str]) -> int:
    asked = subprocess.run(
        ["sbatch", "--test-only", *script],
        stderr=subprocess.PIPE,
        universal_newlines=True,
        env=dict(environ),
    )
    if asked.returncode == 0:
        return subprocess.call(["sbatch", *script], env=dict(environ))
    remedy = f"set SBATCH_ACCOUNT, SBATCH_PARTITION etc., or run sbatch OPTIONS {script[0]}"
    print(
        f"sbatch --test-only rejected {script[0]}:\n{asked.stderr.strip()}\n{remedy}",
        file=sys.stderr,
    )
    return EXIT_CONFIG
