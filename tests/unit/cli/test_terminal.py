"""No control character of a run, a recipe or a file name reaches a terminal, from any verb."""

from __future__ import annotations

import ast
import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from common.terminal import VisibleStream, visible, visible_output
from rlpost.cli.entry import run_command
from rlpost.cli.main import main
from rlpost.extensions.agents.environments.harbor import check as harbor_check
from tests.unit.watching.report.runs import make_run

ROOT = Path(__file__).parents[3]
TITLE, CLEAR, CONCEAL, CLIPBOARD, RIGHT_TO_LEFT = (
    "\x1b]0;OWNED\x07",
    "\x1b[2J",
    "\x1b[8m",
    "\x1b]52;c;aGk=\x1b\\",
    "\u202e",
)
HOSTILE = f"{TITLE}{CLEAR}{CONCEAL}{CLIPBOARD}{RIGHT_TO_LEFT}\x9b2J"
COMMANDS = (TITLE, CLEAR, CONCEAL, "\x1b]52", RIGHT_TO_LEFT, "\x9b", "\x07")


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@contextmanager
def on_terminal() -> Iterator[Terminal]:
    """Make standard output and standard error one terminal, until the end of the block."""
    terminal = Terminal()
    with redirect_stdout(terminal), redirect_stderr(terminal):
        yield terminal


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no squeue
    monkeypatch.setenv("TERM", "xterm-256color")


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    run = make_run(folder / "hostile", num_steps=3, preempted_at=())
    latest = run.attempts / "latest"
    log = f"2026-11-02 10:00:00.000 WARNING an episode failed: {HOSTILE}\n"
    (latest / "driver.log").write_text(log)
    (latest / "verdict").write_text("failed\n")
    (latest / "verdict.json").write_text(json.dumps({"cause": f"ValueError: {HOSTILE}"}))
    run.ledger.append("submitted", job_id="local-999999999", nodes=1, host="elsewhere")
    end = {"attempt": latest.resolve().name, "verdict": "failed", "answer": 1}
    run.ledger.append("verdict", **end, cause=f"ValueError: {HOSTILE}", reason=HOSTILE)
    return folder


@pytest.mark.parametrize(
    "words",
    [["status"], ["status", "--watch"], ["list"], ["logs"], ["report"], ["status", HOSTILE]],
    ids=" ".join,
)
def test_a_verb_shows_control_characters_as_text(words: list[str], runs_dir: Path) -> None:
    with on_terminal() as screen:
        main([*words, "--runs-dir", str(runs_dir)])
    shown = screen.getvalue()
    assert "\\x1b]0;OWNED" in "".join(shown.split()), "the hostile text was shown"
    assert not [command for command in COMMANDS if command in shown]


def test_the_check_of_a_task_set_shows_them_as_text(tmp_path: Path) -> None:
    folder = tmp_path / "tasks" / f"t{HOSTILE.replace('/', '')}"
    folder.mkdir(parents=True)
    (folder / "task.toml").write_text("")
    (folder / "instruction.md").write_text("do it")
    with on_terminal() as screen, visible_output():
        harbor_check.main([str(tmp_path / "tasks")])
    assert "\\x1b]0;OWNED" in screen.getvalue()
    assert not [command for command in COMMANDS if command in screen.getvalue()]


def test_a_pipe_gets_the_text_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(lambda words: print(words[0]) or 0, [HOSTILE]) == 0
    assert capsys.readouterr().out == HOSTILE + "\n"


def test_the_streams_are_restored_and_protected_once() -> None:
    with on_terminal() as screen:
        with visible_output(), visible_output():
            assert isinstance(sys.stdout, VisibleStream) and sys.stdout.stream is screen
        assert sys.stdout is screen
    assert visible(visible(HOSTILE)) == visible(HOSTILE), "each text may pass more than once"
    assert visible("a\tb\r\nü") == "a\tb\\r\nü"


def test_only_one_place_makes_a_console_and_each_program_protects_its_streams() -> None:
    """A console of rich writes to the terminal itself, past the protected stream."""
    makers, unprotected = [], []
    for path in [*(ROOT / "rlpost").rglob("*.py"), *(ROOT / "bootstrap").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Console"):
                makers.append(path.relative_to(ROOT).as_posix())
        text = path.read_text()
        is_program = "environments" in path.parts or "bootstrap/doctor" in path.as_posix()
        if is_program and "sys.exit(main())" in text and "with visible_output():" not in text:
            unprotected.append(path.name)
    assert set(makers) == {"rlpost/cli/terminal.py"} and not unprotected


@pytest.mark.parametrize("kind", ["toml", "json"])
def test_input_of_too_many_levels_is_a_message(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"deep.{kind}"
    path.write_text(f"a = {'[' * 5_000}{']' * 5_000}")

    def read(words: object) -> int:
        import tomllib

        return len(tomllib.loads(path.read_text()) if kind == "toml" else json.loads("[" * 100_000))

    assert run_command(read, []) == 2
    assert capsys.readouterr().err == "error: the input has too many levels of arrays or tables\n"
