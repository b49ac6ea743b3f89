"""Which folder an export of weights (--save-hf) may fill or replace, and the marker by which a run knows its own.

In: the template of the folder's path, the run, the folders that the run reads or writes. Out: the reason why an export
may not go there, or None. A folder that is there is replaced only when its marker names this run and it holds nothing
that the export did not write; whatever else is there stays.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.files import sync, write_atomic
from rlpost.config.groups.checkpoint import CheckpointConfig

MARKER = ".rlpost-export"
"""Not *.json: an export that serves as --hf-checkpoint has those files copied into the next one."""
ID_FILE = "export_id"
_ID_BYTES = 8


def folder_of(template: str, step: int) -> Path:
    """The folder of a step: ``{step}`` and ``{rollout_id}`` in the template stand for its number."""
    return Path(template.replace("{step}", str(step)).replace("{rollout_id}", str(step)))


def names_a_step(template: str) -> bool:
    """Whether each step has a folder; without it one folder is replaced by each export."""
    return folder_of(template, 0) != folder_of(template, 1)


def export_id(run: Path, *, make: bool = False) -> str | None:
    """What the markers of a run's exports say, wherever its folder is moved to; None where it has made no export yet.

    With ``make`` a run that has none gets one. Raises OSError.
    """
    path = run / ID_FILE
    try:
        return path.read_text().strip() or None
    except FileNotFoundError:
        if not make:
            return None
    identity = secrets.token_hex(_ID_BYTES)
    write_atomic(path, identity + "\n", mode=0o666)
    return identity


def kept_folders(settings: CheckpointConfig, run: Path | None) -> dict[str, Path]:
    """Folders that an export may neither be nor hold, by the flag that names them."""
    named = {
        "--hf-checkpoint": settings.hf_checkpoint,
        "--ref-load": settings.ref_load,
        "--load": settings.load,
        "--save": settings.save,
        "the run's folder": None if run is None else str(run),
    }
    return {flag: Path(folder) for flag, folder in named.items() if folder}


def export_problems(settings: CheckpointConfig, run: Path | None) -> list[str]:
    """What is wrong with --save-hf; ``run`` is the run's folder, None for a run that is still to be made."""
    template = settings.save_hf
    if template is None or names_a_step(template):  # a folder of a step is never replaced
        return []
    try:
        identity = None if run is None else export_id(run)
        problem = refusal(Path(template), identity, kept_folders(settings, run))
    except OSError as error:
        problem = f"it cannot be looked into: {error}"
    return [] if problem is None else [f"--save-hf {template}: {problem}"]


def refusal(target: Path, identity: str | None, kept: Mapping[str, Path]) -> str | None:
    """Why an export of the run of ``identity`` may not replace ``target``, with the remedy; None when it may.

    Links are followed on both sides. Raises OSError when the folder cannot be listed.
    """
    remedy = "name a folder that does not exist yet, such as RUN/hf/{step}"
    own = target.resolve()
    for flag, folder in kept.items():
        if folder.resolve().is_relative_to(own):
            holds = "is the same folder" if folder.resolve() == own else f"lies in it ({folder})"
            return f"an export replaces the whole folder, and {flag} {holds}; {remedy}"
    if not own.exists():
        return None
    if not own.is_dir():
        return f"it is a file; {remedy}"
    names = set(os.listdir(own))
    if not names:
        return None
    marker = _read_marker(own)
    if marker is None:
        return f"it is not empty and no export of a run made it; {remedy}"
    if identity is None or marker.get("id") != identity:
        return f"it holds the export of another run, {marker.get('run')}; {remedy}"
    if others := sorted(names - {MARKER, *marker.get("files", ())}):
        return f"{', '.join(others[:3])} in it is no part of the last export; move it away, or {remedy}"
    return None


def mark(folder: Path, run: Path, identity: str) -> None:
    """Leave the marker in a folder that is written; it names the run and the files. Raises OSError."""
    marker = {"id": identity, "run": str(run), "files": sorted(os.listdir(folder))}
    path = folder / MARKER
    path.write_text(json.dumps(marker, indent=1) + "\n")
    sync(path)


def _read_marker(folder: Path) -> dict[str, Any] | None:
    try:
        marker = json.loads((folder / MARKER).read_text())
    except (FileNotFoundError, ValueError):
        return None
    return marker if isinstance(marker, dict) else None
