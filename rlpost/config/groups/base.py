"""Base class and field types of the groups of settings."""

from __future__ import annotations

import json
import typing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

Positive = Annotated[int, Field(gt=0)]
# made absolute when settings are loaded: a job may run in another folder
FilePath = Annotated[str, "path"]
Fraction = Annotated[float, Field(gt=0.0, le=1.0)]
PositiveNumber = Annotated[float, Field(gt=0.0)]


def is_path(field: FieldInfo) -> bool:
    """Whether a field, or a part of its union, is annotated as FilePath."""
    parts = typing.get_args(field.annotation)
    return "path" in field.metadata or any(
        "path" in getattr(part, "__metadata__", ()) for part in parts
    )


@cache
def path_keys(group: type[BaseModel]) -> tuple[str, ...]:
    """Return the settings of a group that are paths."""
    return tuple(key for key, field in group.model_fields.items() if is_path(field))


def _top_k(given: int) -> int:
    if given < 1 and given != -1:
        raise ValueError("must be 1 or more, or -1 for off")
    return given


TopK = Annotated[int, AfterValidator(_top_k)]


def variables(given: object) -> Any:
    """A table of variables, from a TOML table or from a flag's NAME=VALUE words."""
    if not isinstance(given, (list, tuple)):
        return given
    if wrong := [word for word in given if "=" not in str(word)]:
        raise ValueError(f"write NAME=VALUE, not {wrong[0]!r}")
    return dict(word.split("=", 1) for word in given)


Variables = Annotated[dict[str, str], BeforeValidator(variables)]


def _function_path(given: str) -> str:
    """``module.function``, or ``FILE.py:function`` with the file's path made absolute."""
    file, colon, name = given.rpartition(":")
    if colon and file.endswith(".py") and name.isidentifier():
        return f"{Path(file).expanduser().absolute()}:{name}"
    if not colon and "." in given and all(part.isidentifier() for part in given.split(".")):
        return given
    raise ValueError("write module.function or FILE.py:function")


def several(given: object) -> object:
    """Wrap a single word in a list."""
    if isinstance(given, str):
        return [given] if given else []
    return given


FilePaths = Annotated[tuple[FilePath, ...], BeforeValidator(several)]


def _json_table(given: object) -> object:
    """A table, from a TOML table or from the JSON object of a flag."""
    if isinstance(given, (list, tuple)):
        given = " ".join(map(str, given))
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ValueError(f"write a JSON object ({error})") from None
    return given


def is_json_table(field: FieldInfo) -> bool:
    """Whether a flag takes the value of a setting as a JSON object."""
    return BeforeValidator(_json_table) in field.metadata


JsonTable = Annotated[dict[str, Any], BeforeValidator(_json_table)]


FunctionPath = Annotated[str, AfterValidator(_function_path)]


@dataclass(frozen=True, slots=True)
class Switch:
    """The setting without which the others of its table have no effect.

    ``where`` and ``remedy`` are for messages, as in ``rlpost.config.checks.no_effect.Row``.
    """

    key: str
    where: str
    remedy: str


class Group(BaseModel):
    """One TOML table. Numbers are finite: JSON, which holds the settings of a run, has no others."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    decides: ClassVar[frozenset[str]] = frozenset()
    """Of a table of an extension: the settings that decide which answers are generated."""
    switch: ClassVar[Switch | None] = None
    """Of a table of an extension: the setting without which it has no effect."""
    idle_in_process: ClassVar[str | None] = None
    """Of a table of an extension: why it has no effect on a run in one process, if it has none."""

    @property
    def writes_answers(self) -> bool:
        """Whether the extension of the table writes the answers of the run."""
        return False

    @property
    def joining_engines(self) -> int:
        """Engines of the policy that the extension of the table submits with the run."""
        return 0

    @property
    def draws_by_seed(self) -> bool:
        """Whether the extension draws with --rollout-seed."""
        return False

    @property
    def has_effect(self) -> bool:
        """Whether the table can have an effect on the run."""
        return self.switch is None or bool(getattr(self, self.switch.key))

    @property
    def paths(self) -> list[tuple[str, str]]:
        """Paths within values of other types, each with its setting as messages spell it."""
        return []

    @property
    def functions(self) -> dict[str, str]:
        """Code of users by its role: FILE.py:NAME or module:NAME."""
        return {}

    @property
    def changed_keys(self) -> list[str]:
        """The settings whose values are not the defaults."""
        default = type(self)()
        keys = type(self).model_fields
        return [key for key in keys if getattr(self, key) != getattr(default, key)]
