"""Whole outputs of verbs in a pseudo-terminal of 80 columns and 24 lines."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pytest

from bootstrap.check_result import Check
from bootstrap.preflight.table import Preflight
from common.run_folder import create_run_folder
from rlpost.cli.main import help_page, verbs
from rlpost.durable.journal import Journal
from rlpost.durable.journal_format import ANSWER, Part
from rlpost.types import Prompt
from tests.unit.cli.projects import make_project
from tests.unit.durable.test_journal import begin, group
from tests.unit.watching.report.runs import make_run

COLUMNS, LINES, SCREEN = 80, 24, 50
ROOT = Path(__file__).parents[2]
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
WAITING = re.compile(r"\.\.\. +\d+ s: waiting for ")
FREE = re.compile(r"[\d.]+ [kMGT]?B free")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with two runs, one of them with a long name, and a run with a journal."""
    folder = make_project(tmp_path_factory.mktemp("terminal") / "project")
    for name, seed in (("baseline-of-a-long-name-20261102-080000", 0), ("candidate", 1)):
        make_run(folder / "runs" / name, num_steps=30, preempted_at=(12,), seed=seed)
    saves = folder / "saves"
    settings = {"checkpoint": {"save": str(saves)}}
    create_run_folder(folder / "runs/journal", json.dumps(settings))
    journal = Journal.resume(saves / "journal", 0, step=0, settings="")
    journal.append_group(group(4, 3, 2), wanted=True)
    journal.append_group(group(5, 6), wanted=False)
    journal.batch(0, [group(4)], {})
    journal.add_part(
        Part(6, 1, ANSWER, samples=(group(6, 3).samples[0].sample,)), Prompt(6, "", ())
    )
    journal.drop_parts(6)
    journal.append_evaluation(0, {"eval/held-out-of-2026": 0.25, "eval/another-set": 0.125})
    begin(journal, 1)
    journal.close()
    return folder


def printed(here: Path, *words: str) -> str:
    """Output of ``rlpost WORDS`` on a terminal, without colours."""
    command = [sys.executable, "-m", "rlpost", *words]
    environ = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "TERM": "xterm-256color",
        "HOME": str(here),
        "HF_HUB_OFFLINE": "1",
        "LANG": "C.UTF-8",
    }
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    with subprocess.Popen(
        command, cwd=here, env=environ, stdin=terminal, stdout=terminal, stderr=terminal
    ):
        os.close(terminal)
        found = b"".join(iter(lambda: _read(controller), b""))
    os.close(controller)
    text = ESCAPES.sub("", found.decode()).replace("\r\n", "\n").replace(str(here), "HERE")
    lines = FREE.sub("999 GB free", text).splitlines()
    # Notes of a wait appear after 10 s, on a busy machine alone.
    return "".join(f"{line.rstrip()}\n" for line in lines if not WAITING.match(line))


def _read(controller: int) -> bytes:
    try:
        return os.read(controller, 65536)
    except OSError:  # EIO: on Linux, the other side is closed
        return b""


def fits(text: str) -> bool:
    """Whether no line is wider than the terminal; errors are not wrapped, so that they can be copied."""
    lines = [line for line in text.splitlines() if not line.startswith("error: ")]
    return all(len(line) <= COLUMNS for line in lines)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("plan", ["plan", "qwen3_4b"]),
        ("plan_suggest", ["plan", "qwen3_4b", "--suggest", "--gpus", "16"]),
        ("check", ["check", "recipe.toml"]),
        ("journal", ["journal", "journal", "--records"]),
        ("compare", ["compare", "baseline-of-a-long-name-20261102-080000", "candidate",
                     "--fail-if", "reward/mean:-2%", "--fail-if", "time/step_s:+1e3"]),
        ("fetch", ["fetch", "qwen3_4b", "--sizes-only", "--assets-dir", "assets"]),
        ("recipes", ["recipes", "clusters"]),
        ("list", ["list"]),
    ],
)  # fmt: skip
def test_a_verb_at_80_columns(
    name: str, words: list[str], here: Path, golden: Callable[[str, str], None]
) -> None:
    text = printed(here, *words)
    golden(f"terminal/{name}.txt", text)
    assert fits(text)


def test_the_checks_of_a_host_at_80_columns(golden: Callable[[str, str], None]) -> None:
    names = "reach gpus gpu-health nvlink hcas network memlock nofile shm temp-dir ports folder"
    checks = [Check(name, "OK", "as wanted") for name in names.split()]
    checks += [
        Check("storage", "WARN", "no locks on /shared/folder-of-runs (nfs4): " + "why " * 20),
        Check("clock", "EXCLUDE_NODE", "7 s ahead of the head: start chrony"),
    ]
    text = Preflight.of({"gpu-node-0001": checks, "n2": checks[:-1]}).table(COLUMNS) + "\n"
    golden("terminal/doctor.txt", text)
    assert fits(text)
    # not on a terminal: one block
    assert len(Preflight.of({"n": checks}).table().splitlines()) == 4


def test_the_doctor_of_this_machine_fits_80_columns(here: Path) -> None:
    text = printed(here, "doctor")
    assert text.startswith("host")
    assert fits(text)


@pytest.mark.parametrize("verb", [verb for verb in verbs() if verb != "doctor"])
def test_the_help_of_a_verb_fits_one_screen(verb: str, capsys, monkeypatch) -> None:
    from rlpost.cli.main import main

    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    with pytest.raises(SystemExit) as end:
        main([verb, "--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0
    assert text.startswith(f"usage: rlpost {verb}")
    assert fits(text)
    assert len(text.splitlines()) <= SCREEN


def test_the_help_of_all_verbs_fits_one_screen() -> None:
    page = help_page(verbs())
    assert fits(page)
    assert len(page.splitlines()) <= SCREEN
    assert all(f"\n  {verb}" in page for verb in verbs())
