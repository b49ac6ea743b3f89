"""Decides which folder a weight export (--save-hf) may create or replace; marks what a run made.

Input: the template of the folder's path, the identity of the run, the folders that the run reads or
writes. Output: the reason why an export may not be written there, or None. An existing folder is
replaced only if its marker names this run and it contains only files of the export.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from glob import escape, glob
from pathlib import Path

from common.files import read_regular, sync
from common.run_identity import RunIdentity, read_identity
from rlpost.config.groups.checkpoint import CheckpointConfig

MARKER = ".rlpost-export"
REMEDY = "name a folder that does not exist yet, such as RUN/hf/{step}"
_STEP = re.compile(r"\{(?:step|rollout_id)\}")


@dataclass(frozen=True, slots=True)
class Marker:
    """What an exported or converted folder was made from. Ids alone: folders are published."""

    id: str
    """Of the run (``RunIdentity``), as ``run``, its label."""
    run: str
    step: int | None = None
    attempt: str | None = None
    """That made an export."""
    source: Mapping[str, str] = field(default_factory=dict)
    """Digests of the checkpoint and of the model that were converted."""
    files: tuple[str, ...] = ()
    """Names in the folder."""


def folder_of(template: str, step: int) -> Path:
    """Return the folder of a step; replaces ``{step}`` and ``{rollout_id}`` in the template."""
    return Path(_STEP.sub(str(step), template))


def names_a_step(template: str) -> bool:
    """Return whether each step has a separate folder; otherwise each export replaces one folder."""
    return _STEP.search(template) is not None


def kept_folders(settings: CheckpointConfig, run: Path | None) -> dict[str, Path]:
    """Return the folders that an export may neither be nor contain, by their flag."""
    named = {
        "--hf-checkpoint": settings.hf_checkpoint,
        "--ref-load": settings.ref_load,
        "--load": settings.load,
        "--save": settings.save,
        "the run's folder": None if run is None else str(run),
    }
    return {flag: Path(folder) for flag, folder in named.items() if folder}


def export_problems(
    settings: CheckpointConfig, run: Path | None, *, num_steps: int | None = None
) -> list[str]:
    """Return the problems of --save-hf.

    Args:
        run: the run's folder, None if not yet created.
        num_steps: folders of later steps are not written.
    """
    template = settings.save_hf
    if template is None:
        return []
    try:
        identity = None if run is None else read_identity(run)
        if not names_a_step(template):
            problem = refusal(Path(template), identity, kept_folders(settings, run))
            return [] if problem is None else [f"--save-hf {template}: {problem}"]
        for step, folder in sorted(_existing(template)):
            problem = _another_maker(folder, identity)
            if problem is not None and (num_steps is None or step <= num_steps):
                return [f"--save-hf {template}: {folder}: {problem}; {REMEDY}"]
    except OSError as error:
        return [f"--save-hf {template}: it cannot be looked into: {error}"]
    return []


def refusal(target: Path, identity: RunIdentity | None, kept: Mapping[str, Path]) -> str | None:
    """Return why the run may not write to ``target``, with the remedy; None if it may.

    Symbolic links are resolved on both sides. Raises OSError when the folder cannot be listed.
    """
    resolved = target.resolve()
    for flag, folder in kept.items():
        if folder.resolve().is_relative_to(resolved):
            holds = (
                "is the same folder" if folder.resolve() == resolved else f"lies in it ({folder})"
            )
            return f"an export replaces the whole folder, and {flag} {holds}; {REMEDY}"
    if problem := _another_maker(resolved, identity):
        return f"{problem}; {REMEDY}"
    marker = read_marker(resolved)
    if marker is not None and (others := sorted({*os.listdir(resolved)} - {MARKER, *marker.files})):
        return f"{', '.join(others[:3])} in it is no part of the last export; move it away, or {REMEDY}"
    return None


def _another_maker(folder: Path, identity: RunIdentity | None) -> str | None:
    """Return whose a folder is if an export of the run did not make it; None for a free name."""
    if not folder.exists():
        return None
    if not folder.is_dir():
        return "it is a file"
    if not os.listdir(folder):
        return None
    marker = read_marker(folder)
    if marker is None:
        return "it is not empty and no export of a run made it"
    if identity is None or marker.id != identity.id:
        return f"it holds the export of another run, {marker.run}"
    return None


def _existing(template: str) -> list[tuple[int, Path]]:
    """Return the steps for which something has the name of a template, with its path."""
    pattern = "*".join(escape(part) for part in _STEP.split(template))
    words = r"(\d+)".join(re.escape(part) for part in _STEP.split(template))
    paths = []
    for path in glob(pattern, include_hidden=True):
        matched = re.fullmatch(words, path)
        if matched is not None and folder_of(template, int(matched[1])) == Path(path):
            paths.append((int(matched[1]), Path(path)))
    return paths


def mark(folder: Path, marker: Marker) -> None:
    """Write the marker, with the names in the folder, into a complete folder. Raises OSError."""
    content = asdict(marker) | {"files": sorted(os.listdir(folder))}
    path = folder / MARKER
    path.write_text(json.dumps(content, indent=1) + "\n")
    sync(path)


def read_marker(folder: Path) -> Marker | None:
    """Return the marker of a folder; None if it has none, or a damaged one. Raises OSError."""
    try:
        content = json.loads(read_regular(folder / MARKER).decode())
        return Marker(
            str(content["id"]),
            Path(content["run"]).name,  # older markers have the path of the run's folder
            content.get("step"),
            content.get("attempt"),
            dict(content.get("source", {})),
            tuple(content.get("files", ())),
        )
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None


def is_complete(folder: Path) -> bool:
    """Whether a folder has a marker and all files that the marker names. Raises OSError."""
    marker = read_marker(folder)
    return marker is not None and {*marker.files} <= {*os.listdir(folder)}


def name_weights(folder: str | Path) -> str:
    """Return who made the weights of a folder, ``LABEL step N``; the path if no marker says so.

    Raises OSError.
    """
    marker = read_marker(Path(folder))
    if marker is None or marker.step is None:
        return str(folder)
    return f"{marker.run} step {marker.step}"
