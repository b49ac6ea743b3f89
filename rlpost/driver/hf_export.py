"""Atomic export of the weights as a Hugging Face folder beside a checkpoint (--save-hf).

Input: the settings, the run's folder, the step, a function that writes the weights into a folder.
Output: the folder. A failure is logged and never ends a run: checkpoints do not depend on it.

    .NAME.writing-ID-X    the export in progress; ID is that of the run, X of the export
    .NAME.old-ID-X        the previous export during the rename; renamed back after a crash
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from common.files import sync
from common.modes import follow_umask, make_folders
from common.run_identity import RunIdentity, settle_identity
from rlpost.config.checks.export_folder import (
    MARKER,
    Marker,
    folder_of,
    is_complete,
    kept_folders,
    mark,
    refusal,
)
from rlpost.config.groups.checkpoint import CheckpointConfig
from rlpost.durable.daemon_threads import in_daemon
from rlpost.errors import CheckpointError, Fenced, WeightError

logger = logging.getLogger(__name__)

T = TypeVar("T")
WRITING, OLD = ".writing-", ".old-"


class HuggingFaceExport:
    """Exports of one run."""

    def __init__(
        self,
        settings: CheckpointConfig,
        run: Path,
        *,
        attempt: str = "",
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            run: the run's folder; it must exist at the first export.
            attempt: recorded in the folders, so that those of replaced steps are recognised.
            check: raises Fenced when another attempt owns the run; its exports have the same names.
        """
        self._check = check
        self._deadline_s = settings.save_deadline_s
        self._template = settings.save_hf
        self._run, self._attempt = run, attempt
        self._kept = kept_folders(settings, run)

    async def export(self, step: int, write: Callable[[str], Awaitable[object]]) -> None:
        """Let ``write`` fill a temporary folder, then rename it to the folder of the step.

        An existing folder is replaced if an export of this run created it: a template without a
        step names one folder, and a run may train a step again. Does nothing without --save-hf.
        """
        if self._template is None:
            return
        target = folder_of(self._template, step)
        started = time.monotonic()
        try:
            target = await self._within(target.resolve)
            identity = await self._within(partial(settle_identity, self._run))
            place = _Place(target, identity)
            await self._within(self._check)
            await self._within(place.recover)
            await self._within(partial(place.check, self._kept))
            await self._within(place.create)
            await write(str(place.writing))
            await self._within(self._check)
            marker = Marker(identity.id, identity.label, step, self._attempt)
            await self._within(partial(place.publish, self._kept, marker))
        except Fenced:
            raise
        except TimeoutError:
            logger.error(
                "--save-hf: the weights of step %d are not exported: %s hangs (no answer within %.0f s)",
                *(step, target, self._deadline_s),
            )
            return
        except (CheckpointError, WeightError, OSError) as error:
            logger.error(
                "--save-hf: the weights of step %d are not exported to %s: %s", step, target, error
            )
            return
        logger.info(
            "--save-hf: weights of step %d in %s after %.1f s",
            step,
            target,
            time.monotonic() - started,
        )

    async def _within(self, act: Callable[[], T]) -> T:
        """Run ``act`` in a thread. Raises TimeoutError after --save-deadline-s."""
        async with asyncio.timeout(self._deadline_s):
            return await in_daemon(act)


class _Place:
    """The target folder of an export, and temporary folders with names unique to the run."""

    def __init__(self, target: Path, identity: RunIdentity) -> None:
        self._target, self._identity = target, identity
        self.writing = self._fresh(WRITING)

    def _fresh(self, kind: str) -> Path:
        """Return an unused name beside the target.

        A name is used once: on NFS a folder stays as long as a reader holds one of its files, so a
        rename to a name that was used before may fail.
        """
        unique = f"{self._identity.id}-{secrets.token_hex(4)}"
        return self._target.with_name(f".{self._target.name}{kind}{unique}")

    def recover(self) -> None:
        """Restore a previous export if a crash interrupted its replacement; remove leftovers."""
        parent, identity = self._target.parent, self._identity.id
        for path in parent.glob(f".*{OLD}{identity}*"):
            target = parent / path.name[1:].rpartition(OLD)[0]
            if not target.exists() and is_complete(path):
                os.rename(path, target)
            else:
                _remove(path)
        for path in parent.glob(f".*{WRITING}{identity}*"):
            _remove(path)

    def check(self, kept: dict[str, Path]) -> None:
        """Raise CheckpointError when the existing folder must not be replaced by this run."""
        if problem := refusal(self._target, self._identity, kept):
            raise CheckpointError(problem)

    def create(self) -> None:
        """Create the empty temporary folder."""
        make_folders(self.writing.parent)
        self.writing.mkdir()

    def publish(self, kept: dict[str, Path], marker: Marker) -> None:
        """Sync the folder and rename it to its target.

        At any time, either the previous or the new export exists completely.
        """
        mark(self.writing, marker)
        follow_umask(self.writing)
        for path in [*self.writing.rglob("*"), self.writing]:
            sync(path)
        self.check(kept)  # again: another process may have created the folder during the export
        old = self._fresh(OLD) if self._target.exists() else None
        if old is not None:
            os.rename(self._target, old)
        os.rename(self.writing, self._target)  # fails if the target is not empty: never overwrites
        sync(self._target.parent)
        if old is not None:
            _remove(old)


def _remove(folder: Path) -> None:
    """Remove a folder as far as possible; what a reader holds on NFS stays until the next export.

    Its marker goes first, so that the rest is not taken for a complete export.
    """
    with suppress(OSError):
        (folder / MARKER).unlink()
    shutil.rmtree(folder, ignore_errors=True)
