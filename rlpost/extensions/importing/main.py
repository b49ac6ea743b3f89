"""``rlpost import FILE``: print a recipe, and a list of what was taken and what was not.

Input: a script of slime or verl, or a YAML file of NeMo-RL or verl. Output: the recipe on standard
output or in a new file, the lists on standard error. The file is read, never executed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from common.units import counted
from rlpost.cli.check_settings import absent, check
from rlpost.cli.command_line import load_run
from rlpost.config.arguments import Parser
from rlpost.config.show import one_line
from rlpost.config.wording import near_path
from rlpost.errors import ConfigError
from rlpost.extensions.importing.imported import Imported, flags_of, imported, shown
from rlpost.extensions.importing.peers.row import Answer
from rlpost.extensions.importing.source import Source, read


def main(arguments: Sequence[str]) -> int:
    """Run ``rlpost import FILE [NAME=VALUE ...] [--output RECIPE]``."""
    parser = Parser(
        prog="rlpost import",
        description="Make a recipe from a script of slime or verl, or YAML of NeMo-RL or verl. The "
        "file is read, not executed.",
    )
    parser.add_argument("file", metavar="FILE", help="a shell script, or a YAML file")
    parser.add_argument(
        "words",
        metavar="NAME=VALUE",
        nargs="*",
        help="a variable of the script, or a key of the stack (a.b=VALUE)",
    )
    parser.add_argument("--output", metavar="RECIPE", help="write the recipe to this new TOML file")
    options = parser.parse_args(arguments)
    target = None if options.output is None else Path(options.output)
    if target is not None and target.exists():
        raise ConfigError(f"--output {target}: the file exists; give a new name")
    path = Path(options.file)
    source = read(path, options.words)
    result = imported(source.given, source.absent)
    recipe = result.recipe(f"{path.name} ({source.stack})")
    print("\n".join(map(_printable, report(path.name, source, result))), file=sys.stderr)
    if target is None:
        print(recipe, end="")
    else:
        _write(target, recipe)
        print(
            f"\nwritten: {near_path(str(target))}; next: rlpost check {near_path(str(target))}",
            file=sys.stderr,
        )
    return 0


def report(name: str, source: Source, result: Imported) -> Iterator[str]:
    """Yield the lists of an import, and what ``rlpost check`` says of the recipe."""
    yield f"{name}, {source.where}: {source.stack}, {counted(len(source.given), 'key')}"
    if source.problems:
        yield "\nnot read"
        yield from (f"  {line}" for line in source.problems)
    sets = [answer for answer in result.taken if answer.settings]
    needless = [answer for answer in result.taken if not answer.settings]
    yield f"\ntaken: {len(result.taken)}, {len(needless)} of them without a setting"
    yield from (_taken(answer) for answer in sets)
    yield from (f"  {shown(answer)}: no setting: {answer.why}" for answer in needless)
    yield f"\nanother default here: {len(result.defaults)}, set to those of {source.stack}"
    yield from (_taken(answer) for answer in result.defaults)
    yield f"\nnot here: {len(result.left)}"
    for answer in result.left:
        where = f"line {answer.line}: " if answer.line else ""
        said = " (the default)" if answer.is_default else ""
        yield f"  {where}{shown(answer)}{said}: {answer.why}"
    problems = check_problems(result)
    if problems:
        yield "\nto decide: what rlpost check says of this recipe"
        yield from (f"  {line}" for line in problems)


def check_problems(result: Imported) -> list[str]:
    """Return what is wrong with the settings, then the files that are missing here."""
    try:
        config = load_run([], result.settings).config
    except ConfigError as error:
        return str(error).splitlines()
    lines: list[str] = []
    try:
        check(config, is_dry=True)
    except ConfigError as error:
        lines = str(error).splitlines()
    return list(dict.fromkeys([*lines, *absent(config, None)]))


def _printable(line: str) -> str:
    """Return a line for a terminal: what a foreign file holds cannot control it."""
    blank = "\n" if line.startswith("\n") else ""
    return blank + one_line(line.removeprefix("\n"))


def _taken(answer: Answer) -> str:
    note = f" ({answer.why})" if answer.why else ""
    return f"  {shown(answer)} -> {flags_of(answer.settings)}{note}"


def _write(path: Path, text: str) -> None:
    """Write a new file completely or not at all. Raises ConfigError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with temporary.open("x") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.link(temporary, path)  # fails where another process made the file meanwhile
    except FileExistsError:
        raise ConfigError(f"--output {path}: the file exists; give a new name") from None
    except OSError as error:
        raise ConfigError(f"--output {path}: cannot be written ({error.strerror})") from None
    finally:
        temporary.unlink(missing_ok=True)
