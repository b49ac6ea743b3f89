"""The import hook that provides ``slime`` where slime is not installed.

Input: an import of a module of ``provided_names.PROVIDED``. Output: a module with its names,
implemented over the engines and types of this run. The hook is the last in ``sys.meta_path``, so an
installed slime takes precedence.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from rlpost.extensions.slime.names import PROVIDED, lacking, packages

if TYPE_CHECKING:
    from rlpost.extensions.slime.sample import Sample


def install() -> None:
    """Install the hook in this process. Idempotent."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


def is_installed() -> bool:
    """Whether slime itself can be imported, without importing it.

    Python also treats a plain folder of that name, such as a clone next to the recipe, as a
    package. Only slime has the file ``utils/types.py``.
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
        module.__doc__ = (
            "Stands in for slime's module of this name; see rlpost/extensions/slime/names.py."
        )
        # PEP 562: called for names that the module does not have yet
        module.__getattr__ = _getter(module.__name__)  # type: ignore[method-assign]


def _getter(module: str) -> Callable[[str], object]:
    def get(name: str) -> object:
        """Resolve a name at its first use, so that a plug-in imports only what it needs."""
        if name.startswith("__") or f"{module}.{name}" in {*packages(), *PROVIDED}:
            raise AttributeError(name)  # a submodule: the import system finds it
        if why := lacking(module, name):
            raise ImportError(why, name=module)
        where, _, attribute = PROVIDED[module][name].rpartition(".")
        found = getattr(importlib.import_module(where), attribute)
        setattr(sys.modules[module], name, found)
        return found

    return get


def sample_class() -> type[Sample]:
    """Return ``slime.utils.types.Sample``: slime's class if slime is installed, else rlpost's."""
    install()
    found: type[Sample] = importlib.import_module("slime.utils.types").Sample
    return found
