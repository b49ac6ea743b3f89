"""Who writes checkpoints into a folder: one attempt at a time, though an older one may still be alive.

A requeued job may start while processes of its last attempt still run on a node that was cut off. Both would write into
the same folder. So each attempt claims it:

    .writing-TOKEN/    made first: the lane of this attempt, in which it fills its checkpoints
    OWNER              then replaced, atomically: attempt, host, process, TOKEN
    sweep              then lanes of others, and folders of others that have no COMMITTED, are moved into this lane
    search             only then the newest checkpoint is looked for

Why nothing that an older attempt A does once a newer one B has begun its search changes what anybody reads.
A's way to a commit is: fill LANE_A/iter_N, read OWNER, move an iter_N that is there into LANE_A, rename
LANE_A/iter_N to iter_N, write COMMITTED into that folder by its descriptor, rename LANE_A/latest to latest;
its way to delete is a rename into LANE_A. B's claim moves LANE_A. Where a rename of A's comes later, one side
of it is gone and it fails; A never makes its lane again. Where A's rename to iter_N came before, the sweep
finds iter_N: with COMMITTED it is a checkpoint like any other, and B's search sees it; without, it is moved
into B's lane, and A's COMMITTED goes there, where it is never read, whatever lies under the name iter_N by
then. Should COMMITTED be written in the very moment between B's look and B's rename, then B looks once more
after the rename, and puts the folder back. A complete checkpoint that A had moved into LANE_A, to replace it,
comes back.

None of this needs a lock or a clock: it rests on rename, which a file server does in one order for all. A
client of NFS may look LANE_A up in its cache (up to acdirmax, 60 s) and rename out of it though it was moved:
so the sweep gives new names to what is inside as well, which the server decides. Reading OWNER makes A stop
early, with a message; it is opened each time, and NFS asks the server at each open. An OWNER that is missing
or damaged says nothing: no attempt can have claimed the folder while our lane is in place, so the run goes on (a
person may have removed the file). Two claims at the same moment may fence each other; then both end, nothing
is lost, and the next attempt goes on.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from rlpost.checkpoint.commit import OWNER, WRITING, defect, rescue, set_aside, uncommitted, write_durably
from rlpost.errors import Fenced

logger = logging.getLogger(__name__)

TOKEN_BYTES = 8


@dataclass(frozen=True, slots=True)
class Owner:
    """An attempt as the file OWNER names it."""

    attempt: str
    host: str
    process: int
    token: str

    def __str__(self) -> str:
        return f"attempt {self.attempt} (process {self.process} on {self.host})"


@dataclass(frozen=True, slots=True)
class Claim:
    """A folder of checkpoints that is ours until another attempt claims it."""

    folder: Path
    owner: Owner

    @property
    def lane(self) -> Path:
        """Where this attempt fills its checkpoints."""
        return self.folder / (WRITING + self.owner.token)

    def check(self) -> None:
        """Raises Fenced, which says whose the folder is now, when it is ours no more.

        Storage that fails says nothing about that, and a run that is fenced never comes back: the renames decide then.
        """
        try:
            found, has_lane = read_owner(self.folder), self.lane.is_dir()
        except OSError as error:
            logger.warning("%s cannot be read (%s): whose the folder is stays open", self.folder / OWNER, error)
            return
        if has_lane and found is None:
            logger.warning("%s is missing or damaged; no attempt has claimed the folder since", self.folder / OWNER)
            return
        if has_lane and found is not None and found.token == self.owner.token:
            return
        if found is None:
            now = f"nobody: {self.lane.name} and {OWNER} are gone"
        elif found.token == self.owner.token:
            now = f"nobody: {self.lane.name} is gone"
        else:
            now = str(found)
        raise Fenced(
            f"{self.folder} belongs to {now}; this is {self.owner}, which writes nothing there any more. Two runs need "
            "two folders (--save); after a requeue the newer attempt goes on and this one ends"
        )


def claim(folder: str | Path, attempt: str) -> Claim:
    """Take the folder over from whoever had it; call it before the newest checkpoint is looked for.

    Raises OSError where it cannot be written to, Fenced when another attempt claims it in the same moment.
    """
    folder = Path(folder)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    ours = Claim(folder, Owner(attempt, socket.gethostname(), os.getpid(), secrets.token_hex(TOKEN_BYTES)))
    os.mkdir(ours.lane, 0o700)
    write_durably(folder / OWNER, json.dumps(asdict(ours.owner)) + "\n", beside=ours.lane)
    ours.check()
    for lane in [path for path in folder.iterdir() if path.name.startswith(WRITING) and path != ours.lane]:
        _take_away(lane, into=ours.lane)
    for path in uncommitted(folder):
        aside = set_aside(path, into=ours.lane)  # elsewhere the older attempt's own prune could delete it meanwhile
        if aside is not None and defect(aside, checksums=False) is None:
            os.rename(aside, path)
    rescue(folder, ours.lane)
    return ours


def _take_away(lane: Path, *, into: Path) -> None:
    """Move the lane of another attempt, and give new names to what is in it."""
    aside = set_aside(lane, into=into)
    if aside is None:
        return
    for path in list(aside.iterdir()):
        if path.name.startswith(WRITING):
            set_aside(path, into=aside)


def check_attempt(folder: Path, attempt: int, run: str) -> None:
    """Raises Fenced when OWNER names a newer attempt of the same run: for the last word of one that may not even have
    claimed the folder. Storage that fails, or an OWNER that is missing or damaged, says nothing.
    """
    try:
        found = read_owner(folder)
    except OSError:
        return
    if found is None:
        return
    number, _, of_run = found.attempt.partition(" of ")
    if of_run == run and number.isdecimal() and int(number) > attempt:
        raise Fenced(f"{folder} belongs to {found}; attempt {attempt} of {run} writes nothing any more")


def read_owner(folder: str | Path) -> Owner | None:
    """What OWNER says; None when it is not there or says nothing of the kind. Raises OSError when it cannot be read."""
    try:
        return Owner(**json.loads((Path(folder) / OWNER).read_text()))
    except (FileNotFoundError, ValueError, TypeError):  # not valid UTF-8 is a ValueError
        return None
