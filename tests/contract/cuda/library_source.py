"""Installed source of a library, parsed instead of imported, optionally with one text replaced.

The replacement tests that a check notices the change. A path is relative to site-packages, for
instance ``sglang/srt/environ.py``. The library is not imported, so modules that need CUDA or take
seconds to import can be read, too.
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

DISTRIBUTIONS = {"megatron": "megatron-core"}  # package -> distribution, where the names differ


class FactChanged(AssertionError):
    """An installed library no longer does what our code relies on."""


@dataclass(frozen=True)
class Source:
    """Files of installed libraries; ``changed``: path -> text that replaces the file's content."""

    changed: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def with_change(cls, path: str, old: str, new: str) -> Source:
        """Return the installed source with one text replaced.

        Raises LookupError unless the file contains ``old`` exactly once.
        """
        text = _installed(path)
        if text.count(old) != 1:
            raise LookupError(
                f"{path} has the text to change {text.count(old)} times instead of once: {old!r}"
            )
        return cls({path: text.replace(old, new)})

    def text(self, path: str) -> str:
        """Return the whole file. Raises LookupError when the library or the file does not exist."""
        return self.changed[path] if path in self.changed else _installed(path)

    def definition(self, path: str, name: str) -> Any:
        """Return the AST of a function or class; dots separate nested names. Raises LookupError."""
        found: Any = ast.parse(self.text(path))
        for part in name.split("."):
            found = _child(found, part, path)
        return found

    def lines(self, path: str, name: str = "") -> str:
        """Return a definition, or the file, as ``ast.unparse`` formats it, without comments."""
        return ast.unparse(self.definition(path, name) if name else ast.parse(self.text(path)))

    def run(self, path: str, name: str, **names: Any) -> Any:
        """Compile a function or class with only the given global names.

        Decorators other than staticmethod, classmethod and property are removed; annotations are
        not evaluated.
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
        """Return the literal that is assigned to a global name.

        Raises LookupError when the name is missing, ValueError when its value is not a literal.
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
    """A behaviour of a library, the modules of ours that rely on it, and a check for it."""

    name: str
    relied_on_by: tuple[str, ...]
    check: Callable[[Source], None]
    """Raises any exception when the fact does not hold."""
    change: tuple[str, str, str]
    """Path, old text and new text of a change to the library that ``check`` must notice."""

    @property
    def library(self) -> str:
        return self.change[0].partition("/")[0]

    def verify(self, source: Source) -> None:
        """Raise FactChanged when the fact does not hold.

        The message names the fact and the modules of ours that rely on it.
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
