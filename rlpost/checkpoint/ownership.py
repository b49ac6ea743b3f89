"""Who writes checkpoints into a folder: one attempt at a time, though an older one may still be alive.

A requeued job may start while processes of its last attempt still run on a node that was cut off. Both would write into
the same folder. So each attempt claims it:

    .writing-TOKEN/    made first: the lane of this attempt, in which it fills its checkpoints
    OWNER              then replaced, atomically: attempt, host, process, TOKEN
    sweep              then lanes of others, and folders of others that have no COMMITTED, are renamed away
    search             only then the newest checkpoint is looked for

Why an older attempt A cannot commit once a newer one B has begun its search. A's way to a commit is: fill
LANE_A/iter_N, read OWNER, rename LANE_A/iter_N to iter_N, write iter_N/COMMITTED. B's claim renames LANE_A. Where A's
rename comes later, its source is gone and it fails; it never makes its lane anew. Where A's rename came before, the
sweep finds iter_N: with COMMITTED it is a checkpoint like any other, and B's search sees it; without, it is renamed
away, and A's writing of COMMITTED fails. Should COMMITTED be written in the very moment between B's look and B's
rename, then B looks once more after the rename, and puts the folder back. None of this needs a lock or a clock: it
rests on rename, which a file server does in one order for all. Reading OWNER only makes A stop early, with a message;
where a cache shows A an old OWNER (NFS: up to acdirmax, 60 s) the renames decide. Two claims at the same moment may
fence each other; then both end, nothing is lost, and the next attempt goes on.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from rlpost.checkpoint.commit import OWNER, WRITING, defect, set_aside, uncommitted, write_durably
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
        if found is not None and found.token == self.owner.token and has_lane:
            return
        now = "nobody: its file OWNER is gone or names none" if found is None else str(found)
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
    write_durably(folder / OWNER, json.dumps(asdict(ours.owner)) + "\n")
    ours.check()
    for path in [path for path in folder.iterdir() if path.name.startswith(WRITING) and path != ours.lane]:
        set_aside(path)
    for path in uncommitted(folder):
        aside = set_aside(path, into=ours.lane)  # elsewhere the older attempt's own prune could delete it meanwhile
        if aside is not None:
            os.rename(aside, path if defect(aside, checksums=False) is None else folder / aside.name)
    return ours


def read_owner(folder: str | Path) -> Owner | None:
    """What OWNER says; None when it is not there or says nothing of the kind. Raises OSError when it cannot be read."""
    try:
        return Owner(**json.loads((Path(folder) / OWNER).read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None
