"""Two attempts at one folder, as real processes: the older one never commits once the newer has claimed it."""

from __future__ import annotations

import errno
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlpost.checkpoint.commit import begin, commit, newest_committed, prune, recoverable
from rlpost.checkpoint.ownership import claim, read_owner
from rlpost.errors import Fenced

ZOMBIE = """
import sys
from pathlib import Path
from rlpost.checkpoint.commit import begin, commit, prune
from rlpost.checkpoint.ownership import claim

folder, looks = Path(sys.argv[1]), sys.argv[2] == "looks"
ours = claim(folder, "zombie")
print("claimed", flush=True)
step = 0
try:
    while True:
        step += 1
        writing = begin(folder, step, lane=ours.lane)
        (writing / "shard").write_bytes(b"zombie" * 1000)
        commit(writing, check=ours.check if looks else lambda: None)
        print(step, flush=True)
        if looks:
            ours.check()
            prune(folder, 2, lane=ours.lane)
except Exception as error:
    print(type(error).__name__, error, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["looks", "does not look"])
def test_a_zombie_that_saves_as_fast_as_it_can_is_out_when_the_folder_is_claimed(tmp_path, kind):
    """Whatever instant it is at. What the newer attempt found when it claimed the folder is what it keeps finding, also
    when the older one never reads OWNER, as if a cache showed it the old one; but for what the older one deletes just
    then, because it has two that are newer."""
    moments = random.Random(7)
    for number in range(6):
        folder = tmp_path / str(number)
        zombie = subprocess.Popen(
            [sys.executable, "-c", ZOMBIE, folder, kind],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
        )
        try:
            assert zombie.stdout.readline() == "claimed\n"
            zombie.stdout.readline()
            time.sleep(moments.uniform(0, 0.05))
            ours = claim(folder, "new")
            found = recoverable(folder, 100)
            out, _ = zombie.communicate(timeout=60)
        finally:
            zombie.kill()
        end = out.splitlines()[-1]
        assert end.split()[0] in {"Fenced", "FileNotFoundError", "CheckpointError"}, f"it went on: {end}"
        assert recoverable(folder, 2) == found[:2], "the older attempt added or took away a checkpoint"
        assert set(recoverable(folder, 100)) <= set(found)
        assert found and newest_committed(folder).path == found[0]
        writing = begin(folder, 10_000, lane=ours.lane)
        (writing / "shard").write_text("new")
        assert commit(writing, check=ours.check) == newest_committed(folder).path


def test_the_claim_names_who_has_it_and_a_claim_after_it_wins(tmp_path):
    first = claim(tmp_path, "3 of runs/a")
    first.check()
    assert read_owner(tmp_path) == first.owner
    second = claim(tmp_path, "4 of runs/a")
    second.check()
    with pytest.raises(
        Fenced, match=r"belongs to attempt 4 of runs/a \(process \d+ on .*; this is attempt 3 of runs/a"
    ):
        first.check()
    assert not first.lane.exists() and second.lane.is_dir()
    (tmp_path / "OWNER").unlink()
    with pytest.raises(Fenced, match="belongs to nobody"):
        second.check()


def test_storage_that_fails_is_not_another_attempt(tmp_path, monkeypatch, caplog):
    """A run that is fenced does not come back; one whose storage fails for a moment tries again."""
    ours = claim(tmp_path, "1")

    def fails(path):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", fails)
        ours.check()
    assert "OWNER cannot be read" in caplog.text
    claim(tmp_path, "2")
    with pytest.raises(Fenced, match="belongs to attempt 2"):
        ours.check()


def test_what_was_renamed_but_not_marked_is_out_of_reach_and_what_is_marked_stays(tmp_path):
    """The newer attempt begins from what it saw: a marker that is written afterwards must find nothing to stand in."""
    kept = claim(tmp_path, "0")
    for step in (1, 2):
        writing = begin(tmp_path, step, lane=kept.lane)
        (writing / "shard").write_text("x")
        commit(writing)
    (tmp_path / "iter_0000002" / "COMMITTED").unlink()
    claim(tmp_path, "1")
    assert [path.name for path in recoverable(tmp_path, 9)] == ["iter_0000001"]
    with pytest.raises(FileNotFoundError):
        (tmp_path / "iter_0000002" / "COMMITTED").write_text("late")


def test_leftovers_of_fenced_attempts_are_deleted_after_the_next_commit(tmp_path):
    claim(tmp_path, "0")
    ours = claim(tmp_path, "1")
    writing = begin(tmp_path, 1, lane=ours.lane)
    (writing / "shard").write_text("x")
    commit(writing, check=ours.check)
    prune(tmp_path, 1, lane=ours.lane)
    assert sorted(path.name for path in tmp_path.iterdir()) == [ours.lane.name, "OWNER", "iter_0000001", "latest"]
