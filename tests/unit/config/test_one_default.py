"""The default of a setting stands once: in its table.

Generated over all settings: no class and no function elsewhere has a default of its own for a name
that a setting has. Nothing given (None, 0, an empty word or list) is no default.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from rlpost.config.tree import Config

ROOT = Path(__file__).parents[3]
TABLES = [field.annotation for field in Config.model_fields.values()]
SETTINGS = {name for table in TABLES for name in table.model_fields}
OTHER = {
    # words of a batch file: one that has this value is left out of the file, and read again
    ("slurm.batch.options", "Options"),
    # the limits of a fleet without settings, such as that of a simulation
    ("rlpost.extensions.fleet.membership", "FleetLimits"),
    # other things of the same name
    ("rlpost.extensions.agents.environments.harbor.runnable", "TrialOptions"),  # a key of Harbor's
    ("rlpost.extensions.agents.environments.of_reasoning_gym", "__init__"),  # a task set's seed
    ("rlpost.tasks.prompts", "check_prompt_file"),  # a file's messages, without settings
}


def test_a_default_of_a_setting_stands_in_its_table_alone() -> None:
    in_tables = {Config.__module__, *(table.__module__ for table in TABLES)}
    again = {
        f"{module}: {owner}: {name} = {ast.unparse(value)}"
        for module, path in modules()
        if module not in in_tables
        for owner, name, value in defaults(ast.parse(path.read_text()))
        if name in SETTINGS and (module, owner) not in OTHER and is_chosen(value)
    }
    assert not again


def test_the_exceptions_exist() -> None:
    paths = dict(modules())
    for module, owner in OTHER:
        names = {name for name, *_ in defaults(ast.parse(paths[module].read_text()))}
        assert owner in names, module


def modules() -> Iterator[tuple[str, Path]]:
    for package in ("common", "slurm", "bootstrap", "rlpost"):
        for path in (ROOT / package).rglob("*.py"):
            yield ".".join(path.relative_to(ROOT).with_suffix("").parts), path


def defaults(tree: ast.Module) -> Iterator[tuple[str, str, ast.expr]]:
    """Owner, name and default of every field and parameter that has one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and line.value is not None:
                    yield node.name, ast.unparse(line.target), line.value
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given, named = node.args.posonlyargs + node.args.args, node.args.kwonlyargs
            pairs = [*zip(reversed(given), reversed(node.args.defaults), strict=False)]
            pairs += [pair for pair in zip(named, node.args.kw_defaults, strict=True) if pair[1]]
            yield from ((node.name, argument.arg, value) for argument, value in pairs)


def is_chosen(value: ast.expr) -> bool:
    """Whether a default is a value, and not a constant with a name, which stands once itself."""
    try:
        return bool(ast.literal_eval(value))
    except ValueError:
        return False
