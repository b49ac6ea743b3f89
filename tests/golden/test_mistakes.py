"""A catalogue of newcomers' mistakes and of the messages about them; the remedies in it work."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path

import pytest

from rlpost.cli.main import main
from rlpost.config.flags import fields
from rlpost.config.load import dump, load
from rlpost.extensions.watching.status_verb import EXIT_UNKNOWN
from tests.golden.mistakes import MISTAKES, Mistake
from tests.unit.cli.projects import make_project
from tests.unit.jobs.assets import make_assets

LEAST = 60
COMMANDS = (
    "bash",
    "cat",
    "date",
    "dirname",
    "env",
    "git",
    "grep",
    "hostname",
    "sed",
    "sh",
    "tr",
    "uname",
)
PROPOSAL = re.compile(r"; (use|add|give) --[a-z-]+ (?!for )[a-z0-9]")
"""A remedy that is a flag with a value."""
VALUES = re.compile(r"(--[a-z0-9-]+) ([a-z0-9_.]+(?:(?:, | or )[0-9.]+)*)")
"""A flag and the values that a remedy proposes for it."""
ALL = [mistake for mistakes in MISTAKES.values() for mistake in mistakes]
Run = Callable[[str], tuple[int, str]]
HEADER = """\
# Mistakes of newcomers, and what the commands say

<!-- Written by `pytest --update-golden tests/golden/test_mistakes.py` from tests/golden/mistakes.py. -->

