"""Write ``metrics.jsonl``: one line per step.

Input: values under stable names ``area/name[_unit]``.
Output: a file in which each step appears exactly once and in order, also after a crash or a resume:
lines after the step that a run resumes from are removed before the first write.

Invariants: each attempt creates a new file at its start and appends only to that file, through a
descriptor. What an older attempt appends therefore goes to an unlinked file. A new file of the
older attempt cannot take the name either, because the newer attempt deletes it under its temporary
name. Only damaged lines are dropped.
"""

from __future__ import annotations

import bisect
import itertools
import json
import logging
import math
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.files import read_regular, sync, write_all
from rlpost.durable.run_files import RunFile

if TYPE_CHECKING:  # ``rlpost list`` reads metrics without numpy
    from rlpost.types import SampleGroup

logger = logging.getLogger(__name__)

LONGEST_SHOWN = 60
MAX_BYTES = 1 << 30
"""Of a metrics file; one of 250,000 steps has this size."""
LOST = "their steps are missing from it"


class MetricsWriter:
    """Appends to one file; a line is on disk when ``write`` returns."""

    def __init__(
        self,
        path: Path,
        *,
        always: Mapping[str, float] | None = None,
        also: Callable[[int, Mapping[str, float]], None] | None = None,
        show: Callable[[int, Sequence[SampleGroup]], None] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Create a writer; call ``begin`` before the first ``put``.

        Args:
            always: values added to every line, read when it is written.
            also: called with each line, after it is written.
            show: called with the groups of each step.
            check: raises Fenced when another attempt owns the run.
        """
        self._path = path
        self._always = {} if always is None else always
        self._also = also
        self._show = show
        self._check = check
        self._file = RunFile(path, lost=LOST, check=check)
        self._descriptor: int | None = None
        self._good_bytes = 0
        self._is_torn = False

    async def begin(self, step: int) -> None:
        """Run ``rewind`` in a thread with a deadline, before any later ``put``. Raises Fenced."""
        await self._file.do(partial(self.rewind, step))

    async def put(self, step: int, metrics: Mapping[str, object]) -> None:
        """Append the line of ``step`` in a thread with a deadline. Raises Fenced.

        A failed write is retried with the next line and never ends the run.
        """
        metrics = {**metrics, **self._always}
        await self._file.do(partial(self._append, step, metrics))
        self._mirror(step, metrics)

    def put_soon(self, step: int, metrics: Mapping[str, object]) -> None:
        """Like ``put``, but return immediately."""
        metrics = {**metrics, **self._always}
        self._file.soon(partial(self._append, step, metrics))
        self._mirror(step, metrics)

    async def amend(self, step: int, metrics: Mapping[str, object]) -> bool:
        """Add metrics to the line of ``step``, which may be an earlier one; return whether it is done.

        The file is replaced by one with the changed line, or with a new line for a step that has
        none. False if the write failed, or later lines are not written yet. Raises Fenced.
        """
        changed: list[bool] = []
        is_written = await self._file.do(lambda: changed.append(self._amend(step, metrics)))
        if not is_written or not (changed and changed[-1]):
            return False
        self._mirror(step, metrics)
        return True

    def close(self) -> None:
        """Retry failed writes once, and close the file unless a write still hangs."""
        if self._file.close() and self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def rewind(self, step: int) -> None:
        """Remove all lines after ``step`` and all damaged lines. Raises OSError and Fenced."""
        self._make(through=step)

    def write(self, step: int, metrics: Mapping[str, object]) -> None:
        """Append the line of ``step``. Raises OSError and Fenced."""
        self._check()
        metrics = {**metrics, **self._always}
        self._append(step, metrics)
        self._mirror(step, metrics)

    def show(self, step: int, groups: Sequence[SampleGroup]) -> None:
        """Pass the groups that ``step`` is about to train to the ``show`` callback."""
        if self._show is not None:
            self._show(step, groups)

    def _mirror(self, step: int, metrics: Mapping[str, object]) -> None:
        if self._also is not None:
            self._also(step, with_nan(metrics))

    def _amend(self, step: int, metrics: Mapping[str, object]) -> bool:
        """Replace the file by one with a changed line; False if its line may still be appended."""
        last = max((line["step"] for line in read_lines(self._path).lines), default=-1)
        if last < step and step > 0:
            return False
        self._make(through=None, more={"step": step, **metrics})
        return True

    def _make(self, *, through: int | None, more: Mapping[str, object] | None = None) -> None:
        """Replace the file by a new one with the lines through a step; None keeps all lines.

        ``more``: values to add to the line of their step.
        """
        self._check()
        folder, name = self._path.parent, self._path.name
        # Left by a crash, or written by an older attempt, whose rename then fails.
        for leftover in folder.glob(f".{name}.*.new"):
            leftover.unlink(missing_ok=True)
        contents = read_lines(self._path)
        for problem in contents.problems:
            logger.warning("%s: %s; it is left out", self._path, problem)
        kept = [line for line in contents.lines if through is None or line["step"] <= through]
        if more is not None:
            kept = _with_values(kept, more)
        data = "".join(json.dumps(line) + "\n" for line in kept).encode()
        beside = folder / f".{name}.{secrets.token_hex(4)}.new"
        descriptor = os.open(
            beside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o666
        )
        try:
            write_all(descriptor, data)
            os.fsync(descriptor)
            self._check()
            os.rename(beside, self._path)
            sync(folder)  # otherwise a crash of the host may restore the old file
        except BaseException:
            # After a successful rename the next append finds another file here and makes a new one.
            os.close(descriptor)
            beside.unlink(missing_ok=True)
            raise
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor, self._good_bytes, self._is_torn = descriptor, len(data), False

    def _append(self, step: int, metrics: Mapping[str, object]) -> None:
        if self._descriptor is None or not self._is_in_place(self._descriptor):
            self._make(through=None)
        assert self._descriptor is not None
        if self._is_torn:
            os.ftruncate(self._descriptor, self._good_bytes)
        # If the write fails half way, the next call truncates what it left.
        self._is_torn = True
        write_all(self._descriptor, (json.dumps({"step": step, **metrics}) + "\n").encode())
        os.fsync(self._descriptor)
        self._is_torn = False
        self._good_bytes = os.fstat(self._descriptor).st_size

    def _is_in_place(self, descriptor: int) -> bool:
        """Return whether the path still names our file; a user may have removed or replaced it."""
        ours = os.fstat(descriptor)
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            return False
        return (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino)


@dataclass(frozen=True, slots=True)
class Lines:
    """The lines of a metrics file in order of their steps, and messages about dropped lines."""

    lines: tuple[dict[str, Any], ...] = ()
    problems: tuple[str, ...] = ()


def read_lines(path: Path) -> Lines:
    """Read a metrics file; empty if it is missing. Raises OSError when it cannot be read.

    Damaged lines and lines out of order are dropped and reported in ``problems``.
    """
    try:
        data = read_regular(path, MAX_BYTES)
    except FileNotFoundError:
        return Lines()
    texts = data.split(b"\n")
    if not texts[-1]:  # otherwise the last line has no line break: torn, or edited by a user
        texts.pop()
    lines: list[dict[str, Any]] = []
    problems: list[str] = []
    numbers: list[int] = []
    for number, text in enumerate(texts, start=1):
        line = _line(text)
        if line is None:
            problems.append(f"line {number} is damaged or half written: {text[:LONGEST_SHOWN]!r}")
        else:
            lines.append(line)
            numbers.append(number)
    in_order = _longest_ascent([line["step"] for line in lines])
    for index in sorted(set(range(len(lines))) - set(in_order)):
        problems.append(f"line {numbers[index]}, of step {lines[index]['step']}, is out of order")
    return Lines(tuple(lines[index] for index in in_order), tuple(problems))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the valid lines of a metrics file, each step once, in order; empty if missing.

    A value of null is NaN, which strict JSON cannot express.
    """
    return [with_nan(line) for line in read_lines(path).lines]


def with_nan(line: Mapping[str, object]) -> dict[str, Any]:
    """Return a line with NaN in place of None.

    >>> with_nan({"step": 1, "x": None})
    {'step': 1, 'x': nan}
    """
    return {name: math.nan if value is None else value for name, value in line.items()}


def eval_rewards(*lines: Mapping[str, float]) -> list[str]:
    """Return the names ``eval/SET/reward_mean`` of all lines, each once, sorted."""
    names: set[str] = set().union(*lines)
    return sorted(
        name for name in names if name.startswith("eval/") and name.endswith("/reward_mean")
    )


def _with_values(
    lines: Sequence[dict[str, Any]], more: Mapping[str, object]
) -> list[dict[str, Any]]:
    """Return lines in order of their steps, with ``more`` in the line of its step."""
    step = more["step"]
    own = next((line for line in lines if line["step"] == step), {})
    others = [line for line in lines if line["step"] != step]
    return sorted([*others, {**own, **more}], key=lambda line: line["step"])


def _line(text: bytes) -> dict[str, object] | None:
    try:
        line = json.loads(text.decode())
    except (ValueError, RecursionError):
        return None
    is_line = isinstance(line, dict) and type(line.get("step")) is int
    return line if is_line else None


def _longest_ascent(steps: Sequence[int]) -> list[int]:
    """Return the indices of the longest strictly increasing subsequence (patience sorting).

    It excludes lines with a damaged step number and lines that were appended twice.
    """
    if all(before < after for before, after in itertools.pairwise(steps)):
        return list(range(len(steps)))
    tops: list[int] = []  # for each length, the smallest last step of a subsequence
    at: list[int] = []  # the index of that step
    before: list[int | None] = []
    for index, step in enumerate(steps):
        length = bisect.bisect_left(tops, step)
        before.append(at[length - 1] if length else None)
        if length == len(tops):
            tops.append(step)
            at.append(index)
        elif step < tops[length]:
            tops[length], at[length] = step, index
    indices: list[int] = []
    index_or_none = at[-1] if at else None
    while index_or_none is not None:
        indices.append(index_or_none)
        index_or_none = before[index_or_none]
    return indices[::-1]
