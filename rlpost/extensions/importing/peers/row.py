"""Convert keys of another stack by a table of rows. Pure.

Input: the rows of a stack, and the keys and values that a file gives. Output: settings of rlpost,
and for every key, given or at the stack's default, exactly one ``Answer``. A key without a row is an
answer as well, so no key is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

Settings = dict[str, object]
"""Settings of rlpost by key. A key that is no setting is an option of Megatron-core."""


class _Absent:
    """The type of ``ABSENT``."""


ABSENT = _Absent()
"""The default of a row whose key has no effect while it is not given."""


LARGEST = 10**18
"""A bound of numbers of other stacks: what is larger is no size of a run."""


class NotHere(Exception):
    """A value that has no counterpart here; the text is the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A value as a file gives it, its line (0: none), and whether it is the stack's default."""

    value: object
    line: int = 0
    is_default: bool = False


@dataclass(frozen=True, slots=True)
class Unresolved:
    """A value that cannot be known without running the file, and why."""

    why: str


@dataclass(slots=True)
class Given:
    """A key as its row sees it.

    Attributes:
        key: the key as it was written, without a prefix such as ``+``.
        value: its value.
        tail: what stands for the ``*`` of the row's key; empty without one.
        look: the value of another key of the stack, given or default.
    """

    key: str
    value: object
    tail: str
    look: Callable[[str], object]

    def number(self) -> int | float:
        """Return the value as a number. Raises NotHere."""
        return as_number(self.key, self.value)

    def count(self) -> int:
        """Return the value as a whole number. Raises NotHere."""
        return as_count(self.key, self.value)


def as_number(key: str, value: object) -> int | float:
    """Return a value as a number. Raises NotHere."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise NotHere(f"{key} must be a number here")
    if not -LARGEST < value < LARGEST:  # also for what is no number, such as nan
        raise NotHere(f"{key} must be between -1e18 and 1e18 here")
    return value


def as_count(key: str, value: object) -> int:
    """Return a value as a whole number. Raises NotHere."""
    number = as_number(key, value)
    if number != int(number):
        raise NotHere(f"{key} must be a whole number here")
    return int(number)


Convert = Callable[[Given], Settings]


@dataclass(frozen=True, slots=True)
class Row:
    """A key of another stack.

    Attributes:
        keys: its names, the newest first; a last part ``*`` is any key below, and ``*`` elsewhere
            any text.
        settings: the settings of rlpost that it sets.
        convert: returns them with their values; raises NotHere.
        note: the unit or condition, or why nothing is needed.
        default: the stack's default, where an absent key has an effect there.
    """

    keys: tuple[str, ...]
    settings: tuple[str, ...]
    convert: Convert
    note: str = ""
    default: object = ABSENT

    def matches(self, key: str) -> list[tuple[int, str]]:
        """Return the length of each pattern of the row that fits ``key``, and what ``*`` stands for."""
        found = []
        for pattern in self.keys:
            if "*" in pattern and (match := re.fullmatch(_regular(pattern), key)):
                found.append((len(pattern), match.groups()[-1]))
        return found


def _regular(pattern: str) -> str:
    return re.escape(pattern).replace(r"\*", "(.+)")


@dataclass(frozen=True, slots=True)
class Stack:
    """A training stack: its name and its rows."""

    name: str
    rows: tuple[Row, ...]

    def find(self, key: str) -> tuple[Row, str] | None:
        """Return the row of a key and its tail: an exact name first, then the longest pattern."""
        for one in self.rows:
            if key in one.keys:
                return one, ""
        fitting = [(*match, one) for one in self.rows for match in one.matches(key)]
        if not fitting:
            return None
        _, tail, longest = max(fitting, key=lambda match: match[0])
        return longest, tail


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one key.

    Attributes:
        key, value, line: as the file gives them; ``line`` is 0 for a default.
        settings: what it sets; empty if nothing.
        why: without settings the reason, and with ``is_needless`` why nothing has to be set.
        is_default: the file does not give the key, and the stack's default differs from ours.
    """

    key: str
    value: object
    line: int
    settings: Settings = field(default_factory=dict)
    why: str = ""
    is_needless: bool = False
    is_default: bool = False


def replaced(answer: Answer, line: int) -> Answer:
    """Return the answer for a key that is given again on ``line``, where the last one counts."""
    where = f"on line {line}" if line and line != answer.line else "behind it"
    return replace(answer, why=f"given again {where}, and the last one counts", is_needless=True)


