"""Merge the answers of rows into settings that load, and write them as a recipe. Pure.

Input: an answer for every key of a file, and the answers of the stack's own defaults. Output: the
three lists of an import, each key in exactly one, and the settings by table with the key that each
comes from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from rlpost.cli.check_installed import pass_through_problems
from rlpost.config.checks.no_effect import idle_settings
from rlpost.config.flags import Values, fields, flag, groups
from rlpost.config.load import load
from rlpost.config.masking import mask
from rlpost.config.show import one_line, toml_value
from rlpost.config.wording import flag_text, value_of, value_text
from rlpost.errors import ConfigError
from rlpost.extensions.importing.peers.row import Answer, Settings

_WIDTH = 48


@dataclass(slots=True)
class Imported:
    """What an import found.

    Attributes:
        taken: keys that set something here, and those that need no setting.
        defaults: keys that the file does not give, whose default in the stack is another one.
        left: keys that are not here, with the reason.
        settings: by table and key.
        sources: the stack's key of each ``table.key``.
    """

    taken: list[Answer] = field(default_factory=list)
    defaults: list[Answer] = field(default_factory=list)
    left: list[Answer] = field(default_factory=list)
    settings: Values = field(default_factory=dict)
    sources: dict[str, Answer] = field(default_factory=dict)

    def add(self, answer: Answer) -> None:
        """Sort an answer into its list; its settings are checked one by one."""
        if answer.why and not answer.settings and not answer.is_needless:
            self.left.append(answer)
            return
        settings = {key: value for key, value in answer.settings.items() if value is not None}
        if answer.settings and not settings:
            answer = replace(answer, why="without a value, as here", is_needless=True)
        if answer.is_default and settings:
            settings = self._other_than_ours(settings)
        if answer.is_default and not settings:
            return
        problem = _problem(settings) or self._conflict(settings)
        if problem:
            self.left.append(replace(answer, settings={}, why=problem, is_needless=False))
            return
        answer = replace(answer, settings=settings)
        (self.defaults if answer.is_default else self.taken).append(answer)
        for key, value in settings.items():
            table = table_of(key)
            both = (self.settings.setdefault(table, {}).get(key), value)
            self.settings[table][key] = _merged(*both)
            self.sources[f"{table}.{key}"] = answer

    def _conflict(self, settings: Settings) -> str | None:
        for key, value in settings.items():
            before = self.settings.get(table_of(key), {}).get(key)
            if before is None or before == value or isinstance(value, (Mapping, list)):
                continue
            other = self.sources[f"{table_of(key)}.{key}"].key
            return f"{flag(key)} is {value_text(before)} by {other}, and can have one value"
        return None

    def _other_than_ours(self, settings: Settings) -> Settings:
        """Return the settings that change something beside those that the file gives."""
        try:
            ours = load([], self.settings).config
            both = {table: dict(entries) for table, entries in self.settings.items()}
            for table, entries in _nested(settings).items():
                both.setdefault(table, {}).update(entries)
            theirs = load([], both).config
        except ConfigError:
            return settings  # reported by the check of the whole recipe
        return {
            key: value
            for key, value in settings.items()
            if key not in fields() or value_of(theirs, key) != value_of(ours, key)
        }

    def drop_idle(self) -> None:
        """Take out settings that have no effect beside the others; ``check`` would refuse them."""
        try:
            config = load([], self.settings).config
        except ConfigError:
            return
        for keys, sentence in idle_settings(config):
            for key in keys:
                answer = self.sources.pop(f"{table_of(key)}.{key}", None)
                self.settings.get(table_of(key), {}).pop(key, None)
                if answer is not None:
                    self._without(answer, key, sentence)

    def _without(self, answer: Answer, key: str, sentence: str) -> None:
        kept = {name: value for name, value in answer.settings.items() if name != key}
        source = self.defaults if answer.is_default else self.taken
        at = next(index for index, one in enumerate(source) if one is answer)
        if kept:
            changed = replace(answer, settings=kept)
            source[at] = changed
            for name in kept:
                self.sources[f"{table_of(name)}.{name}"] = changed
        elif answer.is_default:
            del source[at]
        else:
            source[at] = replace(answer, settings={}, why=sentence, is_needless=True)

    def recipe(self, origin: str) -> str:
        """Return the settings as a recipe, each with the key that it comes from."""
        blocks = [f"# Made by `rlpost import` from {one_line(origin)}."]
        for name in groups():
            if not self.settings.get(name):
                continue
            lines = [f"[{name}]"]
            for key, value in self.settings[name].items():
                source = self.sources[f"{name}.{key}"]
                said = f"the default of {source.key}" if source.is_default else source.key
                text = f"{key} = {toml_value(value)}"
                lines.append(f"{text:<{_WIDTH}}  # {one_line(said)}")
            blocks.append("\n".join(lines))
        return "\n\n".join(blocks) + "\n"


def table_of(key: str) -> str:
    """Return the table of a setting, or of an option that is passed through."""
    if key in fields():
        return fields()[key]
    return "sglang" if key.startswith("sglang_") else "megatron"


def shown(answer: Answer) -> str:
    """Return ``key = value``, without a secret."""
    key = answer.key.rpartition(".")[2]
    text = toml_value(mask(key, answer.value)) if answer.value is not None else "null"
    return f"{answer.key} = {text if len(text) <= 80 else text[:77] + '...'}"


def flags_of(settings: Settings) -> str:
    """Return settings as they are written on a command line."""
    return " ".join(flag_text(key, value) for key, value in settings.items())


def _merged(before: object, value: object) -> object:
    if isinstance(before, Mapping) and isinstance(value, Mapping):
        return {**before, **value}
    return value


def _nested(settings: Settings) -> Values:
    tables: Values = {}
    for key, value in settings.items():
        tables.setdefault(table_of(key), {})[key] = value
    return tables


def _problem(settings: Settings) -> str | None:
    """Return why a value is refused here, or None."""
    try:
        config = load([], _nested(settings)).config
    except ConfigError as error:
        return str(error).splitlines()[0]
    if {"megatron", "sglang"} & _nested(settings).keys():
        return next(iter(pass_through_problems(config)), None)
    return None


def imported(given: Iterable[Answer], absent: Iterable[Answer]) -> Imported:
    """Return the import of all keys of a file and of the defaults that it leaves."""
    result = Imported()
    for answer in (*given, *absent):
        result.add(answer)
    result.drop_idle()
    return result
