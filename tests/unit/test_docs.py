"""The documentation matches the code: commands parse and run, flags, files and links exist, generated
pages are current.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from common.run_folder import create_run_folder
from rlpost import Prompt, Turn, __version__
from rlpost.algorithm.advantage import ESTIMATORS
from rlpost.cli import main as cli
from rlpost.config.flags import fields, flag
from rlpost.config.server_arg_values import server_arg_table
from rlpost.errors import ConfigError
from rlpost.models.families import FAMILIES
from rlpost.observe.metric_names import METRICS
from rlpost.observe.writer import MetricsWriter
from tests.examples import write_examples
from tests.unit.cli.projects import make_project
from tests.unit.jobs.assets import make_assets
from tools.pages.api import api_page
from tools.pages.metrics import names_of_others
from tools.pages.models import models_page
from tools.pages.settings import settings_page

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(?:bash|sh|shell|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
# names that a reader replaces by a file
PLACEHOLDERS = {"RECIPE": "jobs/recipes/tiny.toml", "PROFILE": "jobs/clusters/local.toml"}
PLACEHOLDERS |= {"jobs/NAME.sbatch": "jobs/tiny.sbatch"}
PLACEHOLDERS |= {"jobs/convert_NAME.sbatch": "jobs/convert_qwen3_4b.sbatch"}
LEFT_OUT_OF_PARSING = {"--help", "-h"}


AREAS = "reward|rollout|env|train|eval|time|perf|sync|checkpoint|memory|run|driver"
FILE_AND_NAME = re.compile(r"`([\w./-]+\.(?:py|sh|toml))`(?:: `(\w+)`)?")


class Parsed(Exception):
    """Raised when a verb has parsed its arguments, so that it does not act on them."""


def commands(page: Path) -> list[str]:
    """Command lines of a page: those of its code blocks, and inline code that starts with a command
    of the project.
    """
    found = []
    for block in BLOCK.findall(page.read_text()):
        lines = block.replace("\\\n", " ").splitlines()
        found += [
            line.removeprefix("$ ").strip()
            for line in lines
            if line.strip() and not line.lstrip().startswith("#")
        ]
    text = BLOCK.sub("", page.read_text())
    starts = ("rlpost ", "python -m ", "make ", "sbatch jobs/")
    inline = [code for code in INLINE.findall(text) if code.startswith(starts)]
    return [*found, *(re.sub(r"\[(\w+)\]", r"\1", code) for code in inline)]


# and the first page of each
WHERE = {command: page.name for page in reversed(PAGES) for command in commands(page)}
CASES = [pytest.param(command, id=f"{page}: {command}") for command, page in WHERE.items()]


def parse_verb(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a verb parse its words with its own parser and stop there; settings are loaded as
    well.
    """
    words = [PLACEHOLDERS.get(word, word) for word in words]
    if not words or words[0] == "VERB":
        return
    known = {**cli.verbs(), "doctor": ""}
    assert words[0] in known, f"no verb {words[0]}"
    submits = words[0] == "sweep" and "--grid" in words
    if submits or words[0] in ("submit", "check", "plan", "rehearse", "fetch", "convert"):
        print_config(words[0], words[1:])
        return
    if words[0] == "doctor":
        return
    if words[0] == "evaluate":
        if "--run-folder" in words:
            with pytest.raises(ConfigError, match="neither a run folder"):
                importlib.import_module("rlpost.extensions.evaluating.evaluate_verb").main(
                    words[1:]
                )
        elif words[1:]:
            print_config(words[0], words[1:])
        return

    def parse_only(self, arguments):
        self.parse_known_args(arguments)[1] and self.error(f"not known: {arguments}")
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    with pytest.raises(Parsed):
        cli.verb_function(words[0])(words[1:])


def print_config(verb: str, words: list[str]) -> None:
    """Settings are parsed, loaded and validated, and nothing else happens."""
    with contextlib.redirect_stdout(io.StringIO()), pytest.raises(SystemExit) as left:
        cli.verb_function(verb)([*words, "--print-config"])
    assert left.value.code == 0


