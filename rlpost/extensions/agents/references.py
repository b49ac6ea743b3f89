"""Variables with keys that arguments of environments name instead of writing them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlpost.config.keys import REFERENCE, SUFFIX


def references(value: object) -> Iterator[str]:
    """Yield the variables that texts within a JSON value name.

    >>> list(references({"env": {"OPENAI_API_KEY": "${OPENAI_ENGINES_KEY}", "A": "x ${B}"}}))
    ['OPENAI_ENGINES_KEY']
    """
    if isinstance(value, str) and (match := REFERENCE.fullmatch(value)):
        yield match[1]
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from references(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from references(each)


def resolve_references(value: object, environ: Mapping[str, str]) -> Any:
    """Return a JSON value with each ``${NAME}`` replaced.

    Raises KeyError for a variable that is not set, or whose key is for another service.
    """
    if isinstance(value, str) and (match := REFERENCE.fullmatch(value)):
        if not match[1].endswith(SUFFIX):
            raise KeyError(match[1])
        return environ[match[1]]
    if isinstance(value, Mapping):
        return {name: resolve_references(each, environ) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [resolve_references(each, environ) for each in value]
    return value
