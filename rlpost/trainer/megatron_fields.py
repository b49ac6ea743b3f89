"""Construct Megatron-core's configuration dataclasses.

Their fields come from the trainer and from the user's options.

Input: a dataclass, and options by field name from a recipe or flags. Output: an instance. Options
take precedence over the trainer's fields; ``rlpost.config.megatron_options`` lists those that are
not allowed.
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


def configured(kind: type[T], options: Mapping[str, object]) -> Callable[..., T]:
    """Return a constructor of ``kind`` in which ``options`` take precedence over the arguments.

    Options that are not fields of ``kind`` are ignored.

    Raises:
        ConfigError: an option does not have the type of its field. The constructor raises it if
            Megatron-core rejects the arguments.
    """
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(kind) if known & options.keys() else {}
    typed_options = {
        name: _typed(name, value, hints[name]) for name, value in options.items() if name in known
    }

    def construct(**ours: object) -> T:
        try:
            return kind(**{**ours, **typed_options})
        except (AssertionError, ImportError, RuntimeError, TypeError, ValueError) as error:
            options_given = ", ".join(f"{name} = {value}" for name, value in typed_options.items())
            among = (
                f" (options of Megatron-core in the settings: {options_given})"
                if typed_options
                else ""
            )
            raise ConfigError(
                f"Megatron-core's {kind.__name__} refuses these settings: {error or type(error).__name__}{among}; "
                "change what it names"
            ) from error

    return construct


def _typed(name: str, value: object, hint: Any) -> object:
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        if str(value) in hint.__members__:
            return hint[str(value)]
        raise ConfigError(
            f"megatron.{name} = {value!r}: choose one of {', '.join(hint.__members__)}"
        )
    problem = None
    for shape in (value, [value]):  # a list of one element may be given as a scalar
        try:
            return TypeAdapter(
                hint, config=ConfigDict(arbitrary_types_allowed=True)
            ).validate_python(shape)
        except ValidationError as error:
            problem = problem or error
    assert problem is not None
    needed = "; or ".join(dict.fromkeys(fault["msg"] for fault in problem.errors()))
    raise ConfigError(f"megatron.{name} (--{name.replace('_', '-')}) = {value!r}: {needed}")
