"""The core runs without its extensions: it names none of them, and each may be missing."""

from __future__ import annotations

import ast
import dataclasses
import pkgutil
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import rlpost
from common.run_folder import RunFolder
from rlpost.cli.main import VERBS, main
from rlpost.config import extensions
from rlpost.config.checks.functions import function_problems, moved_imports
from rlpost.config.extensions import Extension
from rlpost.config.flags import groups
from rlpost.config.load import load
from rlpost.config.tree import Tree
from rlpost.errors import ConfigError
from rlpost.observe.reporter import try_to_write_report
from rlpost.tasks.reward.registry import reward_function
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


def strings(path: Path) -> Iterator[str]:
    """Strings of a file that are not docstrings."""
    documentation = {
        node.value
        for body in (getattr(each, "body", None) for each in nodes(path))
        for node in (body if isinstance(body, list) else ())
        if isinstance(node, ast.Expr)
    }
    for node in nodes(path):
        if isinstance(node, ast.Constant) and node not in documentation:
            yield str(node.value)


def named(path: Path) -> set[str]:
    """The extensions that a file names, in its imports and strings."""
    of_imports = {extension_of(name) for name in imports(path) if name.startswith("rlpost.")}
    in_texts = {
        name
        for text in strings(path)
        if "rlpost" in text
        for place, name in OF_EXTENSIONS.items()
        if f"{place}." in f"{text}.".replace("/", ".")
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


NAME_THEMSELVES = ("bootstrap.doctor.node", "bootstrap.image.doctor")
"""Programs of the core that only the verb of an extension starts."""
WRITTEN_BY_EXTENSIONS = ("rlpost.observe.metric_names", "bootstrap.preflight.checks")
"""Metrics, and a check of nodes, that there are only with the extension whose flag they name."""


def test_the_core_advises_a_verb_or_flag_of_an_extension_only_where_it_is_installed() -> None:
    """``extensions.command`` writes a verb, or, where no registry can be asked, "where installed"."""
    verbs = {verb for row in extensions.extensions() for verb in row.verbs}
    settings = {name for table in extensions.tables().values() for name in table.model_fields}
    settings -= {name for table in Tree.model_fields for name in groups()[table].model_fields}
    flags = {name.replace("_", "-") for name in settings}
    wrong = {}
    for path in FILES:
        module = module_name(path)
        if extension_of(module) or module in NAME_THEMSELVES:
            continue
        for text in strings(path):
            advised = verbs & set(re.findall(r"\brlpost ([a-z][a-z-]+)", text))
            if module.startswith(("rlpost", "bootstrap")) and module not in WRITTEN_BY_EXTENSIONS:
                advised |= flags & set(re.findall(r"--([a-z][a-z-]+)", text))
            if advised and "where installed" not in text:
                wrong[module] = advised
    assert wrong == {}


def test_an_absent_verb_of_a_message_says_that_it_is_absent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert extensions.command("fetch RECIPE") == "rlpost fetch RECIPE"
    monkeypatch.setattr(extensions, "extensions", lambda: ())
    absent = "rlpost logs RUN --follow (this installation lacks the extension with logs)"
    assert extensions.command("logs RUN --follow") == absent
    assert main(["tail"]) == 2 and f"use {absent}" in capsys.readouterr().err


def test_a_row_loads_nothing_but_the_registry() -> None:
    """It is read by each process that builds the tree of settings, on login nodes too."""
    light = {"rlpost", "rlpost.config", "rlpost.errors"}
    light |= {f"rlpost.config.{name}" for name in ("extensions", "extension_row", "moved")}
    light |= {"rlpost.extensions"} | {f"rlpost.extensions.{name}" for name in ROWS}
    light |= {f"rlpost.extensions.{name}.extension" for name in ROWS}
    code = (
        "import sys; from rlpost.config.extensions import extensions; extensions(); "
        "print(*(name for name in sys.modules if name.partition('.')[0] in "
        "('rlpost', 'torch', 'ray', 'pydantic', 'numpy')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == light


def write_first(run: RunFolder) -> None:
    """A report that fails."""
    raise OSError("the storage failed")


def write_second(run: RunFolder) -> None:
    """A report after it."""
    run.report.with_name("second").touch()


def test_a_report_that_fails_leaves_those_of_other_extensions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [Extension(name=name, report=f"{__name__}:write_{name}") for name in ("first", "second")]
    monkeypatch.setattr(extensions, "extensions", lambda: rows)
    try_to_write_report(RunFolder(tmp_path))
    assert (tmp_path / "second").exists()
    assert "no report of the extension first this time: OSError: the storage failed" in caplog.text


MOVED_MODULES = [
    *("rlpost.agents.gateway", "rlpost.compat.slime.sample", "rlpost.observe.report.write"),
    *(
        f"rlpost.observe.report.{name}"
        for name in (
            *("compare", "fleet_use", "goodput", "gpu_layout", "html", "page", "panels"),
            *("plots", "run_facts", "series", "timeline"),
        )
    ),
]
"""Modules of earlier versions."""


@pytest.mark.parametrize("old", [*MOVED_MODULES, *extensions.moved()])
def test_a_moved_module_is_named_where_it_is_by_import_and_by_setting(old: str) -> None:
    module, _, name = old.rpartition(".")
    by_import = {
        line
        for code in (f"import {old}", f"from {module} import {name}", f"from {old} import f")
        for line in moved_imports(ast.parse(code))
        if f"rlpost has no module {old};" in line
    }
    config = load([], {"rollout": {"custom_rm_path": f"{old}.f"}}).config
    by_setting = [line for line in function_problems(config) if "custom-rm-path" in line]
    assert by_import and len(by_setting) == 1
    for line in [*by_import, *by_setting]:
        new = line.rpartition("; use ")[2]
        assert new.startswith("rlpost.") and pkgutil.resolve_name(new), line


def paths_in(value: object) -> Iterator[str]:
    """All texts ``module:name`` of a row, in whichever field."""
    if isinstance(value, str):
        if re.fullmatch(r"\w+(\.\w+)+:\w+", value):
            yield value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from paths_in(getattr(value, field.name))
    elif isinstance(value, Mapping | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from paths_in(part)


def test_every_path_of_a_row_exists() -> None:
    for row in extensions.extensions():
        names = list(paths_in(row))
        assert names and {extension_of(name.replace(":", ".")) for name in names} == {row.name}
        for name in names:
            extensions.load(name)


IN_A_COPY = """
import rlpost
from rlpost.cli.check_settings import check
from rlpost.cli.main import main
from rlpost.config import extensions
from rlpost.config.load import load
from rlpost.tasks.reward.grader import check_reward
print(extensions.follow(), extensions.mirrors(), extensions.reports())
submit = ["submit", "tiny", "--local"]
codes = [main(words) for words in (["--help"], ["check", "tiny"], [*submit, "--dry-run"], submit)]
print(*codes, extensions.extensions(), hasattr(rlpost, "InProcessRun"))
def of_reward(**settings):
    return load([], {"rollout": settings}).config.rollout
check_reward(of_reward(custom_rm_path="rewards.score", rm_type="math"))
supervised = load([], {"grpo": {"loss_type": "sft_loss"}}).config
for refused in (
    lambda: check_reward(of_reward(rm_type="judge")),
    lambda: check_reward(of_reward(rm_type="boxed_math")),
    extensions.rehearsal, extensions.engine_agent, extensions.rank_memory, lambda: check(supervised),
    extensions.check_trainer_without_gpus, extensions.engine_without_gpus,
):
    try:
        refused()
    except ValueError as error:
        print(*str(error).splitlines(), sep="; ")
"""


@pytest.mark.slow
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
    *_, of_sft, of_rank, of_engine = lines = done.stdout.splitlines()
    codes, of_judge, of_math, of_rehearsal, of_agent, of_memory = lines[-9:-3]
    assert codes == "0 0 0 2 () False" and "None {} {}\n" in done.stdout, done.stdout
    assert "  submit" in done.stdout and "  rehearse" not in done.stdout
    assert "memory is not estimated: this installation has no extension for it" in done.stdout
    assert of_judge.startswith("--rm-type judge: no such reward")
    assert of_math.startswith("--rm-type boxed_math: no such reward; known: exact_match, remote_rm")
    assert of_math.endswith("; this installation has no extension with more")
    assert of_rehearsal.startswith("--rehearse: this installation has no extension for it")
    assert of_agent.startswith("engines in other jobs: this installation has no extension")
    assert "--loss-type sft_loss: this installation has no extension for it" in of_sft
    assert of_memory.endswith("this installation has no extension for that; install one")
    for line, what in ((of_rank, "a trainer rank"), (of_engine, "an engine")):
        assert line.startswith(f"{what} without a GPU: this installation has no extension for")


class Point:
    """A fake of an entry point."""

    name, value = "theirs", "their.module:EXTENSION"

    def __init__(self, loaded: object) -> None:
        self.loaded = loaded

    def load(self) -> object:
        if isinstance(self.loaded, BaseException):
            raise self.loaded
        return self.loaded


def test_an_extension_of_another_package_comes_after_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(loaded: object) -> tuple[Extension, ...]:
        monkeypatch.setattr(extensions, "entry_points", lambda group: [Point(loaded)])
        return extensions.extensions.__wrapped__()

    theirs = Extension(name="theirs")
    assert [row.name for row in rows(theirs)] == [*ROWS, "theirs"]
    for loaded, why in (
        (ImportError("no module x"), "ImportError: no module x"),
        (SystemExit(0), "SystemExit: 0"),  # else rlpost submit ends with 0, and no word
        (3, "got a int"),
        (Extension(name="agents"), "there is another extension agents; give it another name"),
    ):
        with pytest.raises(ConfigError, match=rf"rlpost.extensions theirs = .*{why}"):
            rows(loaded)


def test_two_packages_with_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytorch/torchx#1386: what is kept by name would be that of one of them, such as its report."""
    points = [Point(Extension(name="theirs", report=path)) for path in ("one:write", "two:write")]
    monkeypatch.setattr(extensions, "entry_points", lambda group: points)
    with pytest.raises(ConfigError, match="there is another extension theirs"):
        extensions.extensions.__wrapped__()


def test_a_name_of_another_version_is_an_error_in_a_line(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "theirs_with_library.py").write_text("import no_such_library")
    for path in ("rlpost.config.extensions:gone", "rlpost.gone.too:load", "no_such_library:load"):
        with pytest.raises(ConfigError, match=f"an extension names {path}, which does not exist"):
            extensions.load(path)
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        extensions.load("theirs_with_library:load")


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ("from rlpost import columns\nEXTENSION = Extension(name='theirs')", "theirs False"),
        ("1 / 0", "broken False"),
    ],
    ids=["imports a module", "broken"],
)
def test_modules_of_the_package_are_imported_without_the_registry(tmp_path, row, found) -> None:
    """``from rlpost import NAME`` asks the package for the name before it imports a module."""
    info = tmp_path / "theirs-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[rlpost.extensions]\ntheirs = their_row:EXTENSION\n")
    head = "from rlpost.config.extensions import Extension\n"
    (tmp_path / "their_row.py").write_text(head + row)
    program = """
import rlpost
from rlpost import types
from rlpost.config import extensions
try:
    name = extensions.extensions()[-1].name
except ValueError:
    name = "broken"
print(name, hasattr(rlpost, "no_such_name"))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == found, done.stderr


def test_an_extension_replaces_nothing_and_a_broken_one_is_an_error_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    core = {name: group for name, group in groups().items() if name in Tree.model_fields}
    ours = extensions.extensions()
    for row, why in (
        (Extension(name="x", verbs={"submit": VERBS["submit"]}), "the verb submit exists"),
        (Extension(name="x", public_names={"load": ""}), "the public name load exists"),
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
            extensions.public_names(rlpost._PUBLIC)
            extensions.tables(core)

    def broken() -> None:
        raise ConfigError("rlpost.extensions theirs: cannot load it")

    monkeypatch.setattr(extensions, "extensions", broken)
    assert main(["--version"]) == 0 and main(["list"]) == 2
    assert capsys.readouterr().err == "error: rlpost.extensions theirs: cannot load it\n"


def test_a_hook_of_one_extension_is_refused_for_two(monkeypatch) -> None:
    """Which of them a run would use would be unknown."""
    ours = extensions.extensions()
    hooks = {
        "joining_engines": extensions.joining_engines,
        "trainer_without_gpus": extensions.prepare_trainer,
        "engine_without_gpus": extensions.engine_without_gpus,
        "engine_agent": extensions.engine_agent,
        "examples": extensions.examples,
        "follow": extensions.follow,
        "rank_memory": extensions.rank_memory,
        "rehearsal": extensions.rehearsal,
    }
    for hook, asked in hooks.items():
        row = Extension(name="theirs", **{hook: "json:loads"})
        monkeypatch.setattr(extensions, "extensions", lambda row=row: (*ours, row))
        with pytest.raises(ConfigError, match=f"and theirs: both have {hook}; install one of them"):
            asked()
    named = {
        "mirrors": extensions.mirrors,
        "rewards": extensions.rewards,
        "text_rewards": extensions.text_rewards,
    }
    for field, asked in named.items():
        taken = {name: object() for one in ours for name in getattr(one, field)}
        row = Extension(name="theirs", **{field: taken})
        monkeypatch.setattr(extensions, "extensions", lambda row=row: (*ours, row))
        with pytest.raises(ConfigError, match="exists; give it another name"):
            asked()


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        ({"rewards": "exact_match"}, "the reward exact_match exists"),
        ({"rewards": "remote_rm"}, "the reward remote_rm exists"),
        ({"text_rewards": "exact_match"}, "the reward exact_match exists"),
        ({"text_rewards": "remote_rm"}, "the reward remote_rm exists"),
        ({"rewards": "own", "text_rewards": "own"}, "the reward own exists"),
        ({"rewards": "boxed_own"}, "the reward boxed_own begins with boxed_: .* 'own' of"),
        ({"text_rewards": "boxed_math"}, "the reward boxed_math begins with boxed_: .* 'math' of"),
    ],
)
def test_a_reward_whose_name_means_another_is_refused_when_names_are_read(
    names, problem, monkeypatch
) -> None:
    """--rm-type would take the other, and the extension's would never be called."""
    ours = extensions.extensions()
    row = Extension(name="theirs", **{field: {name: object()} for field, name in names.items()})
    monkeypatch.setattr(extensions, "extensions", lambda: (*ours, row))
    with pytest.raises(ConfigError, match=f"extension theirs: {problem}.*; give it another name"):
        reward_function("exact_match")
