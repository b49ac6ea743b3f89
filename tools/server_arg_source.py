"""The fields of SGLang's ServerArgs, read from its source without importing it.

Input: the folder of the package. Output: each field by name, with the type of its annotation. Values
that SGLang computes (the registry of tool parsers, defaults that are calls) are missing;
``tools/make_server_args.py`` adds those of the pinned version.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlpost.config.server_arg_values import OPAQUE, ServerArg

_SCALARS = ("int", "float", "str", "bool")
_JSON_PARSERS = ("json.loads", "json_list_type", "parse_cuda_graph_config_arg")
_SUFFIX_PARSERS = ("human_readable_int",)


def source_args(package: Path) -> dict[str, ServerArg]:
    """The fields by name. ``package`` is SGLang's folder in site-packages."""
    folder = package / "srt" / "arg_groups" / "fields"
    return {name: arg for path in sorted(folder.glob("*.py")) for name, arg in _fields(path)}


def _fields(path: Path) -> Iterator[tuple[str, ServerArg]]:
    for node in ast.parse(path.read_text()).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field in node.body:
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            if not field.target.id.startswith("_"):
                yield field.target.id, _argument(field)


def _argument(field: ast.AnnAssign) -> ServerArg:
    kind, described = field.annotation, None
    if isinstance(kind, ast.Subscript) and ast.unparse(kind.value) in ("A", "Annotated"):
        parts = kind.slice.elts if isinstance(kind.slice, ast.Tuple) else [kind.slice]
        kind = parts[0]
        described = next((part for part in parts[1:] if isinstance(part, ast.Call)), None)
    found = _of_type(kind)
    found = dataclasses.replace(found, default=_literal(field.value))
    return found if described is None else _described(found, described)


def _of_type(kind: ast.expr) -> ServerArg:
    """Return the values that an annotation admits, without its metadata."""
    name, parts = _generic(kind)
    if name in _SCALARS and not parts:
        return ServerArg(name)
    if name in ("Optional", "Union"):
        return _union(parts)
    if name == "Literal":
        values = [_literal(part) for part in parts]
        choices = tuple(value for value in values if value is not None)
        return ServerArg(type(choices[0]).__name__, may_be_none=None in values, choices=choices)
    if name in ("List", "list", "set", "Set"):
        element = _of_type(parts[0]) if parts else ServerArg()
        return ServerArg(element.kind if element.kind in _SCALARS else "json", is_list=True)
    if name in ("Dict", "dict") and not any(
        _generic(part)[0] in ("Type", "type") for part in parts
    ):
        return ServerArg("json")
    return ServerArg(OPAQUE)


def _union(parts: list[ast.expr]) -> ServerArg:
    kinds = [_of_type(part) for part in parts if _literal(part, missing=part) is not None]
    has_none = len(kinds) < len(parts)
    unlike = {(kind.kind, kind.is_list) for kind in kinds}
    first = kinds[0]
    if len(unlike) != 1:
        first = ServerArg("any", is_list=all(kind.is_list for kind in kinds))
    return dataclasses.replace(first, may_be_none=has_none or len(parts) == 1 or first.may_be_none)


def _generic(kind: ast.expr) -> tuple[str, list[ast.expr]]:
    """``Dict[str, int]`` as its name and its parts; ``X | None`` as a Union."""
    if isinstance(kind, ast.BinOp):
        return "Union", [kind.left, kind.right]
    if isinstance(kind, ast.Constant) and isinstance(kind.value, str):  # a forward reference
        return _generic(ast.parse(kind.value, mode="eval").body)
    if not isinstance(kind, ast.Subscript):
        return ast.unparse(kind).rpartition(".")[2], []
    parts = kind.slice.elts if isinstance(kind.slice, ast.Tuple) else [kind.slice]
    return ast.unparse(kind.value).rpartition(".")[2], list(parts)


def _described(arg: ServerArg, described: ast.Call) -> ServerArg:
    """Add the information of ``Arg(...)``."""
    words = {word.arg: word.value for word in described.keywords if word.arg}
    parser = ast.unparse(words["type_parser"]) if "type_parser" in words else ""
    nargs = _literal(words.get("nargs")) or _nargs_of_action(words.get("action_kwargs"))
    if parser in _JSON_PARSERS:
        arg = dataclasses.replace(arg, kind="json")
    elif _literal(words.get("no_cli")) and arg.kind not in _SCALARS:
        arg = dataclasses.replace(arg, kind=OPAQUE)
    choices = _literal(words.get("choices"))
    names = _literal(words.get("aliases")) or []
    return dataclasses.replace(
        arg,
        suffixes=parser in _SUFFIX_PARSERS,
        is_list=arg.is_list or nargs in ("*", "+"),
        may_be_empty=nargs == "*",
        const=_literal(words.get("const")),
        choices=tuple(choices) if choices else arg.choices,
        aliases=tuple(alias.lstrip("-").replace("-", "_") for alias in names),
    )


def _nargs_of_action(words: ast.expr | None) -> object:
    """``nargs`` in ``action_kwargs={...}``, whose other values need not be literals."""
    if not isinstance(words, ast.Dict):
        return None
    pairs = zip(words.keys, words.values, strict=True)
    return next((_literal(value) for key, value in pairs if _literal(key) == "nargs"), None)


def _literal(node: ast.expr | None, *, missing: object = None) -> Any:
    """The value of a literal; ``missing`` for an expression that would have to be computed."""
    if node is None:
        return missing
    try:
        return ast.literal_eval(node)
    except ValueError:
        return missing
