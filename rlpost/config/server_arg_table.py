"""The fields of ServerArgs of the SGLang version that a run will use, without importing SGLang.

``server_args.json`` is the table of the version that setup.cfg pins, made by
``tools/make_server_args.py``. It is used if that version is installed, or none (a login node). The
table of another installed version is read from its source.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpost.config.server_arg_source import ServerArg, source_args

COPY = Path(__file__).with_name("server_args.json")

RENAMED = {"cuda_graph_bs": "cuda_graph_bs_decode", "cuda_graph_max_bs": "cuda_graph_max_bs_decode"}
"""Names of older releases and recipes, and what 0.5.21 calls the same."""


@dataclass(frozen=True, slots=True)
class ServerArgTable:
    """``args`` by name; ``names`` are their aliases.

    ``source`` names the SGLang version in messages.
    """

    source: str
    args: Mapping[str, ServerArg]
    names: Mapping[str, str]

    def name_of(self, given: str) -> str:
        """Return the field for a name, alias or former name; the name itself if unknown."""
        if given in self.args:
            return given
        if RENAMED.get(given) in self.args:
            return RENAMED[given]
        return self.names.get(given, given)


@functools.cache
def server_arg_table() -> ServerArgTable:
    """Return the table of the installed SGLang, or of the pinned version if none is installed."""
    copy = json.loads(COPY.read_text())
    installed = _installed_version()
    if installed not in (None, copy["sglang"]):
        spec = importlib.util.find_spec("sglang")
        if spec is not None and spec.submodule_search_locations:
            args = source_args(Path(spec.submodule_search_locations[0]))
            return _table(f"the installed SGLang {installed}", args)
    owner = "the installed SGLang" if installed else "the pinned SGLang"
    args = {name: _parsed(entry) for name, entry in copy["args"].items()}
    return _table(f"{owner} {copy['sglang']}", args)


def _parsed(entry: Mapping[str, object]) -> ServerArg:
    fields: dict[str, Any] = dict(entry)
    for name in ("choices", "aliases"):
        if name in fields:
            fields[name] = tuple(fields[name])
    return ServerArg(**fields)


def _table(source: str, args: Mapping[str, ServerArg]) -> ServerArgTable:
    names = {alias: name for name, arg in args.items() for alias in arg.aliases}
    return ServerArgTable(source, args, names)


def _installed_version() -> str | None:
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None
