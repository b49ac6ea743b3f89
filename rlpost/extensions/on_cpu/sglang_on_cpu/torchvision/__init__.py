"""Stand-in for torchvision in a text-only server. See ../README.md.

Each name can be imported, none can be used.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn

__version__ = "0.28.0"  # transformers compares it


class _Name(type):
    """A class whose attributes exist too, for names such as ``InterpolationMode.BICUBIC``."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"

    def __call__(cls, *_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"torchvision's {cls.__name__} is not installed; this server serves text alone"
        )


def _name(name: str) -> _Name:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Name(name, (), {})


class _Submodules:
    """Finds and loads every ``torchvision.X`` as an empty module whose names come from ``_name``."""

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> ModuleSpec | None:
        if fullname.startswith(f"{__name__}."):
            return ModuleSpec(fullname, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__dict__["__getattr__"] = _name
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def __getattr__(name: str) -> object:
    return _name(name)


sys.meta_path.append(_Submodules())  # type: ignore[arg-type]
