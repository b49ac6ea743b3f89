"""One fetcher of a folder at a time, on one node and across nodes.

In: a folder on the shared file system, a name. Out: a ``Lease``, or an AssetError that names who holds it. Two locks:
``flock``, which the kernel gives back when a process dies but which some file systems keep to one node or do not have;
and a file made by ``link`` (atomic also on NFS) that names its owner, who shows that he lives by its time. It is stale
when its owner was on this node and has no ``flock`` any more, or when nothing of it has changed for ``STALE_S`` by the
waiter's own clock (clocks of different nodes are never compared).

What remains when even that goes wrong (an owner frozen for minutes who wakes): he sees at his next beat that the file
is not his any more and stops, and every file is checked after its download in any case.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from rlpost.errors import AssetError

BEAT_S = 15.0
STALE_S = 180.0
POLL_S = 0.5


class Lease:
    """The right to write; lost when somebody else took the lock for stale."""

    def __init__(self, path: Path, content: str) -> None:
        self._path, self._content = path, content
        self._lost = threading.Event()

    def check(self) -> None:
        """Raises AssetError when the lock is not ours any more."""
        if self._lost.is_set() or _text(self._path) != self._content:
            self._lost.set()
            raise AssetError(
                f"{self._path}: taken over by {_text(self._path) or 'nobody'}; this fetch stops, call again"
            )

    def beat(self) -> None:
        """Show that we live."""
        if _text(self._path) == self._content:
            with contextlib.suppress(FileNotFoundError):
                os.utime(self._path)
        else:
            self._lost.set()


@contextlib.contextmanager
def held(
    folder: Path, name: str, *, wait_s: float, tell: Callable[[str], None], beat_s: float = BEAT_S
) -> Iterator[Lease]:
    """Hold ``folder/NAME.lock``. ``tell`` gets a line when somebody has to be waited for.

    Raises:
        AssetError: still held by somebody else after ``wait_s``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, deadline = folder / f"{name}.lock", time.monotonic() + wait_s
    with (folder / f"{name}.flock").open("a") as flocked:
        has_flock = _flock(flocked.fileno(), path, deadline, tell)
        content = json.dumps(_me(os.environ))
        _claim(path, content, deadline=deadline, has_flock=has_flock, tell=tell)
        lease, over = Lease(path, content), threading.Event()
        beating = threading.Thread(target=_beat, args=(lease, over, beat_s), daemon=True)
        beating.start()
        try:
            yield lease
        finally:
            over.set()
            beating.join()
            if _text(path) == content:
                path.unlink(missing_ok=True)


def _me(environ: Mapping[str, str]) -> dict[str, str | int]:
    job = {"job": environ["SLURM_JOB_ID"]} if "SLURM_JOB_ID" in environ else {}
    return {"host": socket.gethostname(), "pid": os.getpid(), **job, "mark": secrets.token_hex(8)}


def _beat(lease: Lease, over: threading.Event, beat_s: float) -> None:
    while not over.wait(beat_s):
        lease.beat()


def _flock(descriptor: int, path: Path, deadline: float, tell: Callable[[str], None]) -> bool:
    """Whether the file system knows this lock; waits while somebody has it."""
    told = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            told = _waiting(path, deadline, tell, told)
        except OSError:
            return False


def _claim(path: Path, content: str, *, deadline: float, has_flock: bool, tell: Callable[[str], None]) -> None:
    beside = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    beside.write_text(content)
    seen: tuple[str, int] | None = None
    since, told = time.monotonic(), False
    try:
        while True:
            try:
                os.link(beside, path)
                return
            except FileExistsError:
                pass
            found = _state(path)
            if found is None:
                continue  # given back in this moment
            if found != seen:
                seen, since = found, time.monotonic()
            if (has_flock and _is_here(found[0])) or time.monotonic() - since > STALE_S:
                _take_away(path, found[0])
            else:
                told = _waiting(path, deadline, tell, told)
    finally:
        beside.unlink(missing_ok=True)


def _take_away(path: Path, stale: str) -> None:
    """Remove a stale lock; one that a second waiter has made meanwhile is put back."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    with contextlib.suppress(FileNotFoundError):
        path.rename(aside)
        if _text(aside) != stale:
            with contextlib.suppress(FileExistsError):
                os.link(aside, path)
        aside.unlink()


def _waiting(path: Path, deadline: float, tell: Callable[[str], None], told: bool) -> bool:
    holder = _text(path)
    if time.monotonic() > deadline:
        raise AssetError(f"{path}: held by {holder or 'somebody'}; waited as long as --wait-s says")
    if not told and holder:
        tell(f"waiting for the fetch of {_named(holder)}, which has {path.name}")
    time.sleep(POLL_S)
    return told or bool(holder)


def _named(holder: str) -> str:
    try:
        owner = json.loads(holder)
        return f"process {owner['pid']} on {owner['host']}" + (f" (job {owner['job']})" if "job" in owner else "")
    except (ValueError, KeyError, TypeError):
        return "somebody"


def _is_here(holder: str) -> bool:
    try:
        return bool(json.loads(holder)["host"] == socket.gethostname())
    except (ValueError, KeyError, TypeError):
        return False


def _state(path: Path) -> tuple[str, int] | None:
    """Content and time, asked of an open file: NFS looks at the server then."""
    try:
        with path.open() as file:
            return file.read(), os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def _text(path: Path) -> str:
    state = _state(path)
    return state[0] if state else ""
