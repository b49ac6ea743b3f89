"""Test the run folder's file system at the start: on each host, and on all together.

Input: a folder of the attempt; the head's order over the rendezvous connection. Output: the missing
features, in words, and one ``Check`` per host. Checkpoints require a rename that replaces a file.
The run can do without the other features, and the table names the consequences.

    separately   hard links, rename over a file, fsync of a folder, locks
    together     the head writes a file and sends an order; every node waits until it sees the
                 file, appends lines to a common file at the same time, writes a file and answers;
                 the head waits until it sees that file

Every wait is bounded by ANSWER_S, also for a folder that hangs.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bootstrap.check_result import Check, Level
from bootstrap.links.link import Link, LinkLost
from common.files import REFUSES_FOLDERS, is_there

ORDER, ANSWER = "try folder", "folder tried"
LOOK_S, ANSWER_S, POLL_S = 3.0, 5.0, 0.02
SLOW_S = 1.0
"""Seconds until another host sees a file; stop requests and the end of an attempt depend on it."""
NUM_LINES, MAX_WRITERS = 8, 8
RENAME = "rename over a file"
_HEAD, _LINES, _DONE = "head", "lines", ".done"
_REFUSED = REFUSES_FOLDERS | {errno.ENOSYS, errno.EPERM, errno.ENOLCK}  # links and locks
_COSTS = {
    RENAME: "no checkpoint can be committed: use another file system for the run folder",
    "hard links": "files that must not replace another are made in another way",
    "fsync of folders": "a crash of the file server may take back what was committed last",
    "locks": "lines of the ledger are only read back after writing",
}


def lacks(folder: Path) -> tuple[str, ...]:
    """Features that ``folder`` lacks, with errors. Raises OSError if not writable."""
    token = secrets.token_hex(6)
    first, second = folder / f".try-{token}.1", folder / f".try-{token}.2"
    first.write_bytes(b"first")
    try:
        second.write_bytes(b"second")
        tried: dict[str, Callable[[], None]] = {
            "hard links": lambda: os.link(first, folder / f".try-{token}.3"),
            "locks": lambda: _lock(first),
            "fsync of folders": lambda: _sync(folder),
            RENAME: lambda: _rename(first, second),
        }
        refusals = ((what, _refusal(act)) for what, act in tried.items())
        return tuple(f"{what} ({why})" for what, why in refusals if why is not None)
    finally:
        for path in (first, second, folder / f".try-{token}.3"):
            with suppress(OSError):
                path.unlink(missing_ok=True)


def check_alone(found: Collection[str] | None) -> Check:
    """The check for the result of ``lacks``."""
    if found is None:
        return Check("storage", "OK", "not tried")
    if not found:
        return Check("storage", "OK", "hard links, rename over a file, fsync of folders, locks")
    level: Level = "EXCLUDE_NODE" if any(each.startswith(RENAME) for each in found) else "WARN"
    costs = (f"the run folder has no {each}: {_COSTS[each.partition(' (')[0]]}" for each in found)
    return Check("storage", level, "; ".join(costs))


@dataclass(frozen=True, slots=True)
class Tried:
    """Result of one node's test together with the head; None: file not visible, or not tested."""

    head_file_s: float | None = None  # until this node saw the head's file
    own_file_s: float | None = None  # until the head saw this node's
    num_lines: int = 0  # number of appended lines
    num_found: int = 0  # number of those in the file
    error: str | None = None


def check_together(tried: Tried) -> Check:
    """The check for one node's result."""
    if tried.error is not None:
        said = f"the run folder could not be tried with the others: {tried.error}"
        return Check("storage", "WARN", said)
    faults = []
    for seconds, way in (
        (tried.head_file_s, "the head's file here"),
        (tried.own_file_s, "its file by the head"),
    ):
        if seconds is None:
            faults.append(f"{way} is not seen within {LOOK_S:.0f} s")
        elif seconds > SLOW_S:
            faults.append(f"{way} is seen after {seconds:.1f} s")
    if faults:
        faults[-1] += ": mount with a lower actimeo, stop requests pass this way"
    if tried.num_found < tried.num_lines:
        faults.append(
            f"{tried.num_lines - tried.num_found} of {tried.num_lines} lines that it appended beside other hosts are "
            "lost: the ledger writes such lines again"
        )
    if faults:
        return Check("storage", "WARN", "; ".join(faults))
    slowest = max(tried.head_file_s or 0.0, tried.own_file_s or 0.0)
    return Check("storage", "OK", f"files of other hosts are seen after {slowest:.2f} s")


