"""The calls of Megatron-core to DeepEP fit the DeepEP of the lock, by signature.

DeepEP cannot be imported without a GPU, so both sides are read from their sources.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path


def source(package: str, path: str) -> ast.Module:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    return ast.parse((Path(spec.submodule_search_locations[0]) / path).read_text())


def parameters(function: ast.FunctionDef) -> set[str]:
    return {one.arg for one in (*function.args.args, *function.args.kwonlyargs)}


def test_methods_of_the_buffer_take_what_megatron_passes() -> None:
    legacy = source("deep_ep", "buffers/legacy.py")
    (buffer,) = [
        node for node in legacy.body if isinstance(node, ast.ClassDef) and node.name == "Buffer"
    ]
    methods = {node.name: node for node in buffer.body if isinstance(node, ast.FunctionDef)}
    calls = [
        (node.func.attr, node)
        for node in ast.walk(source("megatron", "core/transformer/moe/fused_a2a.py"))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) in ("buffer", "Buffer")
    ]
    assert {name for name, _ in calls} >= {"dispatch", "combine", "get_dispatch_layout"}
    for name, call in calls:
        passed = {keyword.arg for keyword in call.keywords}
        assert passed <= parameters(methods[name]), name


def test_the_name_that_megatron_imports_is_where_the_rank_takes_it_from() -> None:
    """``rlpost.trainer.optional_packages`` gives ``deep_ep.utils`` the class of the package."""
    (event,) = [
        node
        for node in source("deep_ep", "utils/event.py").body
        if isinstance(node, ast.ClassDef) and node.name == "EventOverlap"
    ]
    assert "current_stream_wait" in ast.unparse(event)
    exported = ast.unparse(source("deep_ep", "__init__.py"))
    assert "EventOverlap" in exported
