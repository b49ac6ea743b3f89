"""The ``args`` of slime's plug-ins.

Input: the settings (``rlpost.config.plugin_settings``); later the address of the engines. Output: a
namespace for plug-ins. A plug-in may add attributes, but cannot change a setting of the run.
"""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from rlpost.errors import suggestion
from rlpost.extensions.slime.sample import AbsentAttribute

ROUTER_ARGUMENTS = ("sglang_router_ip", "sglang_router_port", "sglang_api_key")
"""Known only while generate functions run."""


class Arguments(Namespace):
    """A namespace whose settings cannot be changed.

    A copy is a plain namespace without this restriction.
    """

    def __init__(self, settings: Mapping[str, object]) -> None:
        object.__setattr__(self, "_held", frozenset(settings))
        vars(self).update(settings)

    def connected(self, url: str, api_key: str) -> None:
        """Set the address and API key of the engines: those of the first one stand for all."""
        address = urlsplit(url)
        known = {
            "sglang_router_ip": address.hostname,
            "sglang_router_port": address.port,
            "sglang_api_key": api_key,
        }
        object.__setattr__(self, "_held", self._held | frozenset(known))
        vars(self).update(known)

    def __getattr__(self, name: str) -> Any:
        """Raise an error; Python calls this only for missing attributes."""
        if name.startswith("_"):
            raise AttributeError(name)
        if name in ROUTER_ARGUMENTS:
            raise AbsentAttribute(f"args.{name}: only generate functions reach the engines")
        raise AbsentAttribute(
            f"args.{name}: this run has no such setting{suggestion(name, vars(self))}"
        )

    def __setattr__(self, name: str, value: object) -> None:
        if name in self._held and value != vars(self)[name]:
            flag = "--" + name.replace("_", "-")
            raise AbsentAttribute(
                f"args.{name} = {value!r}: a function cannot change a setting; start with {flag}"
            )
        object.__setattr__(self, name, value)

    def __copy__(self) -> Namespace:
        return Namespace(**{name: value for name, value in vars(self).items() if name != "_held"})

    def __deepcopy__(self, memo: dict[int, object]) -> Namespace:
        return copy.deepcopy(self.__copy__(), memo)

    def __repr__(self) -> str:
        return f"Arguments({len(self._held)} settings)"  # without values: one of them is an API key