Below each command stands its whole output, and below that the commands that follow its remedies; they run. `HERE` is
the folder of the commands. A message has the form flag, value, constraint, remedy; in parentheses behind a value is
where it comes from when that is not the command line.
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with models, prompts and a run, to be copied."""
    folder = make_project(tmp_path_factory.mktemp("made") / "here")
    make_assets(folder / "assets")
    (folder / "runs/first").mkdir(parents=True)
    config = load([folder / "recipe.toml"], {}, base=folder).config
    (folder / "runs/first/run.json").write_text(dump(config))
    # the commands of a machine without Slurm and enroot, whatever this one has
    commands = folder.parent / "bin"
    commands.mkdir()
    for name in COMMANDS:
        if found := shutil.which(name):
            (commands / name).symlink_to(found)
    return folder


@pytest.fixture
def run(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Callable[[Mistake], Run]]:
    """``run(mistake)`` sets up its folder and returns a function that runs a command there and
    returns its exit code and output.
    """
    installed, version = importlib.util.find_spec, importlib.metadata.version

    def prepare(mistake: Mistake) -> Run:
        folder = tmp_path / "here"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(made, folder)
        settings = folder / "runs/first/run.json"
        settings.write_text(settings.read_text().replace(str(made), str(folder)))
        _write(folder, mistake)
        for name in [
            name
            for name in os.environ
            if name.startswith(("RLPOST", "SLURM", "SBATCH", "WANDB", "HF_"))
        ]:
            monkeypatch.delenv(name)
        monkeypatch.delenv("SGLANG_MEMORY_SAVER_CUDA_GRAPH", raising=False)
        monkeypatch.setenv("PATH", str(made.parent / "bin"))
        for name, value in mistake.environ.items():
            monkeypatch.setenv(name, value[1:] if value.startswith("=") else str(folder / value))
        monkeypatch.chdir(folder)

        def find_spec(name: str, *more: object) -> object:
            return None if name in mistake.lacking else installed(name, *more)

        def version_of(name: str) -> str:
            return "2.9.1+cu129" if name == "torch" and mistake.on_gpus else version(name)

        monkeypatch.setattr(importlib.util, "find_spec", find_spec)
        monkeypatch.setattr(importlib.metadata, "version", version_of)

        def command(line: str) -> tuple[int, str]:
            verb, *words = shlex.split(line.replace("{here}", str(folder)))
            assert verb == "rlpost"
            capfd.readouterr()
            code = main(words)
            captured = capfd.readouterr()
            return code, (captured.out + captured.err).replace(str(folder), "HERE")

        return command

    yield prepare


def _write(folder: Path, mistake: Mistake) -> None:
    for name, text in mistake.files.items():
        path = folder / name
        if text is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        elif path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def test_the_message_about_every_mistake_is_the_one_that_was_reviewed(
    run: Callable[[Mistake], Run], golden: Callable[[str, str], None]
) -> None:
    """All of them in one file, which can be read from beginning to end."""
    blocks, untested = [HEADER], []
    for subject, mistakes in MISTAKES.items():
        blocks.append(f"## {subject}\n")
        for mistake in mistakes:
            code, output = run(mistake)(mistake.command)
            assert code != 0, f"{mistake.command}: ran, and printed\n{output}"
            assert "Traceback" not in output, output
            if not mistake.fixed and output.count("error: ") == 1 and PROPOSAL.search(output):
                untested.append(output)
            variables = [
                f"{name}=$PWD/{value} ".replace("$PWD/=", "")
                for name, value in mistake.environ.items()
            ]
            shown = "" if mistake.environ == Mistake("", "").environ else "".join(variables)
            lines = [f"$ {shown}{mistake.command}", *output.splitlines()]
            lines += [f"$ {shown}{fixed}" for fixed in mistake.fixed]
            text = "\n".join(f"    {line}" for line in lines).replace("{here}", "HERE")
            blocks.append(f"### {mistake.title}\n\n{text}\n")
    assert untested == [], "give mistakes.py the commands that follow these remedies"
    golden("mistakes.md", "\n".join(blocks))


@pytest.mark.parametrize("mistake", [one for one in ALL if one.fixed], ids=lambda one: one.title)
def test_the_remedies_work(run: Callable[[Mistake], Run], mistake: Mistake) -> None:
    """Each command that follows a remedy runs, and the message names each of its flags."""
    command = run(mistake)
    _, message = command(mistake.command)
    for fixed in mistake.fixed:
        code, output = command(fixed)
        # the run was never submitted, so its state is unknown
        expected = EXIT_UNKNOWN if fixed.startswith("rlpost status") else 0
        assert code == expected, f"{fixed}\n{output}"
        given = {word for word in shlex.split(fixed) if word.startswith("--")} - {"--dry-run"}
        assert all(flag in message or flag in mistake.command for flag in given), (
            f"{fixed}\n{message}"
        )


def test_there_are_many_mistakes_with_distinct_titles() -> None:
    assert len(ALL) >= LEAST
    titles = [mistake.title for mistake in ALL]
    commands = [(mistake.command, str(mistake.files), str(mistake.environ)) for mistake in ALL]
    assert len(set(titles)) == len(titles) and len(set(commands)) == len(commands)


def test_messages_name_a_setting_by_its_flag() -> None:
    """No message of the catalogue, which holds all outputs, uses the form table.key."""
    keys = [rf"{table}\.{key}" for key, table in fields().items()]
    wrong = re.compile(rf"\b({'|'.join(keys)})\b")
    lines = Path(__file__).with_name("mistakes.md").read_text().splitlines()
    errors = [line for line in lines if line.startswith("    error: ")]
    assert len(errors) >= LEAST
    assert [line for line in errors if wrong.search(line)] == []


def test_no_second_error_proposes_another_value_than_the_first() -> None:
    """Where two messages about one command name values of the same flag, one value is in both."""
    lines = Path(__file__).with_name("mistakes.md").read_text()
    several = [block for block in lines.split("### ") if block.count("    error: ") > 1]
    assert several
    for block in several:
        messages = [
            proposals(line) for line in block.splitlines() if line.startswith("    error: ")
        ]
        for first, second in combinations(messages, 2):
            for flag in first.keys() & second.keys():
                assert first[flag] & second[flag], f"{flag}\n{block}"


def proposals(message: str) -> dict[str, set[str]]:
    """The values that the remedy of a message proposes, by flag.

    >>> sorted(proposals("--x 3: no; use --x 1, 2 or 4, or --y none")["--x"])
    ['1', '2', '4']
    """
    _, _, remedy = message.rpartition("; use ")
    found: dict[str, set[str]] = {}
    for flag, values in VALUES.findall(remedy):
        found.setdefault(flag, set()).update(re.split(r", | or ", values))
    return found
