"""Where in a folder Megatron's torch_dist checkpoint lies, by the names of Megatron-LM. Standard library only."""

from __future__ import annotations

from pathlib import Path

TRACKER, RELEASE = "latest_checkpointed_iteration.txt", "release"
"""The file that says which part of a folder is meant, and the part that is no step of training."""


def find_checkpoint(folder: str | Path) -> Path | None:
    """The folder itself when it is a checkpoint, or the part that its tracker file names; None when there is none."""
    folder = Path(folder)
    tracker = folder / TRACKER
    if tracker.is_file():
        word = tracker.read_text().strip()
        folder /= f"iter_{int(word):07d}" if word.isdigit() else word
    return folder if (folder / "metadata.json").is_file() else None
