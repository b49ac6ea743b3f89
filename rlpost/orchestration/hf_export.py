"""Atomic export of the weights as a Hugging Face folder beside a checkpoint (--save-hf).

Input: the settings, the run's folder, the step, a function that writes the weights into a folder. Output: the folder. A
failure is logged and never ends a run: checkpoints do not depend on it.

    .NAME.writing-ID    being filled; ID is the run's, so no other run and no user has a folder of this name
    .NAME.old-ID        the export before, while the new one takes its name; renamed back if a crash left it alone
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from common.files import sync
from rlpost.config.groups.checkpoint import CheckpointConfig
from rlpost.daemon_threads import in_daemon
from rlpost.errors import CheckpointError, Fenced, WeightError
from rlpost.export_folder import export_id, folder_of, kept_folders, mark, names_a_step, refusal

logger = logging.getLogger(__name__)

T = TypeVar("T")


class HuggingFaceExport:
    """The exports of one run."""

    def __init__(self, settings: CheckpointConfig, run: Path, *, check: Callable[[], None] = lambda: None) -> None:
        """Args: ``run`` is the run's folder, which must exist when the first export is made; ``check`` raises Fenced
        when the run belongs to another attempt, whose exports have the same names."""
        self._check = check
        self._deadline_s = settings.save_deadline_s
        self._template = settings.save_hf
        self._run = run
        self._kept = kept_folders(settings, run)

    async def export(self, step: int, write: Callable[[str], Awaitable[Any]]) -> None:
        """Let ``write`` fill a folder under another name, which then becomes the step's; one that is there is left
        alone.

        A template that names no step is one folder, which each export replaces when the last one of this run made it.
        Without --save-hf nothing is done.
        """
        if self._template is None:
            return
        target = folder_of(self._template, step).resolve()
        started = time.monotonic()
        try:
            identity = await self._within(partial(export_id, self._run, make=True))
            assert identity is not None
            place = _Place(target, self._run, identity, replaces=not names_a_step(self._template))
            await self._within(self._check)
            await self._within(place.recover)
            if target.exists() and not place.replaces:
                logger.info("--save-hf: %s is there already", target)
                return
            await self._within(partial(place.check, self._kept))
            await self._within(place.empty)
            await write(str(place.writing))
            await self._within(self._check)
            await self._within(partial(place.publish, self._kept))
        except Fenced:
            raise
        except TimeoutError:
            logger.error(
                "--save-hf: the weights of step %d are not exported: %s hangs (no answer within %.0f s)",
                *(step, target, self._deadline_s),
            )
            return
        except (CheckpointError, WeightError, OSError) as error:
            logger.error("--save-hf: the weights of step %d are not exported to %s: %s", step, target, error)
            return
        logger.info("--save-hf: weights of step %d in %s after %.1f s", step, target, time.monotonic() - started)

    async def _within(self, act: Callable[[], T]) -> T:
        """What ``act`` returns, from a thread. Raises TimeoutError after --save-deadline-s."""
        async with asyncio.timeout(self._deadline_s):
            return await in_daemon(act)


class _Place:
    """Where one export goes: the folder, and those beside it that only this run has a name for."""

    def __init__(self, target: Path, run: Path, identity: str, *, replaces: bool) -> None:
        self.replaces = replaces
        self.writing = target.with_name(f".{target.name}.writing-{identity}")
        self._old = target.with_name(f".{target.name}.old-{identity}")
        self._target, self._run, self._identity = target, run, identity

    def recover(self) -> None:
        """After a crash the export before comes back where no new one took its name."""
        if self._old.is_dir() and not self._target.exists():
            os.rename(self._old, self._target)

    def check(self, kept: dict[str, Path]) -> None:
        """Raise CheckpointError when what is there is not this run's to replace."""
        if self.replaces and (problem := refusal(self._target, self._identity, kept)):
            raise CheckpointError(problem)

    def empty(self) -> None:
        """A new folder to write into, without what an interrupted export left."""
        shutil.rmtree(self.writing, ignore_errors=True)
        self.writing.mkdir(parents=True, mode=0o700)

    def publish(self, kept: dict[str, Path]) -> None:
        """Give the folder its name once all of it is on disk. At any instant the export before or the new one is
        there, whole."""
        mark(self.writing, self._run, self._identity)
        for path in [*self.writing.iterdir(), self.writing]:
            sync(path)
        self.check(kept)  # again: another process may have created the folder during the export
        if self.replaces and self._target.exists():
            shutil.rmtree(self._old, ignore_errors=True)  # of a crash just before its removal
            os.rename(self._target, self._old)
        os.rename(self.writing, self._target)  # fails on a folder that is not empty: nothing is ever written over
        sync(self._target.parent)
        shutil.rmtree(self._old, ignore_errors=True)
