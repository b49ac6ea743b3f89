"""The checkpoints of a run: their location, the one to resume from, and commits.

Input: the settings and the run's folder. Output: the newest committed checkpoint with its
``RunState``; commits.

Only the driver commits; the actors write files into the folder that the driver has created. A
commit that fails, or that is deferred because the previous one is still being written, is owed: the
loop retries it after a later step. The partial files of a failed save are deleted at once, because
on a full disk they take the space of journal, metrics and logs; retries follow after growing
pauses, because each blocks training for as long as a save takes. Only a newer attempt that claims
the folder ends the run.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rlpost.config.groups.checkpoint import CheckpointConfig
from rlpost.durable.commit import (
    begin,
    commit,
    discard,
    newest_committed,
    prune,
    recoverable,
    step_of,
    was_committed,
)
from rlpost.durable.daemon_threads import in_daemon, within
from rlpost.durable.origin import Origin, find_origin, origin_of, read_origin, record_origin
from rlpost.durable.ownership import Claim, claim
from rlpost.durable.provenance import PROVENANCE_FILE, Provenance, check_provenance
from rlpost.durable.run_files import read_again
from rlpost.durable.state import RunState
from rlpost.errors import CheckpointError, Fenced, RlpostError
from rlpost.observe.spans import SPANS

logger = logging.getLogger(__name__)

STATE_FILE = "run_state.json"
LONGEST_PAUSE_S = 2.0
SHORTEST_RETRY_S, LONGEST_RETRY_S = 2.0, 1800.0
"""Bounds of the pause between a failed save and its retry."""
DISCARD_S = 20.0
Write = Callable[[Path], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class SaveTimes:
    """One commit: seconds that training was blocked, seconds in total, and size in bytes.

    ``journal``: the segment that its state names.
    """

    step: int
    blocking_s: float
    total_s: float
    num_bytes: int
    journal: int = 0


class Retries:
    """Pauses between retries of a save: twice as long as it took, doubled with each failure."""

    def __init__(self) -> None:
        self._num_failed, self._next_at = 0, 0.0

    def back_off(self, seconds: float) -> float:
        """Record that a save failed after ``seconds``; return the seconds until its retry."""
        self._num_failed += 1
        pause_s = max(SHORTEST_RETRY_S, 2.0 * seconds) * 2.0 ** (self._num_failed - 1)
        pause_s = min(pause_s, LONGEST_RETRY_S)
        self._next_at = time.monotonic() + pause_s
        return pause_s

    def reset(self) -> None:
        """Record a commit."""
        self._num_failed, self._next_at = 0, 0.0

    @property
    def is_pause(self) -> bool:
        """Whether the next retry is not due yet."""
        return time.monotonic() < self._next_at


class Checkpoints:
    """Commits to --save; finds the checkpoint to resume from there, or else in --load."""

    def __init__(
        self,
        settings: CheckpointConfig,
        own_folder: Path,
        *,
        committed: Callable[[int, Path], None],
        provenance: Provenance | None = None,
    ) -> None:
        """
        Args:
            own_folder: replaces --save where that is not given.
            committed: called as ``committed(step, path)`` in a thread after each commit; its
                storage errors are logged.
            provenance: written into each checkpoint, and compared when a run is resumed.
        """
        self.save_folder = Path(settings.save) if settings.save else own_folder
        """The folder that this run commits to."""
        self._load = Path(settings.load) if settings.load else None
        self._settings = settings
        self._committed = committed
        self._provenance = provenance
        self._claim: Claim | None = None
        self._background: asyncio.Task[None] | None = None
        self._started = 0.0  # when the newest checkpoint began to be written
        self._owed: int | None = None  # the newest step whose commit was due and is missing
        self._partial: Path | None = None  # the folder of the save in progress
        self._newest: Path | None = None  # the newest checkpoint committed by this attempt
        self._resumed: Path | None = None  # the one that this attempt started from
        self.origin: Origin | None = None  # of --load
        self.changed: Sequence[str] = ()
        """Changed settings that decide results, one a line."""
        self._finishing: asyncio.Future[object] | None = None  # the ranks' part of it
        self._retries = Retries()
        self.last: SaveTimes | None = None

    @property
    def is_owed(self) -> bool:
        """Whether a commit failed or was deferred, and none has succeeded since."""
        return self._owed is not None

    @property
    def is_paused(self) -> bool:
        """Whether the last save failed, and its retry is not due yet."""
        return self._retries.is_pause

    def put_off(self, step: int) -> None:
        """Record that the commit of ``step`` is due, and retry it after the next pause."""
        logger.error("saving step %d is put off: the disk of %s is full", step, self.save_folder)
        self._owed = step
        self._retries.back_off(0.0)

    @property
    def has_committed(self) -> bool:
        """Whether this attempt has committed a checkpoint."""
        return self._newest is not None

    def claim(self, attempt: str, check_newest: Callable[[], None] = lambda: None) -> None:
        """Take the folder over from earlier attempts, before ``newest``.

        ``check_newest``: see ``ownership.claim``. Raises CheckpointError, Fenced.
        """
        try:
            self._claim = claim(self.save_folder, attempt, check_newest=check_newest)
        except OSError as error:
            raise CheckpointError(
                f"--save {self.save_folder}: no checkpoint can be written there: {error}; repair it "
                "or choose another folder"
            ) from error

    def check_owner(self) -> None:
        """Raise Fenced when another attempt has claimed the folder since."""
        if self._claim is not None:
            self._claim.check()

    def oldest_kept(self) -> int | None:
        """Return the step of the oldest complete checkpoint among the --keep-last newest.

        None when none is complete; those of --keep-every do not count. Checkpoints newer than the
        last commit of this attempt are verified by checksum, which may be slow.
        """
        kept = recoverable(self.save_folder, self._settings.keep_last, committed=self._newest)
        return step_of(kept[-1]) if kept else None

    def newest(self) -> tuple[Path | None, RunState]:
        """Return the checkpoint to resume from and its state; (None, initial state) without one.

        Skipped checkpoints are logged with the reason. Raises CheckpointError when all committed
        checkpoints are damaged, since a fresh start would lose the run; ConfigError when the
        checkpoint has another model.
        """
        self.origin = read_origin(self.save_folder)
        for folder in (self.save_folder, self._load):
            if folder is None:
                continue
            states: dict[Path, RunState] = {}
            unusable = partial(_unreadable, states=states)
            if folder == self._load and self.origin is not None:
                is_found, path = find_origin(self.save_folder, self.origin, folder, unusable)
                if is_found:
                    self._resume(path)
                    return path, states[path] if path else RunState(pending={})
            search = newest_committed(folder, also=unusable)
            for path, why in search.skipped:
                logger.warning("checkpoint %s is skipped: %s", path, why)
            if search.path is not None:
                self._resume(search.path)
                self._record_origin(folder, search.path)
                return search.path, states[search.path]
            lost = [f"{path.name}: {why}" for path, why in search.skipped if was_committed(path)]
            if lost:
                raise CheckpointError(
                    f"{folder} has no checkpoint to resume from, though some were committed ({'; '.join(lost)}). "
                    "Repair the storage or restore one of them; to start from scratch, choose another --save"
                )
        if self._load is not None:
            logger.warning("--load %s holds no checkpoint; starting from --ref-load", self._load)
            self._record_origin(self._load, None)
        return None, RunState(pending={})

    def _resume(self, path: Path | None) -> None:
        """Start from a checkpoint. Raises ConfigError."""
        self._resumed = path
        if path is not None and self._provenance is not None:
            self.changed = check_provenance(path, self._provenance)

    def _record_origin(self, folder: Path, checkpoint: Path | None) -> None:
        """Record the checkpoint of --load that the run starts from."""
        if folder == self._load != self.save_folder and self._claim is not None:
            self.origin = origin_of(folder, checkpoint)
            record_origin(self.save_folder, self.origin, lane=self._claim.lane)

    def of_attempt(self) -> tuple[Path | None, RunState]:
        """Return the newest checkpoint that this attempt committed or, without one, started from.

        With its state; (None, initial state) for the initial weights. It is not verified again.
        Raises CheckpointError, OSError when its state cannot be read.
        """
        path = self._newest or self._resumed
        if path is None:
            return None, RunState(pending={})
        return path, RunState.from_json((path / STATE_FILE).read_text())

    def journal_segment(self, checkpoint: Path | None, state: RunState) -> int:
        """Return the journal segment that continues ``state``, which ``checkpoint`` holds.

        0 for a checkpoint of --load: the journal of this run holds no records after it.
        """
        is_own = checkpoint is None or checkpoint.parent == self.save_folder
        return state.journal if is_own else 0

    async def abandon(self, why: str) -> None:
        """End a background save whose ranks no longer write; its commit is then owed.

        A save whose files are complete is committed first. Returns within --save-deadline-s.
        Raises Fenced.
        """
        finishing = self._finishing
        if self._is_writing() and finishing is not None and not finishing.done():
            logger.warning("the save in progress is abandoned: %s", why)
            finishing.cancel()
        await self.wait_committed()

    async def commit(self, state: RunState, write: Write) -> bool:
        """Fill a new folder with ``write``, add ``state``, commit, prune; return True.

        Raises CheckpointError or OSError when writing fails or exceeds --save-deadline-s.
        """
        started = time.monotonic()
        await self.wait_committed()
        self._owed = state.step
        if self._is_writing():
            seconds = self._settings.save_deadline_s
            raise CheckpointError(
                f"the checkpoint before step {state.step} is still being written after {seconds:.0f} s "
                f"(--save-deadline-s): the storage under {self.save_folder} hangs"
            )
        try:
            async with self._deadline(state):
                folder = await self._fill_folder(state, write)
                await self._commit(state, folder, started, blocking_s=None)
        except (RlpostError, OSError) as error:
            await self._clean_up(error, started)
            raise
        await self._report_and_prune(state.step)
        return True

    async def start(
        self, state: RunState, write: Write, finish: Callable[[], Awaitable[object]]
    ) -> bool:
        """Like ``commit``, but return once ``write`` has started; ``finish`` waits for the files.

        While the previous checkpoint is still being written, this one is deferred with a warning
        and False is returned. A failure is logged and reported by ``is_owed`` and ``wait_committed``.
        Raises as ``commit`` does, and Fenced.
        """
        self._raise_if_fenced()
        self._owed = state.step
        if self._is_writing():
            logger.warning(
                "checkpoint of step %d is deferred: the previous one has been in progress in %s for %.0f s",
                *(state.step, self.save_folder, time.monotonic() - self._started),
            )
            return False
        self._started = time.monotonic()
        try:
            async with self._deadline(state):
                folder = await self._fill_folder(state, write)
        except (RlpostError, OSError) as error:
            await self._clean_up(error, self._started)
            raise
        blocking_s = time.monotonic() - self._started
        logger.info(
            "checkpoint of step %d started in %.2f s; training continues", state.step, blocking_s
        )
        self._background = asyncio.create_task(self._finish(state, folder, finish, blocking_s))
        return True

    async def wait_committed(self) -> bool:
        """Wait up to --save-deadline-s for a background commit; return False when a commit is owed.

        Raises Fenced.
        """
        if self._background is not None:
            # Unlike wait_for, this does not cancel a commit that takes longer.
            await asyncio.wait([self._background], timeout=self._settings.save_deadline_s)
            self._raise_if_fenced()
        return not self.is_owed

    def _is_writing(self) -> bool:
        return self._background is not None and not self._background.done()

    def _raise_if_fenced(self) -> None:
        if self._background is not None and self._background.done():
            background, self._background = self._background, None
            background.result()

    def _deadline(self, state: RunState) -> AbstractAsyncContextManager[None]:
        """Limit the part of a save that blocks training to --save-deadline-s."""
        deadline_s = self._settings.save_deadline_s
        return within(
            deadline_s,
            f"checkpoint of step {state.step} was not written to {self.save_folder} within "
            f"{deadline_s:.0f} s (--save-deadline-s)",
        )

    async def _fill_folder(self, state: RunState, write: Write) -> Path:
        """Create a folder, fill it with ``write`` and return it."""
        await in_daemon(self.check_owner)
        lane = None if self._claim is None else self._claim.lane
        try:
            folder = await in_daemon(partial(begin, self.save_folder, state.step, lane=lane))
            self._partial = folder
            await write(folder)
        except (RlpostError, OSError):
            await in_daemon(self.check_owner)
            raise
        return folder

    async def _clean_up(self, error: Exception, started: float) -> None:
        """Delete the files of a save that failed with ``error``, and set the time of its retry.

        It waits for hung storage no longer than DISCARD_S. After --save-deadline-s threads and ranks
        may still write, and even commit: the next save deletes what they leave.
        """
        folder, self._partial = self._partial, None
        if isinstance(error, Fenced):
            return
        seconds = time.monotonic() - started
        pause_s = self._retries.back_off(seconds)
        logger.info("the save is retried after the first step that ends in %.0f s or more", pause_s)
        if folder is None or seconds >= self._settings.save_deadline_s:
            return
        try:
            async with asyncio.timeout(DISCARD_S):
                await in_daemon(partial(discard, folder))
        except (OSError, TimeoutError) as problem:
            logger.warning(
                "the files of the failed save in %s are not deleted yet: %s",
                *(folder, problem or f"the storage has not answered within {DISCARD_S:.0f} s"),
            )

    async def _finish(
        self,
        state: RunState,
        folder: Path,
        finish: Callable[[], Awaitable[object]],
        blocking_s: float,
    ) -> None:
        try:
            await self._files_written(finish)
            await self._commit(state, folder, self._started, blocking_s)
        except Fenced:
            raise
        except (RlpostError, OSError) as error:
            await in_daemon(self.check_owner)
            await self._clean_up(error, self._started)
            logger.error(
                "committing step %d failed, the previous checkpoint is kept: %s", state.step, error
            )
            return
        await self._report_and_prune(state.step)

    async def _files_written(self, finish: Callable[[], Awaitable[object]]) -> None:
        """Await ``finish``. Raises CheckpointError after ``abandon``."""
        self._finishing = finishing = asyncio.ensure_future(finish())
        try:
            # Not awaited directly: ``abandon`` cancels ``finishing``, but not this task.
            await asyncio.wait([finishing])
            if finishing.cancelled():
                raise CheckpointError("its ranks were started again before all files were written")
            finishing.result()
        finally:
            finishing.cancel()

    async def _commit(
        self, state: RunState, folder: Path, started: float, blocking_s: float | None
    ) -> None:
        try:
            num_bytes = await in_daemon(partial(self._write_beside, state, folder))
            path = await in_daemon(partial(commit, folder, check=self.check_owner))
        except (CheckpointError, OSError):
            await in_daemon(self.check_owner)  # a newer attempt may have claimed the folder
            raise
        self._newest, self._partial = path, None
        self._retries.reset()
        total_s = time.monotonic() - started
        SPANS.add("checkpoint", SPANS.now() - total_s)
        blocking_s = total_s if blocking_s is None else blocking_s
        self.last = SaveTimes(state.step, blocking_s, total_s, num_bytes, state.journal)
        logger.info("checkpoint %s committed in %.2f s", path, total_s)
        if self._owed is not None and self._owed <= state.step:
            self._owed = None

    def _write_beside(self, state: RunState, folder: Path) -> int:
        """Add the driver's files; return the size of the checkpoint in bytes."""
        with (folder / STATE_FILE).open("w") as file:
            file.writelines(state.json_pieces())
        if self._provenance is not None:
            (folder / PROVENANCE_FILE).write_text(self._provenance.to_json())
        return folder_bytes(folder)

    async def _report_and_prune(self, step: int) -> None:
        """Report a commit and prune old ones; neither a failure nor a delay undoes the commit."""
        try:
            async with asyncio.timeout(self._settings.save_deadline_s):
                await in_daemon(partial(self._report_commit, step))
                await in_daemon(self._prune)
        except TimeoutError:
            logger.warning(
                "old checkpoints in %s are still being deleted; training continues",
                self.save_folder,
            )

    def _report_commit(self, step: int) -> None:
        assert self._newest is not None
        try:
            self._committed(step, self._newest)
        except (CheckpointError, OSError) as error:
            logger.error(
                "checkpoint %s is committed, but the commit could not be recorded: %s",
                self._newest,
                error,
            )

    def _prune(self) -> None:
        settings, lane = self._settings, None if self._claim is None else self._claim.lane
        try:
            self.check_owner()
            prune(
                self.save_folder,
                settings.keep_last,
                keep_every=settings.keep_every,
                lane=lane,
                committed=self._newest,
            )
        except (CheckpointError, OSError) as error:
            logger.warning(
                "old checkpoints in %s could not be deleted: %s", self.save_folder, error
            )


async def wait_until_written(ask: Callable[[], Awaitable[list[bool]]]) -> None:
    """Return when every rank reports that its files are written.

    The ranks are polled, with increasing pauses: a blocking call would hold the one thread of each
    actor.
    """
    pause_s = 0.05
    while not all(await ask()):
        await asyncio.sleep(pause_s)
        pause_s = min(1.3 * pause_s, LONGEST_PAUSE_S)


def folder_bytes(folder: Path) -> int:
    """Return the size of all files in ``folder``, recursively, in bytes."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _unreadable(path: Path, states: dict[Path, RunState]) -> str | None:
    """Return why a checkpoint's state is unusable; None once it is in ``states``."""
    try:
        states[path] = RunState.from_json(read_again((path / STATE_FILE).read_text))
        return None
    except (CheckpointError, OSError, UnicodeDecodeError) as error:
        return f"{STATE_FILE}: {error}"
