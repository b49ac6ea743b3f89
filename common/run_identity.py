"""The identity of a run, which is part of everything that the run writes outside its folder.

    RUN/identity.json   id (in the markers of exports), label (id at W&B, name of the TensorBoard
                        folder), path and inode (of the folder, when the identity was settled last)

A folder that was moved keeps its identity. A copy gets a new one: the folder at the recorded path
still has the same id, or, if the original was moved, a folder beside the copy has it. Otherwise
original and copy would write to one W&B run and would replace each other's exports.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from common.files import read_regular, text_or_empty, write_atomic, write_first

IDENTITY_FILE = "identity.json"
EXPORT_ID, WANDB_ID = Path("export_id"), Path("wandb/run_id")
"""Files of runs that were started before there was an IDENTITY_FILE; their ids are kept."""
ID_BYTES, LABEL_DIGITS, MAX_NAME = 8, 8, 60


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """The contents of IDENTITY_FILE."""

    id: str
    label: str
    path: str
    inode: int = 0
    """Which a renamed folder keeps; 0 if it is not known."""


def read_identity(run: Path) -> RunIdentity | None:
    """Return the identity of a run; None if the run has none yet, or is a copy. Raises OSError."""
    recorded = _recorded(run)
    return None if recorded is None or _original(recorded, run) else recorded


def original_of(run: Path) -> Path | None:
    """Return the folder that ``run`` is a copy of; None if it is not a copy. Raises OSError."""
    recorded = _recorded(run)
    return None if recorded is None else _original(recorded, run)


def settle_identity(run: Path) -> RunIdentity:
    """Return the identity of a run; create it at the first call, and for a copy.

    ``run`` exists. One process at a time settles the identity of a copy. Raises OSError.
    """
    path = run / IDENTITY_FILE
    recorded = _recorded(run)
    if recorded is None:
        identity = _new(run)
        if write_first(path, _text(identity)):
            return identity
        recorded = _recorded(run)  # of a process that was faster; None if the file is damaged
    elif _original(recorded, run):
        identity = _new(run)
    elif recorded.path == str(run.resolve()):
        identity = recorded
    else:
        identity = replace(recorded, path=str(run.resolve()), inode=run.stat().st_ino)
    if identity == recorded and path.exists():
        return identity
    write_atomic(path, _text(identity))
    return identity


def copy_words(run: Path, original: Path) -> str:
    """Return the message about a copy."""
    return (
        f"{run} is a copy of the run {original}: it gets a new identity, so a new W&B run and a new TensorBoard "
        "folder, and it cannot replace exports of the original; name another --save-hf"
    )


def _new(run: Path) -> RunIdentity:
    identity = secrets.token_hex(ID_BYTES)
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", run.resolve().name)[:MAX_NAME]
    label = f"{name}-{identity[:LABEL_DIGITS]}"
    return RunIdentity(identity, label, str(run.resolve()), run.stat().st_ino)


def _text(identity: RunIdentity) -> str:
    return json.dumps(asdict(identity), indent=1) + "\n"


def _recorded(run: Path) -> RunIdentity | None:
    """The identity that the folder holds, whichever run it is of. Raises OSError."""
    try:
        record = _read(run)
        inode = int(record.get("inode", 0))
        return RunIdentity(str(record["id"]), str(record["label"]), str(record["path"]), inode)
    except FileNotFoundError:
        return _before_identities(run)
    except (ValueError, KeyError, TypeError, AttributeError):  # damaged: as if there were none
        return None


def _read(run: Path) -> Any:
    """The JSON value in the folder's file. Raises OSError, ValueError."""
    try:
        return json.loads(read_regular(run / IDENTITY_FILE).decode())
    except RecursionError as error:
        raise ValueError(str(error)) from None


def _before_identities(run: Path) -> RunIdentity | None:
    identity, label = (text_or_empty(run / file) for file in (EXPORT_ID, WANDB_ID))
    if not identity and not label:
        return None
    new = _new(run)
    return replace(new, id=identity or new.id, label=label or new.label)


def _original(recorded: RunIdentity, run: Path) -> Path | None:
    """The folder of which ``run`` is a copy; None if it is the one that ``recorded`` is of."""
    original = Path(recorded.path)
    try:
        if os.path.samefile(original, run):
            return None
    except PermissionError:  # its old place may have become another user's
        return None
    except (FileNotFoundError, NotADirectoryError):
        return _twin(recorded, run)
    try:
        return original if _has_id(original, recorded.id) else _twin(recorded, run)
    except PermissionError:  # a run of another user
        return original


def _twin(recorded: RunIdentity, run: Path) -> Path | None:
    """A folder beside ``run`` with the same id: the original was moved, and copied there.

    The renamed one is the original. Without its inode (moved to another file system) the first that
    is resumed becomes the copy.
    """
    own = run.resolve()
    if own.stat().st_ino == recorded.inode:
        return None
    for path in sorted(own.parent.glob(f"*/{IDENTITY_FILE}")):
        with suppress(OSError):  # of another user
            if path.parent.resolve() != own and _has_id(path.parent, recorded.id):
                return path.parent
    return None


def _has_id(run: Path, identity: str) -> bool:
    """Whether a folder's file has an id. Raises OSError."""
    try:
        record = _read(run)
    except (FileNotFoundError, ValueError):
        return False
    return isinstance(record, dict) and record.get("id") == identity
