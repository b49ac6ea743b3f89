"""The table [assets] of a recipe: the Hugging Face repositories of its models and data."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator

from rlpost.config.groups.base import Group, several

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")


def _repository(given: str) -> str:
    if not _REPOSITORY.fullmatch(given) or ".." in given:
        raise ValueError("write ORGANISATION/NAME, or ORGANISATION/NAME@REVISION")
    return given


Repositories = Annotated[
    tuple[Annotated[str, AfterValidator(_repository)], ...], BeforeValidator(several)
]


class AssetsConfig(Group):
    """What `rlpost fetch` brings. Each Hugging Face repository goes to the folder in $RLPOST_ASSETS
    named after the last part of its name."""

    hub_models: Repositories = ()
    """Model repositories, ORGANISATION/NAME or ORGANISATION/NAME@REVISION."""
    hub_datasets: Repositories = ()
    """Data set repositories, in the same format."""

    made_datasets: Annotated[tuple[Literal["addition"], ...], BeforeValidator(several)] = ()
    """Data sets that `rlpost fetch` writes itself: addition (sums of two numbers below 50, as
    questions to a chat model)."""