def take_part(attempt_dir: Path, order: Mapping[str, Any], host: str) -> dict[str, object]:
    """Run a node's part; return the answer to ``order``. Blocks: call it in a thread."""
    folder = _meeting(attempt_dir, str(order["token"]))
    try:
        seen_s = _seconds_until_seen(folder / _HEAD)
        _append(folder / _LINES, host, int(order["num_lines"]))
        (folder / f"{host}{_DONE}").write_bytes(b"")
    except OSError as error:
        return {"kind": ANSWER, "error": str(error)}
    return {"kind": ANSWER, "head_file_s": seen_s}


class FolderTest:
    """The head's part of the test."""

    def __init__(self) -> None:
        self._answers: dict[str, asyncio.Future[tuple[Mapping[str, Any], float]]] = {}

    def record_answer(self, host: str, message: Mapping[str, object]) -> None:
        """Record a node's answer."""
        answer = self._answers.get(host)
        if answer is not None and not answer.done():
            answer.set_result((message, time.monotonic()))

    async def run(
        self, attempt_dir: Path, links: Mapping[str, Link], own_host: str
    ) -> dict[str, Check]:
        """Test the folder with the nodes of ``links``; return one check per node."""
        token = secrets.token_hex(6)
        folder = _meeting(attempt_dir, token)
        loop = asyncio.get_running_loop()
        self._answers = {host: loop.create_future() for host in links}
        try:
            async with asyncio.timeout(ANSWER_S):
                await asyncio.to_thread(_open_meeting, folder)
        except OSError as error:  # TimeoutError is one
            why = str(error) or f"the head could not write there within {ANSWER_S:.0f} s"
            return {host: check_together(Tried(error=why)) for host in links}
        num_lines = {
            host: NUM_LINES if number < MAX_WRITERS - 1 else 0 for number, host in enumerate(links)
        }
        for host, link in links.items():
            try:
                await link.send({"kind": ORDER, "token": token, "num_lines": num_lines[host]})
            except LinkLost as error:
                self.record_answer(host, {"error": str(error)})
        appending = asyncio.create_task(
            asyncio.to_thread(_append_quietly, folder / _LINES, own_host)
        )
        awaited: list[asyncio.Future[Any]] = [appending, *self._answers.values()]
        await asyncio.wait(awaited, timeout=ANSWER_S)
        answers = {host: answer.result() for host, answer in self._answers.items() if answer.done()}
        answered_at = {host: at for host, (_, at) in answers.items()}
        try:
            async with asyncio.timeout(LOOK_S + ANSWER_S):
                seen, lines = await asyncio.to_thread(_close_meeting, folder, answered_at)
        except TimeoutError:
            seen, lines = {}, Counter[str]()
        late: Mapping[str, Any] = {"error": f"no answer within {ANSWER_S:.0f} s"}
        checks = {}
        for host in links:
            message = answers[host][0] if host in answers else late
            tried = Tried(
                message.get("head_file_s"),
                seen.get(host),
                num_lines[host],
                lines[host],
                message.get("error"),
            )
            checks[host] = check_together(tried)
        return checks


def _meeting(attempt_dir: Path, token: str) -> Path:
    return attempt_dir / f"try-{token}"


def _open_meeting(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / _HEAD).write_bytes(b"")


def _close_meeting(
    folder: Path, answered_at: Mapping[str, float]
) -> tuple[dict[str, float], Counter[str]]:
    """Seconds until each node's file is visible here, and each host's lines. Removes the folder."""
    seen: dict[str, float] = {}
    deadline = time.monotonic() + LOOK_S
    while len(seen) < len(answered_at) and time.monotonic() < deadline:
        for host in answered_at.keys() - seen.keys():
            if is_there(folder / f"{host}{_DONE}"):
                seen[host] = time.monotonic() - answered_at[host]
        if len(seen) < len(answered_at):
            time.sleep(POLL_S)
    try:
        text = (folder / _LINES).read_text(errors="replace")
    except OSError:
        text = ""
    shutil.rmtree(folder, ignore_errors=True)
    return seen, Counter(line.partition(" ")[0] for line in set(text.splitlines()))


def _append_quietly(path: Path, host: str) -> None:
    with suppress(OSError):
        _append(path, host, NUM_LINES)


def _append(path: Path, host: str, num_lines: int) -> None:
    for number in range(num_lines):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, f"{host} {number}\n".encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _seconds_until_seen(path: Path) -> float | None:
    started = time.monotonic()
    while not is_there(path):
        if time.monotonic() - started > LOOK_S:
            return None
        time.sleep(POLL_S)
    return time.monotonic() - started


def _refusal(act: Callable[[], None]) -> str | None:
    try:
        act()
    except OSError as error:
        if error.errno in _REFUSED:
            return error.strerror or str(error)
        raise
    return None


def _lock(path: Path) -> None:
    with path.open("rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rename(source: Path, target: Path) -> None:
    os.replace(source, target)
    if target.read_bytes() != b"first":
        raise OSError(errno.EPERM, "the file was not replaced")
