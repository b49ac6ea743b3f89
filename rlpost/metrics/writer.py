"""``metrics.jsonl``: one line a step, always.

In: numbers under stable names ``area/name[_unit]``. Out: a file in which every step stands exactly once and in order,
also after a crash or a resume: lines beyond the step that a run resumes from are cut off before it writes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlpost.types import SampleGroup


class MetricsWriter:
    """Appends to one file; a line is on disk when ``write`` returns."""

    def __init__(
        self,
        path: Path,
        *,
        always: Mapping[str, float] | None = None,
        also: Callable[[int, Mapping[str, float]], None] | None = None,
        show: Callable[[int, Sequence[SampleGroup]], None] | None = None,
    ) -> None:
        """``always`` stands in every line; ``also`` gets a line once it is on disk; ``show`` the groups of a step."""
        self._path = path
        self._always = dict(always or {})
        self._also = also
        self._show = show

    def rewind(self, step: int) -> None:
        """Forget every line after ``step``, and a torn last line."""
        lines = [line for line in read_metrics(self._path) if line["step"] <= step]
        temporary = self._path.with_suffix(".tmp")
        with temporary.open("w") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # else a crash of the machine may bring the old lines back
        finally:
            os.close(folder)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append the line of ``step``."""
        metrics = {**metrics, **self._always}
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        if self._also is not None:
            self._also(step, metrics)

    def show(self, step: int, groups: Sequence[SampleGroup]) -> None:
        """These groups are about to be trained in ``step``."""
        if self._show is not None:
            self._show(step, groups)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The lines of a metrics file; none when it is missing; a torn last line is left out."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text().splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            break
        if not isinstance(line, dict) or "step" not in line:
            break
        lines.append(line)
    return lines


def eval_rewards(metrics: Mapping[str, float]) -> list[str]:
    """The names ``eval/SET/reward_mean`` that stand in a line."""
    return sorted(name for name in metrics if name.startswith("eval/") and name.endswith("/reward_mean"))
