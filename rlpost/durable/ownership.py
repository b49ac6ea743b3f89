"""Ownership of a checkpoint folder: one attempt writes at a time, even if an older one is alive.

A requeued job may start while processes of its last attempt still run on a partitioned node. Both
would write into the same folder. So each attempt claims it:

    .writing-TOKEN/    created first: the lane of this attempt, in which it fills its checkpoints
    OWNER              then replaced atomically: attempt, host, process, TOKEN
    sweep              then other lanes, and folders without COMMITTED, are moved into this lane
    search             only then the newest checkpoint is searched for

Claim: once a newer attempt B has started its search, an older attempt A cannot change what is read.

A commits in these steps: fill LANE_A/iter_N, read OWNER, move an existing iter_N into LANE_A,
rename LANE_A/iter_N to iter_N, write COMMITTED into that folder through its descriptor, rename
LANE_A/latest to latest. A deletes by a rename into LANE_A. B's claim moves LANE_A.

- A rename by A after that fails, because its lane no longer exists; A never recreates its lane.
- If A renamed to iter_N before, the sweep finds iter_N. With COMMITTED it is a valid checkpoint,
  and B's search finds it. Without, it is moved into B's lane, and A writes COMMITTED there, where
  it is never read, whatever folder has the name iter_N by then.
- If COMMITTED is written between B's check and B's rename, B checks again after the rename and
  moves the folder back.
- A complete checkpoint that A had moved into LANE_A in order to replace it is restored.

The protocol needs no lock and no clock: it relies on rename, which a file server serialises for all
clients. An NFS client may resolve LANE_A from its cache (up to acdirmax, 60 s) and rename out of it
after the move. So the sweep also renames the contents of the lane, which the server checks. Reading
OWNER stops A early, with a message; the file is opened each time, and NFS revalidates at each open.
A missing or damaged OWNER is ignored: no attempt can have claimed the folder while this lane is in
place, so the run continues (a user may have deleted the file). Two simultaneous claims may fence
each other; then both end, nothing is lost, and the next attempt resumes.

An attempt that is paused within its claim may write OWNER after a newer one has claimed the folder.
It looks for newer attempts of the run before and after that, and ends before it moves a lane; an
OWNER of an older attempt therefore fences no newer one whose lane is in place.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rlpost.durable.commit import (
    OWNER,
    WRITING,
    defect,
    rescue,
    set_aside,
    uncommitted,
    write_durably,
)
from rlpost.errors import Fenced

logger = logging.getLogger(__name__)

TOKEN_BYTES = 8


@dataclass(frozen=True, slots=True)
class Owner:
    """The attempt recorded in the file OWNER."""

    attempt: str
    host: str
    process: int
    token: str

    def __str__(self) -> str:
        return f"attempt {self.attempt} (process {self.process} on {self.host})"


@dataclass(frozen=True, slots=True)
class Claim:
    """A checkpoint folder that this attempt owns until another attempt claims it."""

    folder: Path
    owner: Owner

    @property
    def lane(self) -> Path:
        """The folder in which this attempt fills its checkpoints."""
        return self.folder / (WRITING + self.owner.token)

    def check(self) -> None:
        """Check that this attempt still owns the folder.

        A storage error is not treated as a loss of ownership, because a fenced run never resumes;
        the renames decide then.

        Raises:
            Fenced: another attempt owns the folder; the message names it.
        """
        try:
            current_owner, has_lane = read_owner(self.folder), self.lane.is_dir()
        except OSError as error:
            logger.warning(
                "cannot read %s (%s): ownership is not verified", self.folder / OWNER, error
            )
            return
        if has_lane and current_owner is None:
            logger.warning(
                "%s is missing or damaged; no attempt has claimed the folder since",
                self.folder / OWNER,
            )
            return
        if has_lane and current_owner is not None and current_owner.token == self.owner.token:
            return
        is_late = current_owner and _is_older(current_owner.attempt, self.owner.attempt)
        if has_lane and is_late:
            return  # that attempt ends: ``claim`` sees this one before it moves any lane
        if current_owner is None:
            now = f"no attempt: {self.lane.name} and {OWNER} are missing"
        elif current_owner.token == self.owner.token:
            now = f"no attempt: {self.lane.name} is missing"
        else:
            now = str(current_owner)
        raise Fenced(
            f"{self.folder} belongs to {now}; this is {self.owner}, which stops writing there. Give each run a "
            "separate --save; after a requeue the newer attempt resumes and this one ends"
        )


def claim(
    folder: str | Path, attempt: str, *, check_newest: Callable[[], None] = lambda: None
) -> Claim:
    """Take ownership of the folder; call it before searching for the newest checkpoint.

    ``check_newest`` raises Fenced when a newer attempt of the run has begun.

    Raises:
        OSError: the folder is not writable.
        Fenced: another attempt claimed it at the same time, or is newer.
    """
    folder = Path(folder)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    ours = Claim(
        folder, Owner(attempt, socket.gethostname(), os.getpid(), secrets.token_hex(TOKEN_BYTES))
    )
    check_newest()
    os.mkdir(ours.lane, 0o700)
    write_durably(folder / OWNER, json.dumps(asdict(ours.owner)) + "\n", beside=ours.lane)
    check_newest()  # it may have claimed the folder before OWNER was written; its lane is in place
    ours.check()
    for lane in [
        path for path in folder.iterdir() if path.name.startswith(WRITING) and path != ours.lane
    ]:
        _take_away(lane, into=ours.lane)
    for path in uncommitted(folder):
        # outside the lane, prune of the older attempt could delete it
        aside = set_aside(path, into=ours.lane)
        # COMMITTED may have been written between the check and the rename.
        if aside is not None and defect(aside, checksums=False) is None:
            os.rename(aside, path)
    rescue(folder, ours.lane)
    return ours


def _take_away(lane: Path, *, into: Path) -> None:
    """Move the lane of another attempt, and rename its contents."""
    aside = set_aside(lane, into=into)
    if aside is None:
        return
    for path in list(aside.iterdir()):
        if path.name.startswith(WRITING):
            set_aside(path)


def check_newest(attempts: Path, attempt: str) -> None:
    """Raise Fenced if the folder ``attempts`` of a run has a newer attempt than ``attempt``.

    Storage errors are ignored: renames of lanes decide then.
    """
    try:
        names = os.listdir(attempts)
    except OSError:
        return
    newest = max((int(name) for name in names if name.isdecimal()), default=-1)
    if attempt.isdecimal() and newest > int(attempt):
        raise Fenced(f"attempt {newest} of {attempts.parent} has begun; attempt {attempt} ends")


def check_attempt(folder: Path, driver: str, run: str) -> None:
    """Raise Fenced if OWNER names a newer attempt of the same run, or a newer driver of it.

    ``driver`` is ``Cluster.driver_name``; a name of another form is older than every attempt,
    attempt 0 included. For the final write of an attempt that may not have claimed the folder.
    Storage errors and a missing or damaged OWNER are ignored.
    """
    try:
        current_owner = read_owner(folder)
    except OSError:
        return
    if current_owner is None:
        return
    if _is_older(f"{driver} of {run}", current_owner.attempt):
        raise Fenced(
            f"{folder} belongs to {current_owner}; attempt {driver} of {run} stops writing"
        )


def _is_older(attempt: str, other: str) -> bool:
    """Whether ``attempt`` ("DRIVER of RUN") is older than another one of the same run."""
    driver, _, run = attempt.partition(" of ")
    other_driver, _, other_run = other.partition(" of ")
    return run == other_run and _order(driver) < _order(other_driver)


def _order(driver: str) -> tuple[int, ...]:
    """Attempt and number of a driver, for comparison.

    A name of another form gives an empty tuple, which is less than that of every attempt.
    """
    numbers = driver.split(".")
    return tuple(map(int, numbers)) if all(map(str.isdecimal, numbers)) else ()


def read_owner(folder: str | Path) -> Owner | None:
    """Read OWNER; None if it is missing or malformed. Raises OSError if it cannot be read."""
    try:
        return Owner(**json.loads((Path(folder) / OWNER).read_text()))
    except (FileNotFoundError, ValueError, TypeError):  # invalid UTF-8 raises ValueError
        return None
