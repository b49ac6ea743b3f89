"""What every group of settings is made of."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
FilePath = Annotated[str, "path"]  # made absolute when settings are loaded: a job may run in another folder
Fraction = Annotated[float, Field(gt=0.0, le=1.0)]


def _variables(given: Any) -> Any:
    """A flag gives words NAME=VALUE, a file a table."""
    if not isinstance(given, (list, tuple)):
        return given
    if wrong := [word for word in given if "=" not in str(word)]:
        raise ValueError(f"write NAME=VALUE, not {wrong[0]!r}")
    return dict(word.split("=", 1) for word in given)


Variables = Annotated[dict[str, str], BeforeValidator(_variables)]


class Group(BaseModel):
    """One TOML table."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
