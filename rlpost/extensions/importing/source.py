"""Find what a file starts: the program, and its keys with their values.

Input: a script or a YAML file, and words of the command line (``NAME=VALUE`` is a variable of the
script, ``a.b=VALUE`` overrides a key). Output: an answer for each key and for each default of the
stack.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlpost.errors import ConfigError
from rlpost.extensions.importing import slime
from rlpost.extensions.importing.peers import row
from rlpost.extensions.importing.peers.nemo_rl import NEMO_RL
from rlpost.extensions.importing.peers.row import Answer, Entry, Stack, Unresolved, replaced
from rlpost.extensions.importing.peers.verl import VERL
from rlpost.extensions.importing.script import read_script
from rlpost.extensions.importing.shell import Shell
from rlpost.extensions.importing.shell_words import Word
from rlpost.extensions.importing.yaml_file import BASE_STEM, BASE_VALUES, read_yaml, scalar

_PROGRAMS: Sequence[tuple[re.Pattern[str], str]] = (
    (re.compile(r"verl\.trainer\.main_ppo"), "verl"),
    (re.compile(r"(.*/)?main_ppo\.py"), "verl"),
    (re.compile(r"(.*/)?train(_async)?\.py"), "slime"),
    (re.compile(r"(.*/)?run_grpo\w*\.py"), "NeMo-RL"),
)
_LAUNCHER = re.compile(r"(.*/)?(python[\d.]*|torchrun|uv|accelerate|deepspeed)|-m|--")
_PRINTS = ("echo", "printf", "cat", "ls", "cp", "grep")
_OVERRIDE = re.compile(r"(\+{0,2}|~)([A-Za-z_][\w-]*(\.[\w-]+)+|model_engine)(=(.*))?", re.DOTALL)
_CONFIGS = ("ppo_trainer", "ppo_megatron_trainer")


@dataclass(frozen=True, slots=True)
class Source:
    """A file that was read.

    Attributes:
        stack: the name of the stack.
        where: the line of the command, or the kind of the file.
        given: an answer for each key.
        absent: an answer for each default of the stack that the file leaves.
        problems: a line for each file that is missing and each command that is not read.
    """

    stack: str
    where: str
    given: tuple[Answer, ...]
    absent: tuple[Answer, ...]
    problems: tuple[str, ...]


def read(path: Path, words: Sequence[str]) -> Source:
    """Return what a file gives. Raises ConfigError if it starts no program that is known."""
    overrides, variables = _split(words)
    if path.suffix in (".yaml", ".yml"):
        if variables:
            raise ConfigError(
                f"{next(iter(variables))}: a variable is of a script; a key has a dot"
            )
        values = read_yaml(path, overrides)
        stack = _stack_of(path, values.entries)
        return _source(stack, "YAML", values.entries, values.problems)
    if path.suffix == ".toml":
        raise ConfigError(f"{path.name}: a recipe already; use rlpost check {path}")
    shell = read_script(path, variables)
    name, command, others = _command(path, shell)
    problems = [*shell.problems, *others]
    where = f"line {command[0].line}"
    if name == "slime":
        if overrides:
            raise ConfigError(
                f"{next(iter(overrides))}: slime has flags; give NAME=VALUE of a variable"
            )
        answers = tuple(slime.answers(command, shell.unknown))
        return Source(name, where, answers, tuple(slime.defaults(answers)), tuple(problems))
    entries, odd = _entries(command[1:], shell)
    entries |= overrides
    if name == "NeMo-RL":
        file, missing = _base(path, command, shell)
        values = read_yaml(file, entries)
        entries, problems = values.entries, [*problems, *missing, *values.problems]
    problems += [
        f"{one.key} {one.value}: its values are not read, so keys that it sets are below at other values"
        for one in odd
        if one.key == "--config-name" and not one.is_needless
    ]
    stack = VERL if name == "verl" else NEMO_RL
    source = _source(stack, where, entries, problems)
    return Source(source.stack, where, (*source.given, *odd), source.absent, source.problems)


def _split(words: Sequence[str]) -> tuple[dict[str, Entry], dict[str, str]]:
    overrides: dict[str, Entry] = {}
    variables: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        match = _OVERRIDE.fullmatch(word)
        if match and equals:
            overrides[match[2]] = Entry(scalar(match[5]))
        elif equals and re.fullmatch(r"[A-Za-z_]\w*", name):
            variables[name] = value
        else:
            raise ConfigError(f"{word}: write NAME=VALUE for a variable, or a.b=VALUE for a key")
    return overrides, variables


def _stack_of(path: Path, entries: Mapping[str, Entry]) -> Stack:
    tops = {key.partition(".")[0] for key in entries}
    if "actor_rollout_ref" in tops:
        return VERL
    if tops & {"policy", "grpo", "loss_fn"}:
        return NEMO_RL
    raise ConfigError(
        f"{path.name}: neither NeMo-RL's tables (policy, grpo, loss_fn) nor verl's (actor_rollout_ref)"
    )


def _source(
    stack: Stack, where: str, entries: Mapping[str, Entry], problems: Sequence[str]
) -> Source:
    answers = [row.answer(stack, key, entries) for key in entries]
    given = tuple(one for one in answers if not one.is_default)
    absent = (*(one for one in answers if one.is_default), *row.defaults(stack, entries))
    return Source(stack.name, where, given, absent, tuple(problems))


def _command(path: Path, shell: Shell) -> tuple[str, list[Word], list[str]]:
    """Return the stack and the words from its program on; a line for each further command."""
    commands = []
    for words in shell.commands:
        program = _program(words, shell)
        if program is not None:
            commands.append(program)
    if not commands:
        raise ConfigError(
            f"{path.name}: no command starts slime's train.py, verl.trainer.main_ppo or NeMo-RL's "
            "run_grpo.py; give a script that does, or NeMo-RL's YAML file"
        )
    others = [
        f"line {words[0].line}: another command, {words[0].text}, is not read; import a script with "
        "it alone"
        for _, words in commands[1:]
    ]
    return commands[0][0], commands[0][1], others


def _program(words: list[Word], shell: Shell) -> tuple[str, list[Word]] | None:
    """Return the stack of a command and its words from the program on; None if it starts none.

    A program is the command itself, or stands behind an interpreter, ``-m`` or ``--``; a word that
    is not known may be an interpreter.
    """
    if words[0].text in _PRINTS:
        return None
    is_started = True
    for at, word in enumerate(words):
        name = next((name for form, name in _PROGRAMS if form.fullmatch(word.text)), None)
        if name is not None and is_started:
            return name, words[at:]
        is_other = not _LAUNCHER.fullmatch(word.text) and shell.unknown(word.text) is None
        is_started = (is_started and at > 0) or not is_other
    return None


def _entries(words: Sequence[Word], shell: Shell) -> tuple[dict[str, Entry], list[Answer]]:
    """Return the overrides of a command line, and an answer for each other word."""
    entries: dict[str, Entry] = {}
    odd: list[Answer] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if not word.text:
            continue
        match = _OVERRIDE.fullmatch(word.text)
        if match is not None and match[1] == "~":
            odd.append(
                Answer(word.text, "", word.line, why="a key that is removed is at its default")
            )
        elif match is not None and match[4]:
            why = shell.unknown(match[5])
            value = Unresolved(why) if why else scalar(match[5])
            if (before := entries.pop(match[2], None)) is not None:
                text = "" if isinstance(before.value, Unresolved) else before.value
                odd.append(replaced(Answer(match[2], text, before.line), word.line))
            entries[match[2]] = Entry(value, word.line)
        elif word.text.startswith("--config"):
            odd.append(_config_word(word, left, shell))
        elif word.text.startswith("-") and match is None:
            odd.append(
                Answer(shell.plain(word.text), "", word.line, why="no key of a configuration")
            )
        else:
            why = shell.unknown(word.text) or "no KEY=VALUE"
            odd.append(Answer(shell.plain(word.text), "", word.line, why=why))
    return entries, odd


def _config_word(word: Word, left: list[Word], shell: Shell) -> Answer:
    """Return the answer for ``--config-name X`` and its siblings."""
    name, equals, value = word.text.partition("=")
    if not equals and left:
        value = left.pop(0).text
    stem = value.strip("'\"").removesuffix(".yaml")
    if name in ("--config", "--config-path", "--config-dir") or stem in _CONFIGS:
        return Answer(name, shell.plain(value), word.line, why="of the program", is_needless=True)
    why = "its values are not read; import that YAML file, with these keys behind it"
    return Answer(name, shell.plain(value), word.line, why=why)


def _base(path: Path, command: Sequence[Word], shell: Shell) -> tuple[Path | None, Sequence[str]]:
    """Return the YAML file that NeMo-RL's ``--config`` names, and a line if it is missing.

    None is the base of its recipes, which is known.
    """
    texts = [word.text for word in command]
    named = [text.partition("=")[2] for text in texts if text.startswith("--config=")]
    named += [after for text, after in itertools.pairwise(texts) if text == "--config"]
    if not named:
        return None, ()
    if why := shell.unknown(named[0]):
        raise ConfigError(f"{path.name}: --config decides all other keys, and {why}")
    folders = [Path(), *path.absolute().parents][:6]
    file = next((one / named[0] for one in folders if (one / named[0]).is_file()), None)
    if file is None and Path(named[0]).stem == BASE_STEM:
        return None, (f"--config {named[0]}: no such file; {BASE_VALUES}",)
    if file is None:
        raise ConfigError(
            f"{path.name}: --config {named[0]}, which decides all other keys, is no file below the folders of "
            "the script; import that YAML file, with a.b=VALUE behind it"
        )
    return file, ()
