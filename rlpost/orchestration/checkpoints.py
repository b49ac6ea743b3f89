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
from rlpost.errors import RlpostError

logger = logging.getLogger(__name__)

STATE_FILE = "run_state.json"
Write = Callable[[Path], Awaitable[Any]]


class Checkpoints:
    """Commits to ``--save``; finds what to resume from there or, when there is none yet, in ``--load``."""

    def __init__(self, settings: CheckpointConfig, own_folder: Path, *, committed: Callable[[int, Path], None]) -> None:
        """``own_folder`` serves where --save is not given; ``committed(step, path)`` is called after each commit."""
        self._save = Path(settings.save) if settings.save else own_folder
        self._load = Path(settings.load) if settings.load else None
        self._keep_last = settings.keep_last
        self._committed = committed
        self._background: asyncio.Task[bool] | None = None

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

    async def commit(self, state: RunState, write: Write) -> None:
        """Let ``write`` fill a new folder, add ``state``, commit; older ones beyond keep-last go afterwards.

        Raises CheckpointError or OSError when it cannot be written.
        """
        await self.settle()
        started = time.monotonic()
        folder = await self._begun(state)
        await write(folder)
        await self._commit(state, folder, started)

    async def start(self, state: RunState, write: Write, finish: Callable[[], Awaitable[Any]]) -> None:
        """The same in the background: returns when ``write`` has copied everything; ``finish`` waits for the files.

        A failure there is logged and told by ``settle``. Raises as ``commit`` does.
        """
        await self.settle()
        started = time.monotonic()
        folder = await self._begun(state)
        await write(folder)
        logger.info("checkpoint of step %d copied in %.2f s; training goes on", state.step, time.monotonic() - started)
        self._background = asyncio.create_task(self._finish(state, folder, started, finish))

    async def settle(self) -> bool:
        """Wait for what ``start`` left to do; False when it failed, so that nothing of it is committed."""
        if self._background is None:
            return True
        background, self._background = self._background, None
        return await background

    async def _begun(self, state: RunState) -> Path:
        return await asyncio.to_thread(begin, self._save, state.step)

    async def _finish(
        self, state: RunState, folder: Path, started: float, finish: Callable[[], Awaitable[Any]]
    ) -> bool:
        try:
            await finish()
            await self._commit(state, folder, started)
        except (RlpostError, OSError) as error:
            logger.error("checkpoint of step %d is not committed, the one before stays: %s", state.step, error)
            return False
        return True

    async def _commit(self, state: RunState, folder: Path, started: float) -> None:
        (folder / STATE_FILE).write_text(state.to_json())
        path = await asyncio.to_thread(commit, folder)
        logger.info("checkpoint %s committed in %.2f s", path, time.monotonic() - started)
        self._committed(state.step, path)
        await asyncio.to_thread(prune, self._save, self._keep_last)
