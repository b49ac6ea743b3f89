"""Public functions of tensors state the shapes.

In the docstring of the function, its class or its module, as ``[T, V]`` (or "any shape", "scalar"),
or in the names of all its tensors, as ``logprobs_T``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "rlpost"
SHAPE = re.compile(r"\[[^\]]*\]|\bany shape\b|\bscalars?\b")
SUFFIX = re.compile(r"_[A-Z]+$")
RESULT = re.compile(r"(tuple\[)?(torch\.)?Tensor\b")
"""A result that is a tensor; the tensors of a dictionary or an iterator are weights of all shapes."""
Function = tuple[ast.FunctionDef, list[ast.AST]]


def _public_functions(module: ast.Module) -> Iterator[Function]:
    """Public functions of a module and of its public classes, with what encloses each."""
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node, [module]
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_"):
                    yield inner, [module, node]


def _tensors(function: ast.FunctionDef) -> tuple[list[str], bool]:
    """Names of the arguments that are tensors, and whether the result is one."""
    arguments = [*function.args.args, *function.args.kwonlyargs]
    named = [one.arg for one in arguments if one.annotation and _is_tensor(one.annotation)]
    returned = ast.unparse(function.returns) if function.returns else ""
    return named, RESULT.match(returned) is not None


def _is_tensor(annotation: ast.expr) -> bool:
    return re.search(r"\bTensor\b", ast.unparse(annotation)) is not None


def _states_no_shape(source: str) -> list[str]:
    unstated = []
    for function, enclosing in _public_functions(ast.parse(source)):
        arguments, returns_tensor = _tensors(function)
        if not arguments and not returns_tensor:
            continue
        docstrings = [ast.get_docstring(node) or "" for node in (function, *enclosing)]
        named = bool(arguments) and all(SUFFIX.search(name) for name in arguments)
        if not named and not any(map(SHAPE.search, docstrings)):
            unstated.append(function.name)
    return unstated


@pytest.mark.parametrize("package", ["algorithm", "trainer", "images"])
def test_public_functions_of_tensors_state_the_shapes(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    unstated = {
        str(file.relative_to(ROOT)): names
        for file in files
        if (names := _states_no_shape(file.read_text()))
    }
    assert not unstated


def test_a_function_without_shapes_is_found() -> None:
    source = 'def scale(values: Tensor) -> Tensor:\n    """Double the values."""\n'
    assert _states_no_shape(source) == ["scale"]
    assert _states_no_shape(source.replace("the values", "the values [T]")) == []
    assert _states_no_shape(source.replace("values: T", "values_T: T")) == []
