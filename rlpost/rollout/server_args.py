"""Which settings SGLang's ServerArgs has, found by reading its source: nothing of SGLang is imported.

Comes in: names of pass-through settings. Goes out: nothing, or an error that offers the nearest name. Used on the
login node, where SGLang may be missing; then there is nothing to compare with, and the engine itself refuses later.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import logging
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from rlpost.errors import ConfigError, suggestion

logger = logging.getLogger(__name__)

OURS = {
    "host": "the engine's node",
    "port": "the ports of the job",
    "model_path": "--hf-checkpoint",
    "tokenizer_path": "--hf-checkpoint",
    "api_key": "the secret of the attempt",
    "admin_api_key": "the secret of the attempt",
    "tp_size": "--rollout-num-gpus-per-engine",
    "weight_version": "the policy version",
}


RENAMED = {"cuda_graph_bs": "cuda_graph_bs_decode", "cuda_graph_max_bs": "cuda_graph_max_bs_decode"}
"""Names of older releases and recipes, and what 0.5.21 calls the same."""

_LIST = re.compile(r"(A\[\s*)?(Optional\[)?[Ll]ist\[")  # annotations of settings that are lists and nothing else


def server_arg_names() -> frozenset[str] | None:
    """Names of the settings of the installed SGLang; None when it is not installed."""
    fields = _installed_fields()
    return None if fields is None else frozenset(fields)


def in_its_words(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as the installed SGLang wants them: under its names, and one value of a list as a list."""
    fields = _installed_fields() or {}
    named = {_its_name(name, fields): value for name, value in given.items()}
    return {
        name: [value] if _LIST.match(fields.get(name, "")) and not isinstance(value, list) else value
        for name, value in named.items()
    }


def _its_name(name: str, known: Collection[str]) -> str:
    return RENAMED[name] if name not in known and RENAMED.get(name) in known else name


@functools.cache
def _installed_fields() -> dict[str, str] | None:
    """Annotations by name of the settings of the installed SGLang; None when it is not installed.

    Up to 0.5.20 they are the annotated fields of ``ServerArgs`` itself, since then those of the classes in
    ``arg_groups/fields``.
    """
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        return None
    srt = Path(found.submodule_search_locations[0]) / "srt"
    found_fields = _annotated_fields(srt / "server_args.py", only="ServerArgs")
    for path in sorted((srt / "arg_groups" / "fields").glob("*.py")):
        found_fields |= _annotated_fields(path)
    return found_fields


def check_server_args(names: Iterable[str]) -> None:
    """Make sure that SGLang has each setting and that it is not one that follows from ours.

    Raises:
        ConfigError: naming the first that is wrong, and what was probably meant.
    """
    known = server_arg_names()
    if known is None:
        logger.info("sglang is not installed here: its settings are checked when an engine starts")
    for name in names:
        flag = "--sglang-" + name.replace("_", "-")
        if name in OURS:
            raise ConfigError(f"{flag}: this follows from {OURS[name]}; leave it out")
        if known is not None and _its_name(name, known) not in known:
            flags = ["--sglang-" + other.replace("_", "-") for other in known - OURS.keys()]
            raise ConfigError(f"{flag}: the installed SGLang has no setting {name!r}{suggestion(flag, flags)}")


def _annotated_fields(path: Path, only: str | None = None) -> dict[str, str]:
    """The annotated class attributes in one file: annotations by name."""
    return {
        field.target.id: ast.unparse(field.annotation)
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and only in (None, node.name)
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }
