"""One damaged, hostile or private folder among the runs ends no command: it is one line."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from common.run_folder import RunFolder
from rlpost.cli.main import main
from rlpost.cli.runs import list_runs
from rlpost.errors import ConfigError
from rlpost.extensions.watching.run_status import CACHE, VERSION, Status, sources, statuses
from tests.unit.watching.report.runs import make_run

DEEP = "[" * 100_000
OTHER_USER = 1234


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    run = make_run(tmp_path_factory.mktemp("whole") / "whole", num_steps=3, preempted_at=())
    (run.attempts / "latest/driver.log").write_text("10:00:00 INFO starting\n")
    return run


@pytest.fixture
def runs_dir(whole: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two copies of a run; ``bad`` is the newer one and will be damaged."""
    monkeypatch.setenv("PATH", str(tmp_path))  # no squeue
    for number, name in enumerate(("good", "bad")):
        shutil.copytree(whole.root, tmp_path / "runs" / name, symlinks=True)
        os.utime(tmp_path / "runs" / name / "run.json", (number, number))
    return tmp_path / "runs"


def replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def cached(**changed: object) -> Callable[[Path], None]:
    """A cache of the status whose sources are those of the run, with other values."""

    def write(path: Path) -> None:
        run = RunFolder(path.parent)
        values = asdict(statuses([run])[0]) | changed
        kept = {"version": VERSION, "sources": sources(run), "status": values}
        path.write_text(json.dumps(kept))

    return write


def text(content: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(content) and None


def event(name: str, **values: object) -> Callable[[Path], None]:
    entry = {"event": name, "time": "2026-11-02T08:00:00.000+00:00", **values}
    return text(json.dumps(entry) + "\n")


DAMAGES: list[tuple[str, Callable[[Path], Any]]] = [
    ("run.json", text('{"rollout": null, "cluster": 3}')),
    ("run.json", text(DEEP)),
    ("run.json", replace_by_fifo),
    ("run.json", replace_by_link),
    ("metrics.jsonl", replace_by_fifo),
    ("metrics.jsonl", replace_by_link),
    ("metrics.jsonl", text('{"step": 1, "reward/mean": {"a": 1}}\n')),
    ("metrics.jsonl", text(f'{{"step": {10**400}, "time/step_s": 1e999}}\n')),
    ("ledger.jsonl", replace_by_fifo),
    ("ledger.jsonl", replace_by_link),
    ("ledger.jsonl", event("submitted", job_id={"a": 1})),
    ("ledger.jsonl", event("verdict", attempt=0, cause=[1])),
    ("ledger.jsonl", event("started", step="x", gpus=4)),
    ("ledger.jsonl", event("committed", step=[], time="x")),
    (CACHE, text(DEEP)),
    (CACHE, cached(reward="0.5")),
    (CACHE, cached(warnings=[1])),
    (CACHE, cached(evals={"a": "b"})),
    (CACHE, cached(goodput={"trained_frac": "x"})),
    (CACHE, cached(checkpoint_time="never")),
    (CACHE, cached(eta_s=float("inf"), num_steps=7)),
    ("attempts/latest/driver.log", replace_by_fifo),
    ("attempts/latest/verdict.json", text("[]")),
    ("attempts/latest/verdict", lambda path: os.mkfifo(path)),
    ("prometheus.json", lambda path: os.mkfifo(path)),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGES, ids=lambda value: str(value)[:20])
def test_a_damaged_run_is_a_line_of_a_table(
    runs_dir: Path,
    name: str,
    damage: Callable[[Path], Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    damage(runs_dir / "bad" / name)
    capsys.readouterr()
    assert main(["list", "--runs-dir", str(runs_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("good ") and "COMPLETED" in line]
    assert [line for line in lines if line.startswith("bad ")]
    assert main(["status", "good", "--runs-dir", str(runs_dir)]) == 0
    assert main(["status", "bad", "--runs-dir", str(runs_dir)]) in (0, 1, 3)
    assert main(["logs", "good", "--runs-dir", str(runs_dir)]) == 0


def test_what_a_damaged_run_lacks_is_named(runs_dir: Path) -> None:
    replace_by_link(runs_dir / "bad" / "metrics.jsonl")
    (status,) = statuses([RunFolder(runs_dir / "bad")])
    assert status.state == "UNKNOWN"
    assert status.reason.startswith("its files cannot be read: OSError: ")
    assert "not a regular file" in status.reason


def test_a_finished_run_without_its_attempts_is_complete(runs_dir: Path) -> None:
    """The ledger has the end, also of a run on this machine whose attempts were deleted."""
    run = RunFolder(runs_dir / "good")
    (run.root / "ledger.jsonl").unlink()
    run.ledger.append("submitted", job_id="local-999999999", nodes=1, host=os.uname().nodename)
    shutil.rmtree(run.attempts)
    (status,) = statuses([run])
    assert (status.state, status.reason) == ("FAILED", "the process of local-999999999 was killed")
    run.ledger.append("done", step=3, weights="x")
    (status,) = statuses([run])
    assert (status.state, status.reason) == ("COMPLETED", "")


def test_every_field_of_a_status_has_its_type_after_a_round_trip(runs_dir: Path) -> None:
    first, again = (statuses([RunFolder(runs_dir / "good")])[0] for _ in range(2))
    assert (runs_dir / "good" / CACHE).exists()
    assert isinstance(again, Status)
    assert replace(first, checkpoint_age_s=again.checkpoint_age_s) == again


@pytest.fixture
def shared(whole: RunFolder, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of runs that two users share: ``theirs`` is private, as each run is."""
    folder = Path(tempfile.mkdtemp())
    monkeypatch.setenv("PATH", str(folder))
    try:
        for name, user in (("mine", OTHER_USER), ("theirs", 0), ("open", 0)):
            shutil.copytree(whole.root, folder / name, symlinks=True)
            for path in (folder / name, *(folder / name).rglob("*")):
                os.chown(path, user, user, follow_symlinks=False)
            (folder / name).chmod(0o755 if name == "open" else 0o700)
        os.utime(folder / "mine" / "run.json", (1, 1))
        folder.chmod(0o777)
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_a_colleagues_private_run_stops_no_command(
    shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for verb in ("list", "status", "logs"):  # load what they import as root
        main([verb, "--runs-dir", str(shared)])
    capsys.readouterr()
    os.seteuid(OTHER_USER)
    try:
        assert main(["list", "--runs-dir", str(shared)]) == 0
        out, err = capsys.readouterr()
        assert "\nmine " in out and "theirs" not in out
        assert err == "note: 1 folder that you may not enter is not shown\n"
        for words in (["status"], ["status", "mine"], ["logs"], ["logs", "mine"]):
            assert main([*words, "--runs-dir", str(shared)]) == 0, words
            out, err = capsys.readouterr()
            assert "theirs" not in out + err and not ("status" in words and "open" in out)
        assert main(["status", "theirs", "--runs-dir", str(shared)]) == 2
        assert "1 folder that you may not enter is not shown" in capsys.readouterr().err
        listing = list_runs(shared)
        assert {run.root.name for run in listing.runs} == {"mine", "open"}
    finally:
        os.seteuid(0)


def test_a_folder_without_runs_is_a_message(tmp_path: Path) -> None:
    from rlpost.cli.runs import find_run

    with pytest.raises(ConfigError, match="no run in"):
        find_run(None, tmp_path)
