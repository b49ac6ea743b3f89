"""Names that tests and the rehearsal replace exist, in modules and classes of this project, and are
looked up when they are used: a default argument or a table made at import keeps the first value.

``setattr`` of pytest and ``patch`` of unittest raise for a lacking name, but only once they run, and
many run in the slow tiers alone. A plain assignment to an attribute never raises. Sources are read,
nothing is imported.
"""

import ast
import builtins
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("common", "slurm", "bootstrap", "rlpost", "tools", "tests", "benchmarks")
REPLACING = ("setattr", "delattr", "patch", "object")
MAY_REPLACE = re.compile(
    r"\b(?:setattr|delattr|patch)\b|^ *(?!self\.)\w+\.[\w.]+(?:, .*)? = ", re.M
)
MAY_ALLOW = re.compile(r"\b(?:raising|create)=")
PATCHING = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("rlpost/extensions/rehearsal/**/*.py")]


def source_of(module: str) -> Path | None:
    """Return the file of a module of this project."""
    if module.partition(".")[0] not in PACKAGES:
        return None
    place = ROOT / module.replace(".", "/")
    return next(
        (path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None
    )


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imported_by(path: Path) -> dict[str, str]:
    """Return the dotted names that the names of a file's imports stand for."""
    names = {}
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
        elif isinstance(node, ast.Import):
            names |= {one.asname or one.name: one.name for one in node.names if one.asname}
    return names


@cache
def bound(scope: ast.Module | ast.ClassDef) -> set[str]:
    """Return the names that a module or a class binds, ``self.NAME`` in methods included."""
    names, pending = set(), [*scope.body]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            if isinstance(scope, ast.ClassDef):
                names |= {one.attr for one in ast.walk(node) if _is_stored(one, ast.Attribute)}
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {one.asname or one.name.partition(".")[0] for one in node.names}
        if _is_stored(node, ast.Name):
            names.add(node.id)
        pending += ast.iter_child_nodes(node)
    return names


def _is_stored(node: ast.AST, kind: type[ast.AST]) -> bool:
    return isinstance(node, kind) and isinstance(node.ctx, ast.Store)


def has(target: str, name: str) -> bool:
    """Whether a dotted name of this project has an attribute; True where it cannot be known."""
    if path := source_of(target):
        return name in bound(tree_of(path)) or source_of(f"{target}.{name}") is not None
    module, _, leaf = target.rpartition(".")
    if not (path := source_of(module)):
        return True
    for node in tree_of(path).body:
        if isinstance(node, ast.ClassDef) and node.name == leaf:
            return name in bound(node) or any(not _lacks(path, base, name) for base in node.bases)
    return leaf not in imported_by(path) or has(imported_by(path)[leaf], name)


def _lacks(path: Path, base: ast.expr, name: str) -> bool:
    """Whether a base class, as ``path`` names it, is known to lack an attribute."""
    if not isinstance(base, ast.Name):
        return False
    inside = f"{'.'.join(path.relative_to(ROOT).with_suffix('').parts)}.{base.id}"
    return not has(imported_by(path).get(base.id, inside), name)


def resolve(node: ast.expr, names: dict[str, str]) -> str | None:
    """Return the dotted name of an expression such as ``module.Class``."""
    if isinstance(node, ast.Attribute):
        inner = resolve(node.value, names)
        return inner and f"{inner}.{node.attr}"
    return names.get(node.id) if isinstance(node, ast.Name) else None


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else ""


@cache
def replaced(path: Path) -> list[tuple[int, str, str]]:
    """Return (line, dotted name of the owner, attribute) of all that a file replaces."""
    if not MAY_REPLACE.search(path.read_text()):
        return []
    names, found = imported_by(path), []
    for node in ast.walk(tree_of(path)):
        if _is_stored(node, ast.Attribute) and (owner := resolve(node.value, names)):
            found.append((node.lineno, owner, node.attr))
        if not isinstance(node, ast.Call) or not node.args or _called(node) not in REPLACING:
            continue
        first, second = node.args[0], node.args[1] if len(node.args) > 1 else None
        if isinstance(first, ast.Constant) and isinstance(first.value, str) and "." in first.value:
            found.append((node.lineno, *first.value.rsplit(".", 1)))
        elif isinstance(second, ast.Constant) and (owner := resolve(first, names)):
            found.append((node.lineno, owner, str(second.value)))
    return found


def replaced_by_table(path: Path) -> list[tuple[int, str, str]]:
    """Return what a file replaces by ``{module: {"name": stand_in}}``, as ``replaced`` does."""
    if not MAY_REPLACE.search(path.read_text()):
        return []
    return [
        (node.lineno, owner, str(name.value))
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Dict)
        for key, row in zip(node.keys, node.values, strict=True)
        if key is not None and isinstance(row, ast.Dict)
        if (owner := resolve(key, imported_by(path)))
        for name in row.keys
        if isinstance(name, ast.Constant)
    ]


