"""Megatron-core's dataclasses of settings, filled with the trainer's fields and the options that a person gave.

In: a dataclass and the options by the names of its fields, as a recipe or a flag gave them. Out: a value of it. Options
win over the trainer's fields; what may not be given at all stands in ``rlpost.config.megatron_options``.
"""

from __future__ import annotations

import enum
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from rlpost.errors import ConfigError

T = TypeVar("T")


def configured(kind: type[T], options: Mapping[str, Any]) -> Callable[..., T]:
    """The constructor of a dataclass, with those options that are fields of it over the arguments that it gets.

    Raises:
        ConfigError: an option has not the type of its field; from the constructor, that Megatron-core refuses its
            arguments, in whatever way it does.
    """
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(kind) if known & options.keys() else {}
    given = {name: _typed(name, value, hints[name]) for name, value in options.items() if name in known}

    def construct(**ours: Any) -> T:
        try:
            return kind(**{**ours, **given})
        except (AssertionError, ImportError, RuntimeError, TypeError, ValueError) as error:
            options_given = ", ".join(f"{name} = {value}" for name, value in given.items())
            among = f" (options of Megatron-core that were given: {options_given})" if given else ""
            raise ConfigError(
                f"Megatron-core's {kind.__name__} refuses these settings: {error or type(error).__name__}{among}; "
                "change what it names"
            ) from error

    return construct


def _typed(name: str, value: Any, hint: Any) -> Any:
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        if str(value) in hint.__members__:
            return hint[str(value)]
        raise ConfigError(f"megatron.{name} = {value!r}: choose one of {', '.join(hint.__members__)}")
    problem = None
    for shape in (value, [value]):  # one word of a list came alone
        try:
            return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(shape)
        except ValidationError as error:
            problem = problem or error
    assert problem is not None
    needed = "; or ".join(dict.fromkeys(fault["msg"] for fault in problem.errors()))
    raise ConfigError(f"megatron.{name} (--{name.replace('_', '-')}) = {value!r}: {needed}")
