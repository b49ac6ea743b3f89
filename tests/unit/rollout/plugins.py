"""Load the plugins with which SGLang serves on a CPU."""

from __future__ import annotations

import importlib.util
from types import ModuleType

from rlpost.extensions.on_cpu.engine import STAND_INS
from tests.engines_on_cpu import PLUGINS

FOLDERS = {
    path.name: folder for folder in (STAND_INS, PLUGINS) for path in folder.glob("rlpost_*_on_cpu")
}
"""Name of a plugin -> the folder that contains it."""


def load_plugin(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDERS[name] / name / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
