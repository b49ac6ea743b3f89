"""Settings as messages spell them: the flag with its value, and the value's file. Pure.

Input: a ``Config``, the origins of its values, a message. Output: text. A message has the form
flag, value, constraint, remedy, and names a setting by its flag alone:
``--tensor-model-parallel-size 3 does not divide ...; use 1, 2 or 4``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlpost.config.flags import fields, flag, is_json_setting

if TYPE_CHECKING:
    from rlpost.config.tree import Config

COMMAND_LINE = "the command line"
"""The origin of a value that a flag gave; messages do not mention it."""
DEFAULT = "the default"
MOST_CHOICES = 12
_PROJECT = Path(__file__).parents[2]
_KEY = re.compile(r"(?P<key>\w+): (?:'(?P<value>[^']*)'(?P<colon>;?))?")


def spelled(config: Config, key: str) -> str:
    """``--tensor-model-parallel-size 3``; the flag alone for a setting without a value."""
    return flag_text(key, value_of(config, key))


def flag_text(key: str, value: object) -> str:
    """A flag and its value; a JSON object in quotes, as a shell reads it."""
    text = value_text(value)
    if isinstance(value, Mapping) and is_json_setting(key):
        text = f"'{json.dumps(value)}'"
    return f"{flag(key)} {text}".rstrip()


def value_of(config: Config, key: str) -> Any:
    """The value of a setting, whatever its table."""
    return getattr(getattr(config, fields()[key]), key)


def value_text(value: object) -> str:
    """A value as it is written behind its flag.

    >>> value_text(True), value_text(("a", "b")), value_text(None), value_text(1e-6)
    ('true', 'a b', '', '1e-06')
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return " ".join(map(value_text, value))
    if isinstance(value, Mapping):
        return " ".join(f"{name}={value_text(entry)}" for name, entry in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)


def with_values(config: Config, **values: object) -> Config:
    """The same settings with other values, to try a remedy."""
    updates: dict[str, dict[str, object]] = {}
    for key, value in values.items():
        updates.setdefault(fields()[key], {})[key] = value
    groups = {
        name: getattr(config, name).model_copy(update=update) for name, update in updates.items()
    }
    return config.model_copy(update=groups)


def listed(words: Iterable[object], last: str = "or") -> str:
    """``1, 2 or 4``; long lists end in ``...``.

    >>> listed([1, 2, 4]), listed(["a"]), listed(["a", "b"], "and")
    ('1, 2 or 4', 'a', 'a and b')
    """
    texts = [str(word) for word in words]
    if len(texts) > MOST_CHOICES:
        return ", ".join([*texts[:MOST_CHOICES], "..."])
    return f"{', '.join(texts[:-1])} {last} {texts[-1]}" if len(texts) > 1 else "".join(texts)


def divisors(number: int) -> list[int]:
    """The divisors of a number, in order."""
    return [one for one in range(1, number + 1) if number % one == 0]


def nearest(numbers: Collection[int], wanted: int, count: int = 4) -> list[int]:
    """The members of ``numbers`` that are nearest to ``wanted``, in order.

    >>> nearest([1, 2, 4, 8, 16], 7, 2)
    [4, 8]
    """
    return sorted(sorted(numbers, key=lambda number: (abs(number - wanted), number))[:count])


def with_origins(line: str, config: Config, origins: Mapping[str, str]) -> str:
    """Add to a message the origin of each setting that the command line does not give.

    The origin follows the setting. A setting counts where it is spelled with the value that it has;
    remedies spell other values.
    """
    seen: set[str] = set()
    for key in sorted(
        (key for key in fields() if flag(key) in line), key=lambda key: line.index(flag(key))
    ):
        origin = origins.get(f"{fields()[key]}.{key}", DEFAULT)
        text = spelled(config, key)
        if origin != COMMAND_LINE and " " in text:
            match = re.search(rf"(?<![\w-]){re.escape(text)}(?=$|[\s;,:)])", line)
            if match:
                shown = "same file" if origin in seen else near_path(origin)
                line = f"{line[: match.end()]} ({shown}){line[match.end() :]}"
                seen |= {origin} - {DEFAULT}
    return line


def near_path(origin: str) -> str:
    """A file as seen from the working directory or from the project; other texts as they are.

    >>> near_path("the default")
    'the default'
    """
    for base in (Path.cwd(), _PROJECT):
        if origin.startswith(f"{base}{os.sep}"):
            return os.path.relpath(origin, base)
    return origin


def as_flag(line: str) -> str:
    """Replace the name of a field in an error of a job's specification by its flag.

    >>> as_flag("time: 'soon'; write minutes")
    '--time soon: write minutes'
    >>> as_flag("exclude: n[ is no list"), as_flag("else: 'x'")
    ('--exclude n[ is no list', "else: 'x'")
    """
    found = _KEY.match(line)
    if found is None or found["key"] not in fields():
        return line
    colon = ":" if found["colon"] else ""
    return f"{flag(found['key'])} {found['value'] or ''}{colon}{line[found.end() :]}"
