"""Run folders and their ledger."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm.errors import RunFolderError
from slurm.run_folder import Ledger, create_run_folder, write_atomic

SETTINGS = json.dumps({"grpo": {"eps_clip": 0.2}, "seed": 1})


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    """The worst case for privacy."""
    before = os.umask(0)
    yield
    os.umask(before)


def test_a_run_folder_is_its_owners_alone(tmp_path: Path) -> None:
    """Folders 0700, files 0600, whatever the umask."""
    run = create_run_folder(tmp_path / "runs/a", SETTINGS)
    run.ledger.append("made")
    assert run.root.stat().st_mode & 0o777 == 0o700
    assert run.new_attempt().stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in run.root.iterdir() if path.is_file()} == {0o600}


def test_the_same_settings_may_enter_the_folder_again(tmp_path: Path) -> None:
    create_run_folder(tmp_path / "a", SETTINGS)
    reordered = json.dumps({"seed": 1, "grpo": {"eps_clip": 0.2}}, indent=4)
    assert create_run_folder(tmp_path / "a", reordered).root == tmp_path / "a"


def test_other_settings_do_not_take_over_a_run_and_are_named(tmp_path: Path) -> None:
    create_run_folder(tmp_path / "a", SETTINGS)
    other = json.dumps({"grpo": {"eps_clip": 0.3}, "seed": 1})
    with pytest.raises(RunFolderError, match=r"--eps-clip: 0\.2 there, 0\.3 now.*--resume"):
        create_run_folder(tmp_path / "a", other)
    assert json.loads((tmp_path / "a/run.json").read_text()) == json.loads(SETTINGS)


def test_resume_goes_on_under_the_new_settings(tmp_path: Path) -> None:
    create_run_folder(tmp_path / "a", SETTINGS)
    other = json.dumps({"seed": 2})
    assert json.loads(create_run_folder(tmp_path / "a", other, resume=True).run_json.read_text()) == {"seed": 2}


@pytest.mark.parametrize("name", ["thesis.tex", "attempts"])
def test_a_folder_that_is_no_run_is_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(RunFolderError, match=r"no run\.json"):
        create_run_folder(tmp_path, SETTINGS)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_folder_code_that_no_run_made_is_not_entered_even_with_resume(tmp_path: Path) -> None:
    """A snapshot replaces RUN/code whole; --run-folder may name a project of somebody's by mistake."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code/thesis.py").write_text("years")
    with pytest.raises(RunFolderError, match=r"holds code and no run\.json"):
        create_run_folder(tmp_path, SETTINGS, resume=True)
    assert [path.name for path in tmp_path.iterdir()] == ["code"]


def test_every_attempt_has_a_number_of_its_own(tmp_path: Path) -> None:
    """No number is used twice and ``latest`` points to the last."""
    run = create_run_folder(tmp_path / "a", SETTINGS)
    made = [run.new_attempt().name for _ in range(3)]
    assert made == ["0", "1", "2"]
    assert (run.attempts / "latest").readlink() == Path("2")


def test_a_file_that_cannot_be_written_whole_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "half \ud800")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_line_that_a_crash_cut_off_spoils_no_other(tmp_path: Path) -> None:
    """All whole entries come back in order, those written after the crash too."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    assert ledger.read() == []
    ledger.append("submitted", job_id="7")
    with ledger.path.open("ab") as file:
        file.write(b'\x00\xff\n{"time": "2026-')
    ledger.append("requeued", attempt=1)
    entries = ledger.read()
    assert [(entry["event"], entry.get("job_id"), entry.get("attempt")) for entry in entries] == [
        ("submitted", "7", None),
        ("requeued", None, 1),
    ]
