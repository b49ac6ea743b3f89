"""Every setting has an effect: the code of a run, of a job or of a command reads it.

Reads are found in the syntax trees: ``config.rollout.key``, the same through a variable of a known
name, or a name in a table. Checks that only compare or refuse values do not count.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from rlpost.cli.job import SAME_NAME
from rlpost.config.flags import fields
from rlpost.config.tree import Config
from rlpost.extensions.fleet.fleet_jobs import PLACES

ROOT = Path(__file__).parents[3] / "rlpost"
WITHOUT_EFFECT = (
    "config/checks",
    "config/plan",
    "extensions/planning",
    "config/show.py",
    "config/wording.py",
    "cli/check_settings.py",
    "config/signatures.py",
    "durable/result_settings.py",
    "compat",
    "rehearsal",
    "durable/journal.py",
    "extensions/fleet/fleet_checks.py",
)
"""What compares, refuses, shows or translates settings, and does not run with them."""
HOLDERS = {"config", "given", "settings", "self", "evaluation", "bounds", "own", "table"}
"""Variables, beside those of the name of a table, through which settings are read."""
ONLY_IN = {
    "node_mtbf_hours": "extensions/planning/save_interval.py",  # for a recommendation
    "rollout_function_path": "config/checks/functions.py",  # translated to other settings
    "eval_function_path": "config/checks/functions.py",
}
ONE_VALUE = {
    "attention_softmax_in_fp32": False,
}
"""Settings that have one valid value, and another one, which is refused."""


def trees(folder: Path, without: Iterable[str]) -> Iterator[tuple[str, ast.AST]]:
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).as_posix()
        if not any(name == each or name.startswith(f"{each}/") for each in without):
            yield name, ast.parse(path.read_text())


def attributes(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (receiver, attribute) of each attribute that is read; the last name of the receiver."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            receiver = node.value
            name = receiver.attr if isinstance(receiver, ast.Attribute) else ""
            yield (receiver.id if isinstance(receiver, ast.Name) else name).strip("_"), node.attr


def texts(tree: ast.AST) -> Iterator[str]:
    """Yield the strings that are names: keys of tables, arguments of getattr."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.isidentifier():
                yield node.value
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            yield str(node.slice.value)


def unread(settings: dict[str, str], folder: Path, without: Iterable[str]) -> set[str]:
    """Return the settings, by key and table, that no module of the folder reads."""
    read: set[tuple[str, str]] = set()
    named: set[str] = set()
    for _, tree in trees(folder, without):
        read.update(attributes(tree))
        named.update(texts(tree))
    return {
        key
        for key, table in settings.items()
        if key not in named and not any((holder, key) in read for holder in HOLDERS | {table})
    }


def test_every_setting_is_read_by_what_runs_with_it():
    settings = fields()
    assert len(settings) > 330
    found = unread(settings, ROOT, WITHOUT_EFFECT)
    of_engine_jobs = {f"engine_{name}" for name in PLACES}  # read by this name in fleet_jobs
    found -= (
        SAME_NAME  # copied to the job's specification, whose lines a test of late flags compares
    )
    assert found == {*ONLY_IN, "attention_softmax_in_fp32"} | of_engine_jobs


@pytest.mark.parametrize(("key", "module"), ONLY_IN.items())
def test_a_setting_that_only_advises_or_is_translated_is_read_there(key, module):
    tree = ast.parse((ROOT / module).read_text())
    assert any(attribute == key for _, attribute in attributes(tree))


@pytest.mark.parametrize(("key", "other"), ONE_VALUE.items())
def test_a_setting_with_one_valid_value_refuses_another(key, other):
    table = fields()[key]
    with pytest.raises(ValidationError, match=key):
        Config.model_validate({table: {key: other}})


def test_a_setting_that_nothing_reads_is_found(tmp_path):
    """Neither a check, nor an attribute of something else, nor a sentence is a read."""
    (tmp_path / "checks").mkdir()
    (tmp_path / "checks/of_it.py").write_text("problem = config.rollout.ignored < 3\n")
    text = "x = scored.ignored\ny = 'it is ignored'\nz = self._config.rollout.used\n"
    (tmp_path / "run.py").write_text(text + "config.rollout.ignored = 4\ntable = ('listed',)\n")
    settings = dict.fromkeys(("ignored", "used", "listed"), "rollout")
    assert unread(settings, tmp_path, ["checks"]) == {"ignored"}
