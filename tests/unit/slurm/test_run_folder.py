"""Run folders and their ledger."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.files import write_atomic
from common.ledger import Ledger
from common.run_folder import RunFolderError, claim_folder, create_run_folder

SETTINGS = json.dumps({"grpo": {"eps_clip": 0.2}, "seed": 1})


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    """A umask that removes no permission."""
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
    assert json.loads(
        create_run_folder(tmp_path / "a", other, resume=True).run_json.read_text()
    ) == {"seed": 2}


@pytest.mark.parametrize("name", ["thesis.tex", "attempts"])
def test_a_folder_that_is_no_run_is_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(RunFolderError, match=r"no run\.json"):
        create_run_folder(tmp_path, SETTINGS)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_folder_code_that_no_run_made_is_not_entered_even_with_resume(tmp_path: Path) -> None:
    """A snapshot replaces RUN/code as a whole, and --run-folder may name another project by
    mistake.
    """
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
    """All complete entries come back in order, including those written after the crash."""
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


DAMAGE = {
    "a flipped bit in a key": (b'"event"', b'"evdnt"'),
    "a flipped bit in a value": (b'"committed"', b'"commi\xf4ted"'),
    "a flipped bit in a brace": (b"}", b"{"),
    "a flipped bit in the time": (b'"time": "2', b'"time": "r'),
    "another kind of value": (b'"committed"', b"7"),
    "a time of another kind": (b'"time": "', b'"time": 7, "x": "'),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_line_is_left_out_and_named_and_no_other(tmp_path, name):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for event in ("started", "committed", "done"):
        ledger.append(event, step=1)
    lines = ledger.path.read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(*DAMAGE[name], 1)
    ledger.path.write_bytes(b"".join(lines))
    assert [entry["event"] for entry in ledger.read()] == ["started", "done"]
    assert len(ledger.damage()) == 1 and ledger.damage()[0].startswith("line 2 is damaged")


def test_a_line_that_another_host_wrote_over_is_written_again(tmp_path, monkeypatch):
    """O_APPEND of two NFS clients: both write at the end that they saw when they opened the file."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append("submitted")
    write, others = (
        os.write,
        [b'{"time": "2026-01-01T00:00:00+00:00", "event": "verdict", "attempt": 7}\n'],
    )

    def with_another(descriptor, data):
        before = os.fstat(descriptor).st_size
        count = write(descriptor, data)
        if others:
            os.truncate(ledger.path, before)
            with ledger.path.open("ab") as file:
                file.write(others.pop())
        return count

    monkeypatch.setattr(os, "write", with_another)
    ledger.append("committed", step=3)
    assert [entry["event"] for entry in ledger.read()] == ["submitted", "verdict", "committed"]


def test_lines_of_many_processes_are_all_there(tmp_path):
    code = (
        "import sys; from pathlib import Path; from common.ledger import Ledger\n"
        "for n in range(40): Ledger(Path(sys.argv[1])).append('e', by=sys.argv[2], n=n)"
    )
    path = tmp_path / "ledger.jsonl"
    command = [sys.executable, "-c", code, str(path)]
    running = [
        subprocess.Popen([*command, str(by)], cwd=Path(__file__).parents[3]) for by in range(3)
    ]
    assert [process.wait(60) for process in running] == [0, 0, 0]
    found = [(entry["by"], entry["n"]) for entry in Ledger(path).read()]
    assert (
        sorted(found) == [(str(by), n) for by in range(3) for n in range(40)]
        and not Ledger(path).damage()
    )


def test_a_file_system_without_locks_has_a_ledger(tmp_path, monkeypatch):
    def refuses(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuses)
    Ledger(tmp_path / "ledger.jsonl").append("made")
    assert [entry["event"] for entry in Ledger(tmp_path / "ledger.jsonl").read()] == ["made"]


@pytest.mark.parametrize("line", ["[]", "7", "null", '"event"'])
def test_what_is_no_entry_is_left_out(tmp_path, line):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.path.write_text(line + "\n")
    ledger.append("done")
    assert [entry["event"] for entry in ledger.read()] == ["done"] and len(ledger.damage()) == 1


def test_a_name_that_several_claim_at_once_is_given_to_one(tmp_path: Path) -> None:
    barrier, claimed = threading.Barrier(8), []

    def claim() -> None:
        barrier.wait()
        claimed.append(claim_folder(tmp_path / "runs/tiny-1").name)

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claimed) == ["tiny-1", *(f"tiny-1-{number}" for number in range(2, 9))]
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "runs").iterdir()} == {0o700}
