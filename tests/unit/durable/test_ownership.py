"""Two attempts at one folder, as real processes: the older one never commits after a newer claim."""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from rlpost.durable.commit import (
    begin,
    checkpoint_name,
    commit,
    newest_committed,
    prune,
    recoverable,
)
from rlpost.durable.ownership import check_attempt, check_newest, claim, read_owner
from rlpost.errors import CheckpointError, Fenced
from tests.unit.paused_thread import PausedThread

ZOMBIE = """
import sys
from pathlib import Path
from rlpost.durable.commit import begin, commit, prune
from rlpost.durable.ownership import claim

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
def test_an_old_attempt_that_saves_constantly_is_fenced_by_a_claim(tmp_path, kind):
    """Whatever instant it is at.

    What the newer attempt found when it claimed the folder is what it keeps finding, also when the
    older one never reads OWNER, as if a cache showed it the old one; but for what the older one
    deletes just then, because it has two that are newer.
    """
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
        assert end.split()[0] in {"Fenced", "FileNotFoundError", "CheckpointError"}, (
            f"it went on: {end}"
        )
        assert recoverable(folder, 2) == found[:2], (
            "the older attempt added or took away a checkpoint"
        )
        assert set(recoverable(folder, 100)) <= set(found)
        assert found and newest_committed(folder).path == found[0]
        writing = begin(folder, 10_000, lane=ours.lane)
        (writing / "shard").write_text("new")
        assert commit(writing, check=ours.check) == newest_committed(folder).path


def test_a_later_claim_wins_and_the_error_names_its_owner(tmp_path):
    first = claim(tmp_path / "save", "3 of runs/a")
    first.check()
    assert read_owner(tmp_path / "save") == first.owner
    second = claim(tmp_path / "save", "4 of runs/a")
    second.check()
    host = re.escape(socket.gethostname())
    with pytest.raises(
        Fenced,
        match=rf"belongs to attempt 4 of runs/a \(process \d+ on {host}\); this is attempt 3 of runs/a "
        ".*a separate --save; after a requeue the newer attempt resumes and this one ends$",
    ):
        first.check()
    assert not first.lane.exists() and second.lane.is_dir()
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "save", second.lane)} == {0o700}


def test_an_attempt_is_fenced_when_owner_or_lane_alone_is_anothers(tmp_path):
    """A claim first replaces OWNER, and moves the lanes afterwards."""
    first = claim(tmp_path / "a", "1")
    shutil.copy(claim(tmp_path / "b", "2").folder / "OWNER", tmp_path / "a")
    with pytest.raises(Fenced, match="belongs to attempt 2"):
        first.check()
    second = claim(tmp_path / "a", "3")
    shutil.rmtree(second.lane)
    with pytest.raises(Fenced, match=rf"belongs to no attempt: {second.lane.name} is missing"):
        second.check()


def test_a_lane_that_an_old_client_still_resolves_has_nothing_to_rename(tmp_path):
    """An open descriptor stands for the cache of an NFS client."""
    old = claim(tmp_path, "1")
    writing = begin(tmp_path, 1, lane=old.lane)
    lane = os.open(old.lane, os.O_RDONLY)
    new = claim(tmp_path, "2")
    with pytest.raises(FileNotFoundError):
        os.rename(writing.name, tmp_path / checkpoint_name(1), src_dir_fd=lane)
    os.close(lane)
    assert [path.name for path in tmp_path.glob(".*")] == [new.lane.name]


def test_a_claim_that_a_newer_one_overtakes_never_replaces_its_owner(tmp_path, monkeypatch):
    """Its temporary file is in its lane, which the newer claim has moved."""
    real, overtaking = os.replace, []

    def overtaken(source, target):
        if not overtaking:
            # a crash here leaves nothing that the next claim does not move
            assert all(path.name.startswith(".writing-") for path in tmp_path.iterdir())
            overtaking.append(None)
            overtaking.append(claim(tmp_path, "2"))
        real(source, target)

    monkeypatch.setattr(os, "replace", overtaken)
    with pytest.raises(FileNotFoundError):
        claim(tmp_path, "1")
    overtaking[1].check()


@pytest.mark.parametrize(
    ("driver", "owner", "is_fenced"),
    [
        ("3", "3", False),
        ("3", "4", True),
        ("3", "3.1", True),
        ("3.1", "3", False),
        ("9", "10", True),
        ("0", "0", False),
        ("trial", "0", True),
        ("trial", "4.1", True),
        ("trial", "trial", False),
        ("trial", "another trial", False),
        ("0", "trial", False),
        ("", "0", True),
    ],
)
def test_a_driver_is_fenced_by_every_newer_one_of_its_run(tmp_path, driver, owner, is_fenced):
    """A name that is not of numbers is older than every attempt, attempt 0 included."""
    claim(tmp_path, f"{owner} of runs/best of a")
    check_attempt(tmp_path, driver, "runs/b")
    if not is_fenced:
        check_attempt(tmp_path, driver, "runs/best of a")
        return
    with pytest.raises(Fenced, match=f"belongs to attempt {owner} of runs/best of a .*stops"):
        check_attempt(tmp_path, driver, "runs/best of a")


def test_a_missing_or_damaged_owner_file_does_not_fence_an_attempt_with_a_lane(tmp_path, caplog):
    """No attempt can have claimed the folder: a claim moves the lane away. A run that is fenced
    never comes back.
    """
    ours = claim(tmp_path, "1")
    (tmp_path / "OWNER").unlink()
    ours.check()
    (tmp_path / "OWNER").write_bytes(b"\xff\xfe{")
    ours.check()
    words = f"{tmp_path}/OWNER is missing or damaged; no attempt has claimed the folder since"
    assert caplog.messages == [words] * 2
    ours.lane.rmdir()
    with pytest.raises(Fenced, match="belongs to no attempt"):
        ours.check()


@pytest.mark.parametrize("begins", ["before the claim", "after OWNER is read"])
def test_an_older_attempt_that_claims_late_ends_and_the_newer_one_continues(tmp_path, begins):
    """Its job was paused within its claim while the next attempt began."""
    attempts, folder = tmp_path / "attempts", tmp_path / "save"
    (attempts / "0").mkdir(parents=True)
    newer = []

    def begin_newer():
        if not newer:
            (attempts / "1").mkdir()
            newer.append(claim(folder, "1 of runs/a", check_newest=lambda: None))

    def check():
        if begins == "before the claim":
            begin_newer()
        check_newest(attempts, "0")
        begin_newer()

    with pytest.raises(Fenced, match=r"attempt 1 of .* has begun; attempt 0 ends"):
        claim(folder, "0 of runs/a", check_newest=check)
    newer[0].check()
    check_newest(attempts, "1")
    assert newer[0].lane.is_dir()


def test_a_storage_error_is_not_a_loss_of_ownership(tmp_path, monkeypatch, caplog):
    """A run that is fenced does not come back; one whose storage fails for a moment tries again."""
    ours = claim(tmp_path, "1")

    def fails(path):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", fails)
        ours.check()
    assert caplog.messages == [
        f"cannot read {tmp_path}/OWNER ([Errno 5] Input/output error): ownership is not verified"
    ]
    claim(tmp_path, "2")
    with pytest.raises(Fenced, match="belongs to attempt 2"):
        ours.check()


@pytest.mark.parametrize("is_committed_meanwhile", [False, True])
def test_a_claim_moves_uncommitted_folders_and_keeps_committed_ones(
    tmp_path, monkeypatch, is_committed_meanwhile
):
    """The newer attempt begins from what it saw: a marker that is written afterwards must find
    nothing to stand in. One that is written between its check and its rename is a commit.
    """
    kept, real = claim(tmp_path, "0"), os.rename
    for step in (1, 2):
        save(tmp_path, kept, step, "x")
    late = tmp_path / checkpoint_name(2)
    marker = (late / "COMMITTED").read_text()
    (late / "COMMITTED").unlink()
    (late / "shard").write_text("y")  # checksums are for who reads it

    def rename(source, target):
        if source == late and is_committed_meanwhile:
            (late / "COMMITTED").write_text(marker)
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    new = claim(tmp_path, "1")
    moved = [path.name for path in new.lane.iterdir() if late.name in path.name]
    if is_committed_meanwhile:
        assert recoverable(tmp_path, 9) == [late, tmp_path / checkpoint_name(1)] and not moved
        return
    assert recoverable(tmp_path, 9) == [tmp_path / checkpoint_name(1)] and len(moved) == 1
    with pytest.raises(FileNotFoundError):
        (late / "COMMITTED").write_text("late")


def test_leftovers_of_fenced_attempts_are_deleted_after_the_next_commit(tmp_path):
    claim(tmp_path, "0")
    ours = claim(tmp_path, "1")
    writing = begin(tmp_path, 1, lane=ours.lane)
    (writing / "shard").write_text("x")
    commit(writing, check=ours.check)
    prune(tmp_path, 1, lane=ours.lane)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ours.lane.name,
        "OWNER",
        checkpoint_name(1),
        "latest",
    ]


def commit_and_prune(folder, ours, step):
    path = save(folder, ours, step, "old")
    ours.check()
    prune(folder, 1, lane=ours.lane, committed=path)


def save(folder, ours, step, content):
    writing = begin(folder, step, lane=ours.lane)
    (writing / "shard").write_text(content)
    return commit(writing, check=ours.check)


def visible(folder):
    """All that is no attempt's own: names and contents."""
    found = (
        path
        for top in folder.iterdir()
        if not top.name.startswith((".writing-", ".deleting-"))
        for path in tree(top)
    )
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def tree(path):
    return [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]


@pytest.mark.parametrize(
    "has_the_step", [False, True], ids=["first save of the step", "second save of the step"]
)
def test_an_older_attempt_that_resumes_anywhere_in_its_commit_changes_nothing(
    tmp_path, has_the_step
):
    """It stopped after each call of the system in turn; the newer one has committed the same step
    before it resumes.
    """
    for number in range(1, 1000):
        folder = tmp_path / str(number)
        old = claim(folder, "old")
        save(folder, old, 1, "one")
        if has_the_step:
            save(folder, old, 2, "before")
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(os, "fsync", lambda descriptor: None)
            paused = PausedThread(number, patched)
            stopped = paused.run(
                partial(commit_and_prune, folder, old, 2), expected=(OSError, CheckpointError)
            )
            try:
                new = claim(folder, "new")
                found = newest_committed(folder).path
                assert found is not None and found.name == (
                    checkpoint_name(2) if has_the_step else found.name
                )
                path = save(folder, new, 2, "new")
                prune(folder, 1, lane=new.lane, committed=path)
                before = visible(folder)
            finally:
                paused.resume.set()
                paused.thread.join(20)
        assert visible(folder) == before, f"after call {number}"
        assert newest_committed(folder).path == path and (path / "shard").read_text() == "new"
        if not stopped:
            assert number > 20
            return
    raise AssertionError("the commit never came to its end")


def test_a_checkpoint_replaced_by_an_interrupted_save_is_restored(tmp_path, monkeypatch):
    """Also by who only reads: another run may begin from this folder (--load)."""
    old = claim(tmp_path, "old")
    before = save(tmp_path, old, 2, "before")
    real = os.rename

    def dies(source, target):
        if Path(source).parent == old.lane and Path(target).name == checkpoint_name(2):
            raise KeyboardInterrupt
        real(source, target)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(os, "rename", dies)
        save(tmp_path, old, 2, "new")
    found = newest_committed(tmp_path).path
    assert (found / "shard").read_text() == "before"
    new = claim(tmp_path, "new")
    assert newest_committed(tmp_path).path == before and (before / "shard").read_text() == "before"
    save(tmp_path, new, 3, "three")
    assert (before / "shard").read_text() == "before"