class Needless(Exception):
    """A value for which nothing has to be set; the text says why."""


def answer(stack: Stack, key: str, given: Mapping[str, Entry]) -> Answer:
    """Return what a key of ``given`` becomes."""
    entry = given[key]
    if isinstance(entry.value, Unresolved):
        return Answer(key, "", entry.line, why=entry.value.why, is_default=entry.is_default)
    match = stack.find(key)
    if match is None:
        why = f"rlpost knows no such key of {stack.name}; docs/settings.md has every setting"
        return Answer(key, entry.value, entry.line, why=why)
    blank = Answer(key, entry.value, entry.line, is_default=entry.is_default)
    return _converted(stack, match, blank, given)


def defaults(stack: Stack, given: Mapping[str, Entry]) -> Iterable[Answer]:
    """Yield what the stack's own defaults become, for the keys that ``given`` does not have."""
    for row in stack.rows:
        if row.default is ABSENT or any(name in given for name in row.keys):
            continue
        blank = Answer(row.keys[0], row.default, 0, is_default=True)
        result = _converted(stack, (row, ""), blank, given)
        if not result.is_needless:
            yield result


def _converted(
    stack: Stack, match: tuple[Row, str], blank: Answer, entries: Mapping[str, Entry]
) -> Answer:
    row, tail = match

    def look(name: str) -> object:
        other = stack.find(name)
        names = (name,) if other is None else (name, *other[0].keys)
        for one in names:
            if one in entries:
                value = entries[one].value
                if isinstance(value, Unresolved):
                    raise NotHere(f"it needs {one}: {value.why}")
                return value
        default = ABSENT if other is None else other[0].default
        return None if isinstance(default, _Absent) else default

    def made(settings: Settings, why: str, *, is_needless: bool) -> Answer:
        return Answer(
            blank.key, blank.value, blank.line, settings, why, is_needless, blank.is_default
        )

    try:
        settings = row.convert(Given(blank.key, blank.value, tail, look))
    except NotHere as error:
        return made({}, str(error), is_needless=False)
    except Needless as error:
        return made({}, str(error), is_needless=True)
    return made(settings, "" if tail else row.note, is_needless=not settings)


def same(value: object, other: object) -> bool:
    """Whether two values are equal; 1 and 1.0 are, 1 and true are not."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def row(
    keys: str,
    settings: str,
    convert: Convert | None = None,
    *,
    note: str = "",
    default: object = ABSENT,
) -> Row:
    """Return the row of a key that sets something.

    Args:
        keys: names of the key, separated by blanks.
        settings: settings that it sets; without ``convert`` the single one that takes its value.
    """
    names = _names(settings)
    return Row(_names(keys), names, convert or (lambda it: {names[0]: it.value}), note, default)


def below(table: str, names: str) -> str:
    """Return the keys of a table, ``needless`` takes them.

    >>> below("a.", "b c")
    'a.b a.c'
    """
    return " ".join(table + name for name in names.split())


def needless(
    keys: str, why: str, *values: object, instead: str = "", default: object = ABSENT
) -> Row:
    """Return the row of a key that needs no setting here.

    Args:
        values: values of which that is true; without any, all.
        instead: the reason and remedy for other values. Default: ``why``.
    """

    def convert(it: Given) -> Settings:
        if not values or any(same(it.value, value) for value in values):
            raise Needless(why)
        raise NotHere(instead or why)

    return Row(_names(keys), (), convert, why if not instead else f"{why}; else {instead}", default)


def lacking(keys: str, why: str, *neutral: object, default: object = ABSENT) -> Row:
    """Return the row of a key without a counterpart; at ``neutral`` values nothing is lost."""

    def convert(it: Given) -> Settings:
        if any(same(it.value, value) for value in neutral):
            raise Needless("off, as here")
        raise NotHere(why)

    return Row(_names(keys), (), convert, why, default)


def choice(setting: str, table: Mapping[object, object], remedy: str) -> Convert:
    """Return a conversion by a table of values; others are not here, with ``remedy``."""

    def convert(it: Given) -> Settings:
        for theirs, ours in table.items():
            if same(it.value, theirs):
                return {setting: ours}
        raise NotHere(remedy)

    return convert


def when(key: str, value: object, why: str, convert: Convert) -> Convert:
    """Return ``convert`` where another key has ``value``; elsewhere the key has no effect there."""

    def checked(it: Given) -> Settings:
        if not same(it.look(key), value):
            raise Needless(why)
        return convert(it)

    return checked
