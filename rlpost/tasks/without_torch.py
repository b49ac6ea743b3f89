"""Load configurations and tokenizers of transformers without importing torch.

Input: a model folder; imports of transformers. Output: the configuration object of config.json;
modules. torch takes seconds and hundreds of MB, which a driver that only tokenizes does not need.
transformers imports it for two reasons. Code that uses models later gets the same names and results,
but for annotations of these modules' functions: ``typing.get_type_hints`` does not find the names.

- Some modules import torch, or what imports it, at their top, for a few of their functions. They
  are compiled with these imports moved into the functions, and into ``__getattr__`` of the module.
- A configuration converts the name of its dtype to torch's. It is loaded from a copy of config.json
  without dtypes, which decide neither the tokenizer nor what is compared with the trainer.

A module of another form is imported as it is, with torch; so are the processors of images.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import CodeType, ModuleType
from typing import Any, TypeGuard

IMPORT_TORCH = (
    "transformers.generation.configuration_utils",
    "transformers.image_transforms",
    "transformers.image_utils",
    "transformers.modeling_gguf_pytorch_utils",
    "transformers.modeling_rope_utils",
    "transformers.models.auto.auto_factory",
    "transformers.utils.type_validators",
    "transformers.video_utils",
)
"""The modules whose conditional imports load torch, in transformers 5.12."""
CONDITION = "is_torch_available()"
DTYPES = {"dtype", "torch_dtype"}
GETATTR = """
def __getattr__(name):
    if name in {names!r}:
        {imports}
        return locals()[name]
    raise AttributeError(f"module {{__name__!r}} has no attribute {{name!r}}")
"""


@contextmanager
def imports_deferred() -> Iterator[None]:
    """Import ``IMPORT_TORCH`` with deferred imports, unless torch is loaded or not available."""
    from transformers.utils import is_torch_available

    if "torch" in sys.modules or not is_torch_available():
        yield
        return
    finder = _Finder()
    # A new list each time: another thread that imports may be in the middle of the old one.
    sys.meta_path = [finder, *sys.meta_path]
    try:
        yield
    finally:
        sys.meta_path = [one for one in sys.meta_path if one is not finder]


def load_hf_config(folder: str | Path) -> Any:
    """Return transformers' configuration object of a folder; its dtypes may be None.

    Code in the folder is never executed.

    Raises:
        Exception: transformers refuses config.json; of any type, from its content.
    """
    options = {"local_files_only": True, "trust_remote_code": False}
    with imports_deferred():
        from transformers import AutoConfig

        try:
            text = (Path(folder) / "config.json").read_text()
            with NamedTemporaryFile("w", suffix=".json") as copy:
                json.dump(_without_dtypes(json.loads(text)), copy)
                copy.flush()
                config = AutoConfig.from_pretrained(copy.name, **options)
            config.name_or_path = str(folder)
            return config
        except Exception:  # the folder's own error, which names it, is the one to report
            return AutoConfig.from_pretrained(folder, **options)


def _without_dtypes(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_dtypes(item) for key, item in value.items() if key not in DTYPES}
    return value


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec whose loader defers imports, for a module in ``IMPORT_TORCH``."""
        spec = PathFinder.find_spec(fullname, path) if fullname in IMPORT_TORCH else None
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(fullname, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        """Compile the module with deferred imports; cached bytecode is neither read nor written."""
        path = self.get_filename(fullname)
        module = defer_imports(ast.parse(self.get_data(path), path))
        return compile(module, path, "exec", dont_inherit=True)


def defer_imports(module: ast.Module) -> ast.Module:
    """Move the imports of a top-level ``if is_torch_available():`` into the functions.

    The condition is taken as true. A module is returned as it is if it has not exactly one such
    block of imports alone, has a ``__getattr__``, uses one of the imported names outside of
    functions, or gives it another meaning.
    """
    blocks = [node for node in module.body if _is_deferrable(node)]
    functions = list(_functions(module.body))
    if len(blocks) != 1 or any(function.name == "__getattr__" for function in functions):
        return module
    block = blocks[0]
    imports = "; ".join(map(ast.unparse, block.body))
    names = {alias.asname or alias.name for alias in _aliases(block)}
    users = [function for function in functions if _uses(function.body, names)]
    others = [node for node in module.body if node is not block]
    if sum(len(_uses(user.body, names)) for user in users) != len(_uses(others, names)):
        return module
    if names & _bound(others):
        return module
    for user in users:
        after_docstring = int(ast.get_docstring(user) is not None)
        user.body[after_docstring:after_docstring] = _parse_at(imports, user.body[0])
    source = GETATTR.format(names=names, imports=imports)
    position = module.body.index(block)
    module.body[position : position + 1] = _parse_at(source, block)
    return module


def _is_deferrable(node: ast.stmt) -> TypeGuard[ast.If]:
    return (
        isinstance(node, ast.If)
        and ast.unparse(node.test) == CONDITION
        and all(isinstance(child, ast.Import | ast.ImportFrom) for child in node.body)
        and all("*" not in alias.name and "." not in alias.name for alias in _aliases(node))
    )


def _aliases(block: ast.AST) -> list[ast.alias]:
    return [node for node in ast.walk(block) if isinstance(node, ast.alias)]


def _functions(body: Iterable[ast.stmt]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The functions of a module and of its classes, without those inside of functions."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body)


def _uses(body: Iterable[ast.stmt], names: set[str]) -> list[ast.Name]:
    nodes = (node for statement in body for node in ast.walk(statement))
    return [node for node in nodes if isinstance(node, ast.Name) and node.id in names]


def _bound(body: Iterable[ast.stmt]) -> set[str]:
    """The names that statements bind, but by imports and definitions."""
    nodes = [node for statement in body for node in ast.walk(statement)]
    assigned = {
        node.id
        for node in nodes
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    }
    return assigned | {node.arg for node in nodes if isinstance(node, ast.arg)}


def _parse_at(source: str, place: ast.stmt) -> list[ast.stmt]:
    """Parse statements; errors in them name the line of ``place``."""
    statements = ast.parse(source).body
    for statement in statements:
        for node in ast.walk(statement):
            ast.copy_location(node, place)
    return statements
