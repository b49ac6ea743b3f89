"""The identity of a run, which is part of everything that the run writes outside its folder.

    RUN/identity.json   id (in the markers of exports), label (id at W&B, name of the TensorBoard
                        folder), path (of the folder, when the identity was settled last)

A folder that was moved keeps its identity. A copy gets a new one: the folder at the recorded path
still has the same id. Otherwise original and copy would write to one W&B run and would replace each
other's exports.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from common.files import text_or_empty, write_atomic, write_first

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


def read_identity(run: Path) -> RunIdentity | None:
    """Return the identity of a run; None if the run has none yet, or is a copy. Raises OSError."""
    recorded = _recorded(run)
    return None if recorded is None or _is_copy(recorded, run) else recorded


def original_of(run: Path) -> Path | None:
    """Return the folder that ``run`` is a copy of; None if it is not a copy. Raises OSError."""
    recorded = _recorded(run)
    return Path(recorded.path) if recorded is not None and _is_copy(recorded, run) else None


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
    elif _is_copy(recorded, run):
        identity = _new(run)
    else:
        identity = RunIdentity(recorded.id, recorded.label, str(run.resolve()))
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
    return RunIdentity(identity, f"{name}-{identity[:LABEL_DIGITS]}", str(run.resolve()))


def _text(identity: RunIdentity) -> str:
    return json.dumps(asdict(identity), indent=1) + "\n"


def _recorded(run: Path) -> RunIdentity | None:
    """The identity that the folder holds, whichever run it is of. Raises OSError."""
    try:
        record = json.loads((run / IDENTITY_FILE).read_text())
        return RunIdentity(str(record["id"]), str(record["label"]), str(record["path"]))
    except FileNotFoundError:
        return _before_identities(run)
    except (ValueError, KeyError, TypeError):  # damaged: as if there were none
        return None


def _before_identities(run: Path) -> RunIdentity | None:
    identity, label = (text_or_empty(run / file) for file in (EXPORT_ID, WANDB_ID))
    if not identity and not label:
        return None
    new = _new(run)
    return RunIdentity(identity or new.id, label or new.label, new.path)


def _is_copy(recorded: RunIdentity, run: Path) -> bool:
    """Whether the folder that ``recorded`` is of still exists, and is not ``run``."""
    original = Path(recorded.path)
    try:
        if os.path.samefile(original, run):
            return False
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # who moved it may not look
        return False
    try:
        record = json.loads((original / IDENTITY_FILE).read_text())
        return isinstance(record, dict) and record.get("id") == recorded.id
    except (FileNotFoundError, ValueError):
        return False
    except PermissionError:  # a run of another user
        return True
