"""Which settings SGLang's ServerArgs has, found by reading its source: nothing of SGLang is imported.

Comes in: names of pass-through settings. Goes out: nothing, or an error that offers the nearest name. Used on the
login node, where SGLang may be missing; then there is nothing to compare with, and the engine itself refuses later.
"""

from __future__ import annotations

import ast
import importlib.util
import logging
from collections.abc import Iterable
from pathlib import Path

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


def server_arg_names() -> frozenset[str] | None:
    """Names of the settings of the installed SGLang; None when it is not installed.

    Up to 0.5.20 they are the annotated fields of ``ServerArgs`` itself, since then those of the classes in
    ``arg_groups/fields``.
    """
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        return None
    srt = Path(found.submodule_search_locations[0]) / "srt"
    names = _annotated_fields(srt / "server_args.py", only="ServerArgs")
    for path in sorted((srt / "arg_groups" / "fields").glob("*.py")):
        names |= _annotated_fields(path)
    return frozenset(names)


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
        if known is not None and name not in known:
            flags = ["--sglang-" + other.replace("_", "-") for other in known - OURS.keys()]
            raise ConfigError(f"{flag}: the installed SGLang has no setting {name!r}{suggestion(flag, flags)}")


def _annotated_fields(path: Path, only: str | None = None) -> set[str]:
    """Names of the annotated class attributes in one file."""
    return {
        field.target.id
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and only in (None, node.name)
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }
