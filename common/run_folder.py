"""The run folder on the shared file system: its paths, its creation, and its ledger.

    RUN/  run.json  code/  job.sbatch  ledger.jsonl  metrics.jsonl  episodes.jsonl  attempts/
    checkpoints/  report/  submitit/

Input: a path and the resolved settings as JSON text. Output: a ``RunFolder``.

Invariants: only the owner has access to the folder (0700) and its files (0600); run.json appears
atomically; a folder of another run is never reused by accident.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from common.attempt import create_attempt
from common.files import write_atomic
from common.ledger import Ledger

LOCK_FILE = ".submitting"
"""Held while a job of the run is submitted, so that two submissions do not share a folder."""


class RunFolderError(Exception):
    """A run folder is taken or is not one."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of one run. Construction does not access the file system."""

    root: Path

    @property
    def run_json(self) -> Path:
        """The resolved settings."""
        return self.root / "run.json"

    @property
    def code(self) -> Path:
        """Snapshot of the code at submission."""
        return self.root / "code"

    @property
    def script(self) -> Path:
        """The submitted batch script."""
        return self.root / "job.sbatch"

    @property
    def ledger(self) -> Ledger:
        """The run's events, one line each."""
        return Ledger(self.root / "ledger.jsonl")

    @property
    def episodes(self) -> Path:
        """One line per episode, with environments."""
        return self.root / "episodes.jsonl"

    @property
    def metrics(self) -> Path:
        """One line per step, written by the driver."""
        return self.root / "metrics.jsonl"

    @property
    def attempts(self) -> Path:
        """One folder per start of the job; ``latest`` links to the newest."""
        return self.root / "attempts"

    @property
    def checkpoints(self) -> Path:
        """Committed checkpoints."""
        return self.root / "checkpoints"

    @property
    def report(self) -> Path:
        """Plots and tables."""
        return self.root / "report"

    @property
    def report_page(self) -> Path:
        """The report as a page."""
        return self.report / "report.html"

    @property
    def submitit(self) -> Path:
        """submitit's own files."""
        return self.root / "submitit"

    def new_attempt(self) -> Path:
        """Create an attempt folder with the first unused number and link ``latest`` to it."""
        return create_attempt(self.attempts)


def claim_folder(path: Path) -> Path:
    """Create a folder that did not exist: ``path``, or the first unused of ``path-2``, ...

    Two processes never get the same folder: mkdir is atomic, on NFS too. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    claimed, number = path, 1
    while True:
        try:
            claimed.mkdir(mode=0o700)
            return claimed
        except FileExistsError:
            number += 1
            claimed = path.with_name(f"{path.name}-{number}")


def create_run_folder(root: Path, run_json: str, *, resume: bool = False) -> RunFolder:
    """Create the folder of a run, or reuse it, and write the settings to run.json.

    Args:
        root: path of the folder; missing parents are created.
        run_json: the resolved settings, a JSON object.
        resume: resume an existing run with these settings.

    Raises:
        RunFolderError: the path belongs to another run or is not a run folder.
    """
    folder = RunFolder(root.absolute())
    if folder.root.exists() and not folder.root.is_dir():
        raise RunFolderError(
            f"run folder {folder.root} is a file; choose another name with --run-folder"
        )
    if not resume and folder.root.exists():
        _refuse_another_run(folder, run_json)
    if folder.code.exists() and not folder.run_json.exists():  # the snapshot would replace it
        raise RunFolderError(
            f"run folder {folder.root} holds code and no run.json, so no run is known to have made it; move code away "
            "or choose another --run-folder"
        )
    folder.root.mkdir(parents=True, exist_ok=True)
    folder.root.chmod(0o700)  # mkdir's mode is subject to the umask, and the folder may be older
    for path in (folder.attempts, folder.checkpoints, folder.report, folder.submitit):
        path.mkdir(mode=0o700, exist_ok=True)
    write_atomic(folder.run_json, run_json if run_json.endswith("\n") else run_json + "\n")
    return folder


def _refuse_another_run(folder: RunFolder, run_json: str) -> None:
    try:
        existing = json.loads(folder.run_json.read_text())
    except FileNotFoundError:
        if any(path.name != LOCK_FILE for path in folder.root.iterdir()):
            raise RunFolderError(
                f"run folder {folder.root} is not empty and holds no run.json; choose another with --run-folder, "
                "or --resume to resume a run whose run.json is lost"
            ) from None
        return
    except ValueError as error:
        raise RunFolderError(
            f"{folder.run_json} is not JSON ({error}); choose another --run-folder"
        ) from error
    new = json.loads(run_json)
    if existing != new:
        changed = ", ".join(_differences(existing, new)[:5])
        raise RunFolderError(
            f"run folder {folder.root} belongs to a run with other settings ({changed}); choose another name with "
            "--run-folder, or --resume to resume that run with the new settings"
        )


def _differences(there: object, new: object, key: str = "") -> list[str]:
    """Changed settings by their flags: a flag is the last part of a key."""
    if not (isinstance(there, dict) and isinstance(new, dict)):
        name = "--" + key.rpartition(".")[2].replace("_", "-") if key else "run.json"
        return [] if there == new else [f"{name}: {there!r} there, {new!r} now"]
    keys = sorted(set(there) | set(new))
    found = (_differences(there.get(k), new.get(k), f"{key}.{k}" if key else k) for k in keys)
    return [line for lines in found for line in lines]
