"""Import SGLang's file of the served model alone, instead of those of all models.

Each process of an engine would import them all, and log a warning for each that needs a package
that is not installed. SGLang defers that if it is given a package of further models
(``SGLANG_EXTERNAL_MODEL_PACKAGE``, srt/models/registry.py): this one, whose only module has the
classes of the file. A class that is not there, such as that of a draft, makes SGLang import all.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

PACKAGE = "SGLANG_EXTERNAL_MODEL_PACKAGE"
MODULE = "RLPOST_MODEL_MODULE"
"""The environment variable with the module of SGLang that ``classes`` imports."""

_CLASSES = re.compile(r"^EntryClass\s*(?::[^=\n]*)?=\s*(\[[^\]]*\]|\w+)", re.MULTILINE)


def environment(architectures: object, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for the ``architectures`` of a config.json.

    Empty if ``environ`` has a package of the user, or not exactly one file has the first of them.
    """
    if PACKAGE in environ or not (isinstance(architectures, list) and architectures):
        return {}
    spec = importlib.util.find_spec("sglang")
    folder = Path(str(spec.origin)).parent / "srt" / "models" if spec else Path("absent")
    modules = modules_by_class(folder.glob("*.py")).get(str(architectures[0]), [])
    if len(modules) != 1:
        return {}
    return {PACKAGE: __name__, MODULE: f"sglang.srt.models.{modules[0]}"}


def modules_by_class(files: Iterable[Path]) -> dict[str, list[str]]:
    """Return the files, without ``.py``, whose ``EntryClass`` lists a class; none is imported."""
    modules: dict[str, list[str]] = {}
    for path in files:
        listed = _CLASSES.search(path.read_text("utf-8", errors="replace"))
        for name in re.findall(r"\w+", listed[1]) if listed else ():
            modules.setdefault(name, []).append(path.stem)
    return modules