@pytest.mark.parametrize("command", CASES)
def test_a_command_of_the_docs_parses(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert subprocess.run(["bash", "-n"], input=command, text=True).returncode == 0
    try:
        words = shlex.split(command, comments=True)
    except ValueError:
        return  # not only words; bash has parsed it
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)  # VARIABLE=value before a command
    if not words or LEFT_OUT_OF_PARSING & set(words):
        return
    if words[0] == "rlpost":
        parse_verb(words[1:], monkeypatch)
    elif words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert all(word in targets for word in words[1:] if "=" not in word)
    elif words[0] == "sbatch":
        files = [PLACEHOLDERS.get(word, word) for word in words[1:] if word.endswith(".sbatch")]
        assert all((ROOT / file).exists() for file in files)
    elif Path(words[0]).name.startswith("python"):
        parse_python(words[1:], monkeypatch)


RUN = "runs/tiny-20261120-144720"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A reader's folder: the recipes, the tiny model with its prompts, a run of two steps."""
    folder = make_project(tmp_path_factory.mktemp("site"))
    make_assets(folder / "models")
    (folder / "jobs").symlink_to(ROOT / "jobs")
    (folder / "assets").mkdir()
    (folder / "model").rename(folder / "assets/tiny")
    for name in ("train.jsonl", "heldout.jsonl"):
        (folder / "assets/tiny" / name).write_bytes((folder / "prompts.jsonl").read_bytes())
    run = create_run_folder(folder / RUN, json.dumps({"rollout": {"num_rollout": 60}}))
    run.ledger.append("submitted", job_id="local-1", nodes=1)
    for step in (1, 2):
        MetricsWriter(run.metrics).write(
            step, {"reward/mean": step / 4, "time/step_s": 1.0, "time/tokens_per_s": 9.0}
        )
    (run.new_attempt() / "driver.log").write_text("step 2/60\n")
    return folder


def runs_anywhere(words: list[str]) -> bool:
    """Whether a command of rlpost needs neither a cluster nor an active run."""
    if words[:1] == ["rlpost"]:
        verb, rest = words[1], words[2:]
    elif words[1:2] == ["-m"] and words[2] in ("rlpost", "rlpost.submit", "rlpost.train"):
        verb, *rest = [*words[2].split(".")[1:], *words[3:]] or [""]
    else:
        return words[1:3] == ["-m", "bootstrap.network"]
    if "--print-config" in rest:
        return True
    if verb in ("submit", "convert", "sweep"):
        return "--dry-run" in rest[1:]
    if verb == "plan":  # of a recipe; other layouts may not fit, which is another exit code
        return len(rest) == 1 and not rest[0].startswith("-")
    if verb == "check":
        return bool(rest)
    return verb in ("status", "list", "logs", "report") and rest in ([], ["--json"])


WORDS = {command: shlex.split(command, comments=True) for command in WHERE}
RUNNABLE = {" ".join(words): words for words in WORDS.values() if runs_anywhere(words)}


def test_commands_of_each_kind_are_run():
    text = "\n".join(RUNNABLE)
    for word in (
        "check RECIPE",
        "--dry-run",
        "--print-config",
        "status --json",
        "logs",
        "report",
        "bootstrap.network",
    ):
        assert word in text


@pytest.mark.parametrize("words", RUNNABLE.values(), ids=RUNNABLE)
def test_a_command_of_the_docs_that_needs_no_cluster_succeeds(words, site, monkeypatch):
    """Unchanged, with exit code 0, or 3 of ``status``: the site has no Slurm."""
    monkeypatch.chdir(site)
    monkeypatch.setenv("RLPOST_ASSETS", str(site / "models"))
    words = [PLACEHOLDERS.get(word, word) for word in words]
    module, rest = ("rlpost", words[1:]) if words[0] == "rlpost" else (words[2], words[3:])
    if module.startswith("bootstrap"):
        assert_python_runs(module, rest)
        return
    main = importlib.import_module(f"{module}.__main__" if module == "rlpost" else module).main
    try:
        code = main(rest)
    except SystemExit as left:
        code = left.code
    assert code == (3 if "status" in rest else 0)


