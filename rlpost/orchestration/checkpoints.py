"""The checkpoints of a run: where they are, which one to resume from, and how one is committed.

In: the settings and the run's folder. Out: the newest committed checkpoint with its ``RunState``; commits. The driver
is the one process that commits; the actors only write files into the folder that it opened.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from rlpost.checkpoint.commit import begin, commit, newest_committed, prune
from rlpost.checkpoint.state import RunState
from rlpost.config.groups.checkpoint import CheckpointConfig

logger = logging.getLogger(__name__)

STATE_FILE = "run_state.json"


class Checkpoints:
    """Commits to ``--save``; finds what to resume from there or, when there is none yet, in ``--load``."""

    def __init__(self, settings: CheckpointConfig, own_folder: Path, *, committed: Callable[[int, Path], None]) -> None:
        """``own_folder`` serves where --save is not given; ``committed(step, path)`` is called after each commit."""
        self._save = Path(settings.save) if settings.save else own_folder
        self._load = Path(settings.load) if settings.load else None
        self._keep_last = settings.keep_last
        self._committed = committed

    def newest(self) -> tuple[Path | None, RunState]:
        """The checkpoint to resume from and its state; (None, the first state) when there is none."""
        for folder in (self._save, self._load):
            if folder is None:
                continue
            found = newest_committed(folder)
            for path, why in found.skipped:
                logger.warning("checkpoint %s is skipped: %s", path, why)
            if found.path is not None:
                return found.path, RunState.from_json((found.path / STATE_FILE).read_text())
        return None, RunState(pending={})

    async def commit(self, state: RunState, write: Callable[[Path], Awaitable[Any]]) -> None:
        """Let ``write`` fill a new folder, add ``state``, commit; older ones beyond keep-last go afterwards."""
        started = time.monotonic()
        folder = await asyncio.to_thread(begin, self._save, state.step)
        await write(folder)
        (folder / STATE_FILE).write_text(state.to_json())
        path = await asyncio.to_thread(commit, folder)
        logger.info("checkpoint %s committed in %.2f s", path, time.monotonic() - started)
        self._committed(state.step, path)
        await asyncio.to_thread(prune, self._save, self._keep_last)
