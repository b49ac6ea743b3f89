"""The table [assets] of a recipe: where on the Hugging Face hub its model and its data come from."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

from rlpost.config.groups.base import Group, several

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")


def _repository(given: str) -> str:
    if not _REPOSITORY.fullmatch(given) or ".." in given:
        raise ValueError("write ORGANISATION/NAME, or ORGANISATION/NAME@REVISION")
    return given


Repositories = Annotated[tuple[Annotated[str, AfterValidator(_repository)], ...], BeforeValidator(several)]


class AssetsConfig(Group):
    """What `rlpost fetch` brings from the Hugging Face hub, each to the folder of its last name in $RLPOST_ASSETS."""

    hub_models: Repositories = ()
    """Repositories of models, ORGANISATION/NAME or ORGANISATION/NAME@REVISION."""
    hub_datasets: Repositories = ()
    """Repositories of data sets, in the same words."""