def assert_python_runs(module: str, words: list[str]) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", module, *words], env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr + done.stdout


def parse_python(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """``python -m MODULE ...`` or ``python FILE ...``: it exists, and rlpost parses its arguments."""
    if words[:1] == ["-m"]:
        if words[1] == "rlpost":
            parse_verb(words[2:], monkeypatch)
        elif words[1] == "rlpost.submit":
            parse_verb(["submit", *words[2:]], monkeypatch)
        elif words[1] not in (
            "MODULE",
            "pip",
        ):
            # to look for pip makes setuptools' hook give up its distutils
            monkeypatch.syspath_prepend(str(ROOT))
            assert importlib.util.find_spec(words[1]) is not None, f"no module {words[1]}"
    elif words and words[0].endswith(".py"):
        assert (ROOT / words[0]).exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_targets_of_links_exist(page):
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text()):
        if "://" not in target:
            file = page.parent / target if target else page
            assert file.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(file), f"{page.name}: {target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """Anchors of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {
        re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    }


@pytest.fixture(scope="module")
def flags_of_verbs() -> set[str]:
    """Every option that a verb's help shows."""
    shown = io.StringIO()
    for verb in cli.verbs():
        if verb != "doctor":
            with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
                cli.verb_function(verb)(["--help"])
    return set(re.findall(r"--[a-z][a-z-]*", shown.getvalue()))


WITH_FLAGS = ("troubleshooting", "commands", "install", "slurm", "rewards", "agents", "migrating")
WITH_FLAGS += ("seeing", "speed")
OF_THE_TESTS = {"--hostile-commands", "--kills"}  # options of pytest (tests/conftest.py)


@pytest.mark.parametrize("name", [f"{name}.md" for name in WITH_FLAGS])
def test_flags_that_are_named_exist(name, flags_of_verbs):
    known = {flag(key) for key in fields()} | flags_of_verbs | OF_THE_TESTS
    engine = {"--sglang-" + arg.replace("_", "-") for arg in server_arg_table().args}
    for code in INLINE.findall((ROOT / "docs" / name).read_text()):
        if code.startswith("--"):
            word = code.split()[0]
            assert word in known | engine or (not engine and word.startswith("--sglang-")), (
                f"{name}: {word}"
            )


def test_the_page_of_settings_is_current():
    assert (ROOT / "docs/settings.md").read_text() == settings_page(), (
        "docs/settings.md is old; run make docs"
    )


def test_the_page_of_the_models_is_current_and_complete():
    """Each family has one section."""
    assert (ROOT / "docs/models.md").read_text() == models_page(), "run make docs"


@pytest.mark.slow
def test_the_planner_finds_a_layout_with_each_command_of_the_models(capsys):
    """One that ``rlpost check`` accepts: linear attention needs whole sequences on a rank."""
    text = (ROOT / "docs/models.md").read_text()
    searches = re.findall(r"^rlpost (plan --model .*--suggest)$", text, re.MULTILINE)
    assert len(searches) > 5
    for search in searches:
        assert cli.main(shlex.split(search)) == 0, search
        linear = "qwen3_next" in search or "qwen3_5" in search
        assert " x CP 1 x " in capsys.readouterr().out or not linear


def test_the_page_of_the_api_is_current():
    assert (ROOT / "docs/api.md").read_text() == api_page(), "docs/api.md is old; run make docs"


SYMPTOMS = (
    "Ray workers do not connect",
    "unhandled system error",
    "Out of memory",
    "Long waits between rollouts",
)


def test_every_symptom_has_a_command_that_finds_it():
    """For the problems that users of such systems report most."""
    sections = re.split(r"^## ", (ROOT / "docs/troubleshooting.md").read_text(), flags=re.MULTILINE)
    for symptom in SYMPTOMS:
        section = next(part for part in sections if symptom in part.splitlines()[0])
        assert "`rlpost " in section, symptom


def test_the_page_that_compares_metric_names_names_existing_metrics():
    rows = names_of_others()
    assert {len(cells) for cells in rows} == {4}
    names = [cells[0].strip("`") for cells in rows]
    assert len(names) > 40 and set(names) <= {metric.name for metric in METRICS}


def test_metrics_that_the_tutorials_name_exist():
    for name in ("slurm", "rewards", "agents", "troubleshooting", "speed"):
        text = (ROOT / f"docs/{name}.md").read_text()
        found = {
            code for code in INLINE.findall(text) if re.match(rf"({AREAS})/[a-zA-Z_/]+$", code)
        }
        assert found <= {metric.name for metric in METRICS}, name


def test_the_example_of_a_reward_prints_what_the_page_says(tmp_path, monkeypatch, capsys):
    """It calls the reward of docs/extending.md."""
    write_examples(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    page = (ROOT / "docs/rewards.md").read_text().split("## Built-in rewards")[0]
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    exec(compile(code, "rewards.md", "exec"), {})
    printed = capsys.readouterr().out.strip()
    assert printed == "1.01" and f"prints {printed}:" in page


NEWCOMERS_TASKS = (
    "estimator", "bridge", "model family", "sandbox server", "reward", "`rlpost list`",
    "engines get new weights", "option of sbatch", "last save", "metric in the report",
)  # fmt: skip
MOST_FILES = 4


def test_files_that_a_contributor_opens_first_exist():
    """Each task names the file to open first and the files after it, in order."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text.split("## Where to change what")[1].split("\n## ")[0]
    rows = [row.split("|")[1:4] for row in table.splitlines() if row.startswith("| ")][1:]
    num_files = []
    for task, first, then in rows:
        names = FILE_AND_NAME.findall(first) + FILE_AND_NAME.findall(then)
        num_files += [len(names) for words in NEWCOMERS_TASKS if words in task]
        assert FILE_AND_NAME.match(first.strip()) and len(names) > 1, task
        for path, name in names:
            assert (ROOT / path).is_file(), f"{task}: {path}"
            assert not name or re.search(rf"\b{name}\b", (ROOT / path).read_text()), (
                f"{path}: {name}"
            )
    assert len(num_files) == len(NEWCOMERS_TASKS)
    assert sum(num_files) / len(num_files) <= MOST_FILES


def test_every_estimator_is_documented_and_the_readme_names_every_series_of_models():
    algorithms = (ROOT / "docs/actor.md").read_text().split("\n## Algorithms\n")[1]
    assert not [name for name in ESTIMATORS if f"`{name}`" not in algorithms]
    text = (ROOT / "README.md").read_text()
    alone = [name for name, family in FAMILIES.items() if not family.carried]
    for architecture in alone:
        series = re.match(r"[A-Z][a-z]+(?:-?[0-9]*)?", architecture)[0].lower()
        assert series in text.lower().replace("-", "").replace(" ", ""), architecture


def test_the_readme_names_five_pages_for_each_of_three_readers():
    start = (ROOT / "README.md").read_text().split("\n## Documentation\n")[1].split("\n\n`make")[0]
    readers = [re.findall(r"\]\(([^)]+)\)", part) for part in start.split("\n- **")[1:]]
    assert [len(set(pages)) for pages in readers] == [5, 5, 5]


def test_the_readme_is_short_and_its_example_is_accepted(site, monkeypatch, capsys):
    """The reward and the environment do what their docstrings say, and ``rlpost check`` takes both."""
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 90
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    prompt = Prompt(0, "Q", (1,), label="42")
    texts = ("42", "=40", "none")
    rewards = [names["closeness"](prompt, SimpleNamespace(text=text)) for text in texts]
    assert rewards == [1, 1 / 3, 0]
    episode = names["Retry"]()
    episode.reset(prompt)
    turns = [Turn(number, text, (1,), "stop", None) for number, text in enumerate(("41", "42"))]
    assert [(step.reward, step.done) for step in map(episode.step, turns)] == [
        (0, False),
        (1, True),
    ]
    (site / "my_task.py").write_text(code)
    monkeypatch.chdir(site)
    for words in ("--custom-rm-path my_task.py:closeness", "--env my_task.py:Retry"):
        assert words in text and cli.main(["check", "tiny", *words.split()]) == 0


def source(path: str) -> str:
    return (ROOT / path).read_text()


def test_figures_that_the_repository_can_show_are_those_of_its_pages():
    """Counts in README and comparison, and versions of Slurm wherever they are named."""
    readme, comparison = source("README.md"), source("docs/comparison.md")
    scripts = tomllib.loads(source("tests/data/slime_scripts.toml"))
    refused = source("tests/unit/config/test_published_flags.py").split("REASONS = {")[1]
    num_refused = len(re.findall(r'^    "run-', refused.split("\n}")[0], re.MULTILINE))
    passing = f"{len(scripts) - num_refused} of the {len(scripts)}"
    assert passing in readme
    layouts = source("docs/benchmarks.md").split("## Parallel layouts")[1].split("\n## ")[0]
    counts = map(int, re.findall(r"^\|[^|]+\| (\d+) \|", layouts, re.MULTILINE))
    assert f"{sum(counts)} parallel layouts" in readme and "58 layouts" in layouts
    ids = re.findall(r'id="([^"]+)"', source("tests/contract/test_gateway_clients.py"))
    libraries = {re.sub(r" \d+$", "", name) for one in ids for name in one.split(", ")}
    assert f"{len(libraries)} client libraries" in readme
    with_adapters = sum(family.adapters for family in FAMILIES.values())
    assert f"[{len(FAMILIES)} architectures]" in readme
    assert f"[{with_adapters} of {len(FAMILIES)} architectures]" in comparison
    models, recipes = (
        len(list((ROOT / "jobs" / name).glob(names)))
        for name, names in (("models", "*.json"), ("recipes", "*.toml"))
    )
    shipped = f"{models} files, {len(FAMILIES)} architectures, {recipes} recipes"
    assert shipped in comparison
    steps = re.search(r"num_rollout = (\d+)", source("jobs/recipes/tiny.toml"))[1]
    assert f"for {steps} steps" in readme
    for page in ("README.md", "docs/cluster.md", "docs/preemption.md"):
        assert re.search(r"22\.05, 24\.11\s+and\s+26\.05", source(page)), page


MOST_WORDS, MOST_PAGES, LONGEST_SENTENCE = 55_000, 40, 34


def sentences(page: str) -> list[str]:
    """The sentences of a page's prose; a list of code is one word, and a colon ends a sentence."""
    text = re.sub(r"^```.*?^```|^    [^\n]*$|<!--.*?-->", "", page, flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in text.splitlines() if not line.lstrip().startswith(("|", "#"))]
    found = []
    for part in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", "\n".join(lines)):
        plain = re.sub(r"\s+", " ", re.sub(r"\]\([^)]*\)", "]", part))
        plain = re.sub(r"`[^`]*`((, | and | or |, and )`[^`]*`)*", "CODE", plain)
        found += re.split(r"(?<=[.:!?])\)? +", plain)
    return found


def test_the_documentation_is_short_and_its_sentences_are():
    """Prose: words outside of code and tables. Stubs of files elsewhere are no pages."""
    pages = {page.name: page.read_text() for page in PAGES if page.name != "CONTRIBUTING.md"}
    pages = {name: text for name, text in pages.items() if not text.startswith("% ")}
    assert len(pages) <= MOST_PAGES, len(pages)
    words = sum(len(one.split()) for text in pages.values() for one in sentences(text))
    assert words <= MOST_WORDS, words
    long = [
        f"{name}: {one}"
        for name, text in pages.items()
        for one in sentences(text)
        if sum(bool(re.search(r"\w", word)) for word in one.split()) > LONGEST_SENTENCE
    ]
    assert not long, "\n".join(long)


def test_the_version_is_that_of_the_newest_release_and_of_the_citation():
    """It is set in rlpost/__init__.py, where setup.cfg reads it; new entries go above its section."""
    releases = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert releases[0] == "Unreleased"
    version, _, date = releases[1].partition(" - ")
    assert version == __version__
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], str(citation["date-released"])) == (version, date)
    assert "version = attr: rlpost.__version__" in (ROOT / "setup.cfg").read_text()
