"""Flags, made from the settings tree.

``--n-samples-per-prompt`` sets ``rollout.n_samples_per_prompt``.

Input: command-line words.
Output: the given values as text, by group and key, exactly as a TOML file would give them; types
and ranges are checked once, for files and flags alike, in ``rlpost.config.load``.
"""

from __future__ import annotations

import argparse
import functools
import math
import re
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic.fields import FieldInfo

from rlpost.config import extensions, pass_through
from rlpost.config.arguments import Parser, alike
from rlpost.config.groups.base import Group, is_json_table
from rlpost.config.megatron_options import option_names
from rlpost.config.other_flags import meant
from rlpost.errors import ConfigError

Values = dict[str, dict[str, Any]]
_MODEL_ARGS = "model_args"
"""The setting of [checkpoint] that holds the flags of MODEL_ARGS."""


def groups() -> dict[str, type[Group]]:
    """The groups of the tree by their TOML table name."""
    # Imported here: engines spell settings in messages and do not build the tree.
    from rlpost.config.tree import Config

    return {
        name: typing.cast(type[Group], field.annotation)
        for name, field in Config.model_fields.items()
    }


@functools.cache
def fields() -> Mapping[str, str]:
    """Every key of the tree and the group it belongs to."""
    return {key: name for name, group in groups().items() for key in group.model_fields}


def make_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """Make a parser with one flag for every leaf of the tree.

    ``parse`` converts its result to ``Values``. The recipe is the first argument, because after a
    flag with several values it would be one of them.
    """
    usage = f"{prog} [RECIPE] [--flag value ...]"
    parser = SettingsParser(prog=prog, usage=usage, description=description, allow_abbrev=False)
    parser.set_defaults(recipe=None)
    parser.add_argument(
        "--help-all", action=_HelpAll, nargs=0, help="show every setting of a recipe as well"
    )
    for name, group in groups().items():
        section = parser.add_argument_group(f"[{name}]", first_sentence(group.__doc__ or ""))
        parser.settings_sections.append(section)
        for key, field in group.model_fields.items():
            section.add_argument(
                flag(key), dest=f"{name}.{key}", default=argparse.SUPPRESS, **_shape(field)
            )
    _add_model_arguments(parser)
    return parser


def _add_model_arguments(parser: SettingsParser) -> None:
    """Accept Megatron's MODEL_ARGS, each as a flag; ``parse`` makes them one setting."""
    # Imported here: that module spells settings in messages.
    from rlpost.config.model_arguments import NAMES, SWITCHES

    section = parser.add_argument_group(
        "MODEL_ARGS of Megatron", "Each must agree with config.json, which alone decides."
    )
    parser.settings_sections.append(section)
    switch: dict[str, Any] = {"nargs": "?", "const": "true", "metavar": "BOOL"}
    for name in sorted(NAMES):
        shape = switch if name in SWITCHES else {"metavar": "X"}
        section.add_argument(
            flag(name), dest=f"{_MODEL_ARGS}.{name}", default=argparse.SUPPRESS, **shape
        )


class SettingsParser(Parser):
    """A parser whose ``--help`` shows the options of the verb; ``--help-all`` adds the settings."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.settings_sections: list[argparse._ArgumentGroup] = []

    def format_help(self) -> str:
        """Return the help without the settings, one screen."""
        tables = ", ".join(str(section.title) for section in self.settings_sections)
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        formatter.add_text(
            "RECIPE: a TOML file, or a name that `rlpost recipes` lists; before any flag."
        )
        for section in self._action_groups:
            if section not in self.settings_sections:
                formatter.start_section(section.title)
                formatter.add_text(section.description)
                formatter.add_arguments(section._group_actions)
                formatter.end_section()
        formatter.add_text(
            f"Every setting of a recipe is also a flag. --help-all lists them by table: {tables}."
        )
        return formatter.format_help()

    def format_help_all(self) -> str:
        """Return the help with all settings, many screens."""
        return super().format_help()


class _HelpAll(argparse.Action):
    """``--help-all``: print the whole help and end the command."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: object,
        values: object,
        word: object = None,
    ) -> None:
        assert isinstance(parser, SettingsParser)
        print(parser.format_help_all(), end="")
        parser.exit()


def is_json_setting(key: str) -> bool:
    """Whether the flag of a setting takes a JSON object."""
    return key in fields() and is_json_table(groups()[fields()[key]].model_fields[key])


def first_sentence(text: str) -> str:
    """Return the first sentence of a docstring, in one line.

    >>> first_sentence("Some of these. And\\n    those.")
    'Some of these.'
    """
    words = " ".join(text.split())
    found = re.match(r".*?\.(?= [A-Z-]|$)", words)
    return found[0] if found else words


def flag(key: str) -> str:
    """The flag of a key."""
    return "--" + key.replace("_", "-")


def parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str]
) -> tuple[argparse.Namespace, Values]:
    """Parse a command line. Raises ConfigError with a line for each unknown or refused flag.

    The namespace holds ``recipe``, ``flag_notes`` (a line for each accepted flag without effect)
    and the arguments that the caller added to the parser. The values
    hold the given settings, and the pass-through options of SGLang and Megatron-core under
    ``sglang`` and ``megatron``. The last occurrence of a flag wins.
    """
    words = list(arguments)
    if foreign := _keys_of_others(_free(words, parser._option_string_actions)):
        raise ConfigError("\n".join(foreign))
    recipe = words.pop(0) if words and not words[0].startswith("-") else None
    known = list(parser._option_string_actions)
    actions = parser._option_string_actions
    switches = [name for name in known if actions[name].nargs == 0]
    booleans = [name for name in known if actions[name].metavar == "BOOL"]
    sorted_words = pass_through.split(words, known, booleans)
    words, values = sorted_words.own, sorted_words.passed
    problems = [
        *sorted_words.refused,
        *(_unknown_word(word, words, known, switches) for word in sorted_words.unknown),
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    namespace, unknown = parser.parse_known_args(words)
    if unknown:
        raise ConfigError(_unknown_word(unknown[0], words, known, switches))
    namespace.recipe = recipe
    namespace.flag_notes = sorted_words.notes
    for dest, value in list(vars(namespace).items()):
        if "." in dest:
            name, key = dest.split(".")
            delattr(namespace, dest)
            if name != _MODEL_ARGS:
                values.setdefault(name, {})[key] = value
                continue
            model_args: Any = values.setdefault("checkpoint", {}).setdefault(name, {})
            if not isinstance(model_args, dict):
                raise ConfigError(f"{flag(key)}: --model-args is given too; add {key} to its table")
            model_args[key] = value
    return namespace, values


_ROOM: Mapping[int | str | None, float] = {None: 1.0, "*": math.inf, "+": math.inf}
"""Words that an argument takes, by its nargs."""


def _free(words: Sequence[str], actions: Mapping[str, argparse.Action]) -> Iterator[str]:
    """Yield the words that are no flag and no value of one: a path may look like a key."""
    room = 0.0
    for word in words:
        name, equals, _ = word.partition("=")
        if word.startswith("--") and "." not in name:
            action = actions.get(name)
            size = "*" if action is None else action.nargs  # options of others take all words
            room = 0.0 if equals else _ROOM.get(size, 0.0)
        elif room > 0 and not word.startswith("--"):
            room -= 1
        else:
            yield word


def _keys_of_others(words: Iterable[str]) -> list[str]:
    """Return a line for each ``a.b=VALUE`` of another program that an extension knows."""
    candidates = [word for word in words if re.match(r"[-+~]*[A-Za-z_]\w*\.\w[\w.]*=", word)]
    return [line for word in candidates if (line := extensions.answer_to(word)) is not None]


def _unknown_word(
    word: str, words: Sequence[str], known: Sequence[str], switches: Collection[str]
) -> str:
    if word.endswith(".toml"):
        return f"{word}: a recipe is the first word, before any flag"
    if not word.startswith("-"):
        before = [one for one in words[: words.index(word)] if one.startswith("-")]
        if not before:
            return f"{word}: one word too many"
        if before[-1] in switches:
            return (
                f"{word}: {before[-1]} takes no value; a recipe is the first word, before any flag"
            )
        return f"{word}: one word too many behind {before[-1]}, which takes one value"
    name = word.partition("=")[0]
    if line := meant(name):
        return line
    megatron = ["--" + other.replace("_", "-") for other in option_names() or ()]
    return f"{name}: unknown setting{alike(name, [*known, *megatron]) or '; --help-all lists every setting'}"


def _shape(field: FieldInfo) -> dict[str, Any]:
    """Return argparse's options for a field: a switch, several words or one."""
    help_text = (field.description or "").replace("%", "%%")
    admitted = kinds(field.annotation)
    if admitted == [bool]:
        return {"nargs": "?", "const": "true", "metavar": "BOOL", "help": help_text}
    default = "" if field.default in (None, "", (), {}) else f" (default: {field.default})"
    choices = [
        str(word)
        for kind in admitted
        if typing.get_origin(kind) is typing.Literal
        for word in typing.get_args(kind)
    ]
    if choices:
        return {"metavar": "{" + ",".join(choices) + "}", "help": help_text + default}
    if any(typing.get_origin(kind) in (tuple, dict) for kind in admitted):
        return {"nargs": "*", "metavar": "X", "help": help_text + default}
    return {"metavar": getattr(admitted[0], "__name__", "X").upper(), "help": help_text + default}


def kinds(annotation: object) -> list[object]:
    """The types an annotation admits, without None and without their metadata."""
    if typing.get_origin(annotation) is typing.Annotated:
        return kinds(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [kind for part in typing.get_args(annotation) for kind in kinds(part)]
    return [] if annotation is type(None) else [annotation]
