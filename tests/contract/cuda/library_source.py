"""Installed source of a library: parsed instead of imported, and with a change made to it for a
check's own test.

A path is relative to site-packages, for instance ``sglang/srt/environ.py``. Nothing here imports
the library, so a module that needs CUDA, or takes seconds to import, can be read.
"""

from __future__ import annotations
import __future__

import ast
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

DISTRIBUTIONS = {"megatron": "megatron-core"}  # where the package is named differently


class FactChanged(AssertionError):
    """An installed library no longer does what our code relies on."""


@dataclass(frozen=True)
class Source:
    """Files of installed libraries; ``changed``: path -> text of files that are read as something
    else.
    """

    changed: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def with_change(cls, path: str, old: str, new: str) -> Source:
        """The installed source with one text replaced.

        Raises LookupError unless the file has it exactly once.
        """
        text = _installed(path)
        if text.count(old) != 1:
            raise LookupError(
                f"{path} has the text to change {text.count(old)} times instead of once: {old!r}"
            )
        return cls({path: text.replace(old, new)})

    def text(self, path: str) -> str:
        """The whole file. Raises LookupError when the library or the file is not there."""
        return self.changed[path] if path in self.changed else _installed(path)

    def definition(self, path: str, name: str) -> Any:
        """The ast of a function or class, nested ones with dots. Raises LookupError."""
        found: Any = ast.parse(self.text(path))
        for part in name.split("."):
            found = _child(found, part, path)
        return found

    def lines(self, path: str, name: str = "") -> str:
        """The code of a definition, or of the file, as ast writes it: independent of comments and
        layout.
        """
        return ast.unparse(self.definition(path, name) if name else ast.parse(self.text(path)))

    def run(self, path: str, name: str, **names: Any) -> Any:
        """The function or class itself, compiled with the global names that it is given and no
        others.

        Decorators are left out and annotations are not evaluated.
        """
        node = self.definition(path, name)
        for inner in ast.walk(node):
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner.decorator_list = [one for one in inner.decorator_list if _is_builtin(one)]
        module = ast.Module([node], type_ignores=[])
        code = compile(
            module, path, "exec", flags=__future__.annotations.compiler_flag, dont_inherit=True
        )
        exec(code, names)
        return names[node.name]

    def value(self, path: str, name: str) -> Any:
        """The literal that is assigned to a global name.

        Raises LookupError, or ValueError when it is no literal.
        """
        for node in ast.parse(self.text(path)).body:
            targets = (
                node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            )
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return ast.literal_eval(node.value)
        raise LookupError(f"{path} has no {name}")


@dataclass(frozen=True)
class Fact:
    """What a library does, which of our modules rely on it, and how to see it."""

    name: str
    relied_on_by: tuple[str, ...]
    check: Callable[[Source], None]
    """Raises anything when the fact does not hold."""
    change: tuple[str, str, str]
    """Path, old text and new text of a change of the library that ``check`` must notice."""

    @property
    def library(self) -> str:
        return self.change[0].partition("/")[0]

    def verify(self, source: Source) -> None:
        """Raise FactChanged, with the fact's name and the modules of ours that rely on it, when it
        does not hold.
        """
        try:
            self.check(source)
        except Exception as error:
            installed = version(DISTRIBUTIONS.get(self.library, self.library))
            raise FactChanged(
                f"{self.library} {installed}: no longer true: {self.name}. "
                f"Relied on by {', '.join(self.relied_on_by)}. Seen: {type(error).__name__}: {error}"
            ) from error


@cache
def _installed(path: str) -> str:
    library, _, rest = path.partition("/")
    found = importlib.util.find_spec(library)
    folders = [] if found is None else list(found.submodule_search_locations or [])
    for folder in folders:
        file = Path(folder, rest)
        if file.is_file():
            return file.read_text()
    raise LookupError(f"{path} is not installed")


def _child(node: Any, name: str, path: str) -> Any:
    for inner in ast.walk(node):
        is_definition = isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if is_definition and inner is not node and inner.name == name:
            return inner
    raise LookupError(f"{path} defines no {name}")


def _is_builtin(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Name) and decorator.id in (
        "staticmethod",
        "classmethod",
        "property",
    )