@cache
def read_names(path: Path) -> tuple[dict[str, int], set[str]]:
    """Return the names that a module reads while it is imported, with a line of each, and those
    that its functions read when they are called.

    A default or a decorator is read at the import, unless its function is inside another.
    """
    at_import, at_call, pending = {}, set(), [*tree_of(path).body]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            body = node.body if isinstance(node.body, list) else [node.body]
            read = [one for statement in body for one in ast.walk(statement)]
            at_call |= {one.id for one in read if isinstance(one, ast.Name)}
            arguments = node.args
            pending += [*arguments.defaults, *filter(None, arguments.kw_defaults)]
            pending += getattr(node, "decorator_list", [])
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            at_import[node.id] = node.lineno
        is_annotated = isinstance(node, ast.AnnAssign)
        pending += filter(None, [node.value]) if is_annotated else ast.iter_child_nodes(node)
    return at_import, at_call


@cache
def all_sources() -> str:
    files = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return "\n".join(path.read_text() for path in files)


@cache
def is_read_through_module(owner: str, name: str) -> bool:
    """Whether a file has ``module.name``, or ``"module:name"`` as a registry does."""
    words = (f"{owner.rpartition('.')[2]}.{name}", f"{owner}:{name}")
    return any(word in all_sources() for word in words)


@cache
def escapes(owner: str, name: str) -> str | None:
    """Return why the users of a module's name would not see its replacement; None if they do."""
    if not (path := source_of(owner)):
        return None
    at_import, at_call = read_names(path)
    if name in at_import:
        return f"line {at_import[name]} reads it at the import"
    if name not in at_call and not is_read_through_module(owner, name):
        return "no function reads it; replace it where it is imported"
    return None


def test_a_replacement_reaches_the_users_of_the_name():
    everything = [
        (path, *one) for path in PATCHING for one in (*replaced(path), *replaced_by_table(path))
    ]
    assert any("crash_consistency" in str(path) for path, *_ in everything)
    assert [
        f"{path.relative_to(ROOT)}:{line}: {owner}.{name}: {why}"
        for path, line, owner, name in everything
        if (why := escapes(owner, name))
    ] == []


def test_names_kept_at_the_import_are_found(tmp_path):
    path = tmp_path / "one.py"
    path.write_text(
        "from a import Kept, Late, Row, Unused\n"
        "ROWS = [Row]\n"
        "typed: Late = None\n"
        "def make(connection=Kept, other=None):\n"
        "    return other or Late\n"
    )
    at_import, at_call = read_names(path)
    assert {"Kept", "Row"} <= at_import.keys() and not {"Late", "Unused"} & at_import.keys()
    assert "Late" in at_call and not {"Kept", "Row", "Unused"} & at_call


def test_every_replaced_name_exists():
    everything = [(path, *one) for path in PATCHING for one in replaced(path)]
    ours = [one for one in everything if one[2].partition(".")[0] in PACKAGES]
    assert len(ours) > 300, "the readers of sources find less than there is"
    assert [
        f"{path.relative_to(ROOT)}:{line}: {owner} has no {name}"
        for path, line, owner, name in ours
        if not (has(owner, name) or name in vars(builtins))
    ] == []


def test_no_replacement_allows_a_lacking_name():
    """But of a builtin, which the module then shadows."""
    allowing = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in PATCHING
        if MAY_ALLOW.search(path.read_text())
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call)
        and _called(node) in REPLACING
        and any(word.arg in ("raising", "create") for word in node.keywords)
        and not any(
            isinstance(one, ast.Constant) and one.value in vars(builtins) for one in node.args
        )
    ]
    assert allowing == []


def test_a_lacking_name_is_found(tmp_path):
    path = tmp_path / "test_one.py"
    path.write_text(
        "from rlpost.durable import commit\n"
        "from rlpost.durable.commit import Search\n"
        "commit.prune, commit.prunes = 1, 2\n"
        "monkeypatch.setattr('rlpost.durable.commit.begins', 1)\n"
        "patch.object(Search, 'paths')\n"
        "patch.object(Search, 'path')\n"
    )
    lacking = [name for _, owner, name in replaced(path) if not has(owner, name)]
    assert sorted(lacking) == ["begins", "paths", "prunes"]
