"""The core runs without its extensions: it names none of them, and each may be missing."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlpost.cli.main import VERBS, main
from rlpost.config import extensions
from rlpost.config.extensions import Extension
from rlpost.config.flags import groups
from rlpost.config.tree import Tree
from rlpost.errors import ConfigError
from tests.unit.test_architecture import FILES, ROOT, imports, module_name, nodes

ROWS = [row.name for row in extensions.extensions()]
OF_EXTENSIONS = {f"rlpost.extensions.{name}": name for name in ROWS}


def extension_of(module: str) -> str | None:
    """The extension that a dotted name belongs to."""
    names = [
        name
        for place, name in OF_EXTENSIONS.items()
        if module == place or module.startswith(f"{place}.")
    ]
    return names[0] if names else None


def texts(path: Path) -> Iterator[str]:
    """Strings of a file that are not docstrings, with paths written as dotted names."""
    documentation = {
        node.value
        for body in (getattr(each, "body", None) for each in nodes(path))
        for node in (body if isinstance(body, list) else ())
        if isinstance(node, ast.Expr)
    }
    for node in nodes(path):
        if (
            isinstance(node, ast.Constant)
            and "rlpost" in str(node.value)
            and node not in documentation
        ):
            yield str(node.value).replace("/", ".")


def named(path: Path) -> set[str]:
    """The extensions that a file names, in its imports and strings."""
    of_imports = {extension_of(name) for name in imports(path) if name.startswith("rlpost.")}
    in_texts = {
        name
        for text in texts(path)
        for place, name in OF_EXTENSIONS.items()
        if f"{place}." in f"{text}."
    }
    return {name for name in of_imports | in_texts if name is not None}


def test_the_core_names_no_extension_and_no_extension_names_another() -> None:
    wrong = {
        module: others
        for path in FILES
        if (module := module_name(path)) != "rlpost.config.extensions"
        and (others := named(path) - {extension_of(module)})
    }
    assert not wrong


def test_a_row_loads_nothing_but_the_registry() -> None:
    """It is read by each process that builds the tree of settings, on login nodes too."""
    light = {"rlpost", "rlpost.config", "rlpost.config.extensions", "rlpost.errors"}
    light |= {"rlpost.extensions"} | {f"rlpost.extensions.{name}" for name in ROWS}
    light |= {f"rlpost.extensions.{name}.extension" for name in ROWS}
    code = (
        "import sys; from rlpost.config.extensions import extensions; extensions(); "
        "print(*(name for name in sys.modules if name.partition('.')[0] in "
        "('rlpost', 'torch', 'ray', 'pydantic', 'numpy')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == light


def test_every_path_of_a_row_exists() -> None:
    for row in extensions.extensions():
        names = [*row.tables.values(), *row.checks, *row.on_node, *row.foreign_names.values()]
        names += [verb.main for verb in row.verbs.values()]
        names += [path for each in row.rewards.values() for path in (each.make, each.check)]
        names += filter(None, (row.adapters, row.answers, row.job, row.rehearsal))
        assert names and {extension_of(name.replace(":", ".")) for name in names} == {row.name}
        for name in names:
            extensions.load(name)


IN_A_COPY = """
from rlpost.cli.main import main
from rlpost.config import extensions
from rlpost.config.load import load
from rlpost.tasks.reward.grader import check_reward
print(main(["--help"]), main(["check", "tiny"]), extensions.extensions())
rollout = load([], {"rollout": {"rm_type": "judge"}}).config.rollout
for refused in (lambda: check_reward(rollout), extensions.rehearsal):
    try:
        refused()
    except ValueError as error:
        print(error)
"""


def test_the_core_runs_without_the_folder(tmp_path: Path) -> None:
    moved = {"rlpost.extensions"}

    def absent(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if module_name(Path(folder, name)) in moved]

    shutil.copytree(ROOT / "rlpost", tmp_path / "rlpost", ignore=absent)
    for name in ("common", "slurm", "bootstrap", "jobs", "assets"):
        (tmp_path / name).symlink_to(ROOT / name)
    done = subprocess.run(
        [sys.executable, "-c", IN_A_COPY],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    *_, codes, of_judge, of_rehearsal = done.stdout.splitlines()
    assert codes == "0 0 ()", done.stdout
    assert "  submit" in done.stdout and "  rehearse" not in done.stdout
    assert of_judge.startswith("--rm-type judge: no such reward")
    assert of_rehearsal.startswith("--rehearse: this installation has no extension for it")


class Point:
    """A fake of an entry point."""

    name, value = "theirs", "their.module:EXTENSION"

    def __init__(self, loaded: object) -> None:
        self.loaded = loaded

    def load(self) -> object:
        if isinstance(self.loaded, Exception):
            raise self.loaded
        return self.loaded


def test_an_extension_of_another_package_comes_after_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(loaded: object) -> tuple[Extension, ...]:
        monkeypatch.setattr(extensions, "entry_points", lambda group: [Point(loaded)])
        return extensions.extensions.__wrapped__()

    theirs = Extension(name="theirs")
    assert [row.name for row in rows(theirs)] == [*ROWS, "theirs"]
    for loaded, why in ((ImportError("no module x"), "ImportError: no module x"), (3, "got a int")):
        with pytest.raises(ConfigError, match=rf"rlpost.extensions theirs = .*{why}"):
            rows(loaded)


def test_an_extension_replaces_nothing_and_a_broken_one_is_an_error_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    core = {name: group for name, group in groups().items() if name in Tree.model_fields}
    ours = extensions.extensions()
    for row, why in (
        (Extension(name="x", verbs={"submit": VERBS["submit"]}), "the verb submit exists"),
        (Extension(name="x", tables={"grpo": ""}), "the table grpo exists"),
        (Extension(name="x", tables={"env": ""}), "the table env exists"),
        (
            Extension(name="x", tables={"y": "rlpost.config.groups.grpo:GrpoConfig"}),
            r"table \[y\] of an extension: the setting \w+ exists",
        ),
    ):
        monkeypatch.setattr(extensions, "extensions", lambda row=row: (*ours, row))
        with pytest.raises(ConfigError, match=why):
            extensions.verbs(VERBS)
            extensions.tables(core)

    def broken() -> None:
        raise ConfigError("rlpost.extensions theirs: cannot load it")

    monkeypatch.setattr(extensions, "extensions", broken)
    assert main(["--version"]) == 0 and main(["list"]) == 2
    assert capsys.readouterr().err == "error: rlpost.extensions theirs: cannot load it\n"
