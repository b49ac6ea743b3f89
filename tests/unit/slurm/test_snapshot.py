"""Code snapshots, against real git."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from slurm.errors import SnapshotError
from slurm.snapshot import snapshot_code


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True
    )


def files(folder: Path) -> dict[str, str]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file() or path.is_symlink())
    return {str(path.relative_to(folder)): path.read_text() for path in paths}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A commit, then changes on top of it: one file changed, one deleted, one new, one ignored, one
    odd name.
    """
    project = tmp_path / "project"
    (project / "pkg").mkdir(parents=True)
    git(project, "init", "-q")
    (project / ".gitignore").write_text("/runs/\n*.pyc\n")
    (project / "pkg/a.py").write_text("old")
    (project / "gone.py").write_text("gone")
    git(project, "add", "-A")
    git(project, "commit", "-qm", "first")
    (project / "pkg/a.py").write_text("new")
    (project / "gone.py").unlink()
    (project / "odd \n'; touch x").write_text("odd")
    (project / "pkg/a.pyc").write_text("ignored")
    (project / "link").symlink_to("pkg/a.py")
    return project


def test_a_snapshot_holds_what_would_run_now(checkout: Path) -> None:
    """Changed and new files with their content, no deleted and no ignored ones; links stay links."""
    target = checkout / "runs/x/code"
    snapshot = snapshot_code(checkout, target)
    assert files(target) == {
        ".gitignore": "/runs/\n*.pyc\n",
        "link": "new",
        "odd \n'; touch x": "odd",
        "pkg/a.py": "new",
    }
    assert (target / "link").is_symlink()
    assert (snapshot.is_dirty, snapshot.num_files, len(snapshot.commit or "")) == (True, 4, 40)


def test_a_second_snapshot_replaces_the_first_and_never_holds_the_run(checkout: Path) -> None:
    """Also if the run's folder is in the checkout and not ignored."""
    target = checkout / "here/x/code"
    snapshot_code(checkout, target)
    (target.parent / "checkpoint").write_text("large")
    (checkout / "pkg/a.py").write_text("newer")
    snapshot_code(checkout, target)
    assert set(files(target)) == {".gitignore", "link", "odd \n'; touch x", "pkg/a.py"}
    assert files(target)["pkg/a.py"] == "newer"


def test_a_process_that_holds_old_code_does_not_stop_a_submission(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS, where the folder of a held file cannot be removed."""
    target = tmp_path / "run/code"
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda folder, ignore_errors=False: None)
        for _ in range(3):
            snapshot_code(checkout, target)
    assert len([*target.parent.iterdir()]) == 4  # with code.json
    snapshot_code(checkout, target)
    assert {path.name for path in target.parent.iterdir()} == {"code", "code.json"}


def test_a_job_that_starts_during_a_submission_finds_the_whole_code(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removing the code of the last submission takes seconds on a shared file system."""
    target = checkout / "runs/x/code"
    snapshot_code(checkout, target)
    seen, remove = [], shutil.rmtree

    def slow(folder: Path, **options: bool) -> None:
        seen.append(len(files(target)))
        assert folder != target
        remove(folder, **options)

    monkeypatch.setattr(shutil, "rmtree", slow)
    snapshot_code(checkout, target)
    assert set(seen) == {4} and [
        path.name for path in target.parent.iterdir() if path.is_dir()
    ] == ["code"]


def test_a_clean_checkout_is_called_clean(checkout: Path) -> None:
    git(checkout, "add", "-A")
    git(checkout, "commit", "-qm", "second")
    assert not snapshot_code(checkout, checkout / "runs/x/code").is_dirty


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_a_checkout_of_somebody_else_can_be_submitted_from(checkout: Path) -> None:
    """A site-wide installation, for example, whose ownership git calls dubious."""
    for path in (checkout, *checkout.rglob("*")):
        os.chown(path, 65534, 65534, follow_symlinks=False)
    assert subprocess.run(["git", "-C", checkout, "status"], capture_output=True).returncode != 0
    snapshot = snapshot_code(checkout, checkout / "runs/r/code")
    assert snapshot.commit is not None and snapshot.is_dirty
    assert (checkout / "runs/r/code/pkg/a.py").read_text() == "new"


def test_before_the_first_commit_there_is_no_commit(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "a.py").write_text("a")
    assert snapshot_code(tmp_path, tmp_path / "runs/x/code").commit is None


def test_outside_git_the_packages_are_copied(tmp_path: Path) -> None:
    """As from site-packages: the packages without their neighbours and bytecode."""
    for name in ("rlpost/a.py", "rlpost/__pycache__/a.pyc", "slurm/b.py", "torch/c.py"):
        (tmp_path / "site" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "site" / name).write_text(name)
    snapshot = snapshot_code(tmp_path / "site", tmp_path / "run/code")
    assert sorted(files(tmp_path / "run/code")) == ["rlpost/a.py", "slurm/b.py"]
    assert (snapshot.commit, snapshot.is_dirty) == (None, False)


def test_a_folder_without_code_is_named(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match=str(tmp_path)):
        snapshot_code(tmp_path, tmp_path / "run/code")
    assert list(tmp_path.iterdir()) == []


def inodes(folder: Path) -> set[int]:
    return {path.stat().st_ino for path in folder.rglob("*") if path.is_file()}


def test_equal_files_of_two_runs_are_one_and_cannot_be_written(checkout: Path) -> None:
    """A sweep of 100 runs would otherwise take 170,000 inodes."""
    first, second, third = (checkout / f"runs/{name}/code" for name in "abc")
    snapshot_code(checkout, first)
    snapshot_code(checkout, second)
    assert inodes(first) == inodes(second) and files(first) == files(second)
    modes = [path.stat().st_mode for path in first.rglob("*") if path.is_file()]
    assert not any(mode & 0o222 for mode in modes)
    (checkout / "pkg/a.py").write_text("wen")  # of the same size
    (checkout / ".gitignore").chmod(0o755)
    snapshot_code(checkout, third)
    assert files(third)["pkg/a.py"] == "wen" and files(second)["pkg/a.py"] == "new"
    assert os.access(third / ".gitignore", os.X_OK)
    assert len(inodes(third) & inodes(second)) == 1
    shutil.rmtree(first.parent)
    assert files(second)["pkg/a.py"] == "new"


def test_a_changed_copy_or_one_of_another_user_is_not_linked(checkout: Path) -> None:
    first, second = (checkout / f"runs/{name}/code" for name in "ab")
    snapshot_code(checkout, first)
    (first / "pkg/a.py").chmod(0o644)
    (first / "pkg/a.py").write_text("evi")
    (first / "pkg/a.py").chmod(0o444)
    (first / ".gitignore").chmod(0o644)  # may still change
    if os.geteuid() == 0:
        os.chown(first / "odd \n'; touch x", 65534, 65534)
    snapshot_code(checkout, second)
    assert files(second)["pkg/a.py"] == "new"
    assert len(inodes(second) & inodes(first)) == (0 if os.geteuid() == 0 else 1)


def test_without_hard_links_files_are_copied(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    snapshot_code(checkout, checkout / "runs/a/code")
    monkeypatch.setattr(os, "link", refuse)
    snapshot_code(checkout, checkout / "runs/b/code")
    assert files(checkout / "runs/a/code") == files(checkout / "runs/b/code")


def test_a_snapshot_that_fails_leaves_nothing(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "a.py")

    monkeypatch.setattr(shutil, "copy2", fail)
    with pytest.raises(OSError, match="No space left"):
        snapshot_code(checkout, checkout / "runs/a/code")
    assert list((checkout / "runs/a").iterdir()) == []
