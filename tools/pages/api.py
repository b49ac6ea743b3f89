"""docs/api.md: the public API with signatures and docstrings.

Input: the sources of ``MODULES``, which are parsed and not imported, so that the page is the same
on every machine.
Output: Markdown. Everything that is not on the page is private and may change at any time.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from rlpost.config.extensions import FOLDER, extensions

SOURCES = Path(__file__).parents[2]
MODULES = {
    "Data types and errors": ("rlpost.types", "rlpost.errors"),
    "A run in this process": ("rlpost.extensions.in_process.run",),
    "Custom functions": (
        "rlpost.algorithm.objective",
        "rlpost.algorithm.loss_settings",
        "rlpost.rollout.response_builder",
        "rlpost.rollout.sampling",
        "rlpost.rollout.filters",
    ),
    "Custom models": ("rlpost.models.family", "rlpost.models.names", "rlpost.models.families"),
    "Recipes": ("rlpost.config.load", "rlpost.cli.check_settings", "rlpost.cli.submit"),
    "Jobs and runs": (
        "slurm.spec",
        "slurm.render",
        "slurm.executor",
        "common.run_folder",
        "common.ledger",
    ),
}
_BEGIN = """\
# API

<!-- Written by tools/make_docs.py from the docstrings; change them there. -->

The public API for your own code; everything else may change at any time. [Extending](extending.md) shows how to use it.
What plug-ins need most is in the package itself: `from rlpost import NAMES`.
Settings are in [settings](settings.md), the packages in [architecture](architecture.md).
"""
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def api_page() -> str:
    """The page."""
    lines = [_BEGIN.replace("NAMES", ", ".join(public_names()))]
    for title, modules in MODULES.items():
        lines.append(f"## {title}\n")
        for module in modules:
            lines += _module(module)
    return "\n".join(lines).rstrip() + "\n"


def public_names() -> list[str]:
    """Return the names of ``from rlpost import ...``: those in the source, and rlpost's extensions'."""
    tree = ast.parse((SOURCES / "rlpost/__init__.py").read_text())
    table = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_MODULES"
    )
    core = [name for names in table.values() for name in names]
    ours = [row for row in extensions() if (FOLDER / row.name).is_dir()]
    return [*core, *(name for row in ours for name in row.public_names)]


def _module(name: str) -> Iterator[str]:
    path = SOURCES / name.replace(".", "/")
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    tree = ast.parse(source)
    yield f"### `{name}`\n\n{_markdown(ast.get_docstring(tree))}\n"
    for node in tree.body:
        if isinstance(node, _Function) and _is_public(node.name):
            yield f"{_code(_signature(node))}\n{_markdown(ast.get_docstring(node))}\n"
        elif isinstance(node, ast.ClassDef) and _is_public(node.name):
            yield _class(node, source.splitlines())


def _class(node: ast.ClassDef, source: list[str]) -> str:
    """A class: its fields as in the source, with comments; then its methods."""
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    lines = [
        *(f"@{ast.unparse(one)}" for one in node.decorator_list),
        f"class {node.name}({bases}):",
    ]
    lines[-1] = lines[-1].replace("():", ":")
    methods = []
    for part in node.body[bool(ast.get_docstring(node)) :]:
        if isinstance(part, ast.AnnAssign | ast.Assign | ast.Expr):  # a field, or the text below it
            lines += source[part.lineno - 1 : part.end_lineno]
        elif isinstance(part, _Function) and (_is_public(part.name) or part.name == "__call__"):
            methods.append(
                f"- `{_signature(part)}`: {_indented(ast.get_docstring(part))}".removesuffix(": ")
            )
    text = f"{_code(chr(10).join(lines))}\n{_markdown(ast.get_docstring(node))}\n"
    return text + ("\n" + "\n".join(methods) + "\n" if methods else "")


def _signature(node: _Function) -> str:
    kind = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    if any(isinstance(one, ast.Name) and one.id == "property" for one in node.decorator_list):
        return f"{node.name}: {ast.unparse(node.returns) if node.returns else 'Any'}"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{kind} {node.name}({ast.unparse(node.args)}){returns}"


def _is_public(name: str) -> bool:
    return not name.startswith("_")


def _code(text: str) -> str:
    return f"```python\n{text}\n```\n"


def _indented(text: str | None) -> str:
    return re.sub(r"\n(?=.)", "\n  ", _markdown(text))


def _markdown(docstring: str | None) -> str:
    """Convert a docstring to Markdown: single backticks, and lists below Args, Returns and
    Raises.
    """
    text = (docstring or "").replace("``", "`")
    text = re.sub(r"^(Args|Returns|Raises):\n", r"\n\1:\n\n", text, flags=re.MULTILINE)
    return re.sub(r"^    (\w+): ", r"- `\1`: ", text, flags=re.MULTILINE).replace("\n\n\n", "\n\n")
