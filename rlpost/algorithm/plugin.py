"""Functions of the user's own, named in the settings.

In: ``module.function``, or ``FILE.py:function``. Out: the function. A file is loaded under a name made from its path,
once a process, and needs no package around it.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from rlpost.errors import ConfigError


def load_function(path: str, *, key: str) -> Callable[..., Any]:
    """The function that ``path`` names. Raises ConfigError, which names the setting ``key``, when there is none or
    what it stands in cannot be imported."""
    file, colon, name = path.rpartition(":") if ":" in path else (path.rpartition(".")[0], "", path.rpartition(".")[2])
    try:
        module = _from_file(Path(file)) if colon else importlib.import_module(file)
    except Exception as error:  # whatever the user's module raises while it is imported
        raise ConfigError(f"{key} = {path}: cannot be imported: {type(error).__name__}: {error}") from error
    found = getattr(module, name, None)
    if not callable(found):
        public = ", ".join(word for word, value in vars(module).items() if callable(value) and word[0] != "_")
        raise ConfigError(f"{key} = {path}: {file} has no function {name}; it has {public or 'none'}")
    return found


def _from_file(file: Path) -> ModuleType:
    name = f"rlpost_plugin_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, f"{file} is not a Python file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
