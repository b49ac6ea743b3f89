"""The import hook that answers for ``slime`` where slime is not installed.

Input: an import of a module of ``names.PROVIDED``. Output: a module with its names, each the real thing over the
engines and nouns of this run. The hook is the last one asked, so an installed slime always wins.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from rlpost.compat.slime.names import PROVIDED, lacking, packages


def install() -> None:
    """Ask the hook from now on; once a process is enough, more do no harm."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


def is_installed() -> bool:
    """Whether slime itself can be imported here. It is not imported for that.

    A folder of that name, such as a clone beside the recipe, is a package for Python; slime has this file in it.
    """
    if "slime" in sys.modules:
        places = list(sys.modules["slime"].__path__)
    else:
        spec = importlib.util.find_spec("slime")
        places = [] if spec is None else list(spec.submodule_search_locations or ())
    return any((Path(place) / "utils/types.py").is_file() for place in places)


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top = fullname.partition(".")[0]
        if top != "slime" or (fullname != top and is_installed()):
            return None
        if why := lacking(fullname):
            raise ModuleNotFoundError(why, name=fullname)
        return ModuleSpec(fullname, _Loader(), is_package=fullname in packages())


class _Loader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = "Stands in for slime's module of this name; see rlpost/compat/slime/names.py."
        module.__getattr__ = _getter(module.__name__)  # type: ignore[method-assign]


def _getter(module: str) -> Any:
    def get(name: str) -> Any:
        """Look a name up at its first use: no plug-in loads more of this project than it needs."""
        if name.startswith("__") or f"{module}.{name}" in {*packages(), *PROVIDED}:
            raise AttributeError(name)  # a module below this one is imported, not looked up
        if why := lacking(module, name):
            raise ImportError(why, name=module)
        where, _, attribute = PROVIDED[module][name].rpartition(".")
        found = getattr(importlib.import_module(where), attribute)
        setattr(sys.modules[module], name, found)
        return found

    return get


def sample_class() -> type[Any]:
    """The class that a plug-in knows as ``slime.utils.types.Sample``: slime's where it is installed, else ours."""
    install()
    found: type[Any] = importlib.import_module("slime.utils.types").Sample
    return found
