"""A few answers of each step, for people: ``RUN/report/samples.jsonl``.

Input: the scored groups of a rollout and what turns token ids into text.
Output: for the first group that holds different rewards (or the first of all) its best and its
worst answer, cut to a readable length. The file is a metrics file, so that a resume cuts it like
one; it holds about MAX_LINES steps however long the run is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlpost.metrics.writer import MetricsWriter
from rlpost.types import SampleGroup, ScoredSample

FILE_NAME = "samples.jsonl"
MAX_LINES = 500
MAX_PROMPT, MAX_ANSWER = 1200, 2400  # characters

Decode = Callable[[Sequence[int]], str]


class SampleWriter:
    """Keeps answers of every n-th step."""

    def __init__(
        self, report_folder: Path, *, num_steps: int, decode: Decode, check: Callable[[], None] | None = None
    ) -> None:
        """``num_steps``: of the whole run; ``check`` raises Fenced when the run belongs to another attempt."""
        self._writer = MetricsWriter(report_folder / FILE_NAME, check=check)
        self._interval = max(1, -(-num_steps // MAX_LINES))
        self._decode = decode

    async def begin(self, step: int) -> None:
        """Forget the answers of every step after ``step``. Raises Fenced."""
        await self._writer.begin(step)

    def rewind(self, step: int) -> None:
        """The same at once. Raises OSError and Fenced."""
        self._writer.rewind(step)

    def write(self, step: int, groups: Sequence[SampleGroup]) -> None:
        """Keep some answers of ``step``, if it is one whose answers are kept. Nothing waits for them, and no run ends
        for want of them."""
        if groups and (step - 1) % self._interval == 0:
            self._writer.put_soon(step, {"samples": chosen(groups, self._decode)})

    def close(self) -> None:
        """Wait for what is being written."""
        self._writer.close()


def chosen(groups: Sequence[SampleGroup], decode: Decode) -> list[Mapping[str, Any]]:
    """Best and worst answer of the most telling group, as JSON values; the first of equals."""
    group = next((group for group in groups if len(set(group.rewards)) > 1), groups[0])
    best = max(group.samples, key=lambda scored: scored.reward)
    worst = min(group.samples, key=lambda scored: scored.reward)
    return [_record(scored, decode) for scored in ([best] if best is worst else [best, worst])]


def _record(scored: ScoredSample, decode: Decode) -> Mapping[str, Any]:
    sample = scored.sample
    return {
        "prompt_id": sample.prompt_id,
        "prompt": cut(decode(sample.prompt_ids), MAX_PROMPT),
        "answer": cut(sample.text, MAX_ANSWER),
        "label": None if sample.label is None else cut(sample.label, MAX_PROMPT),
        "reward": scored.reward,
        "num_tokens": len(sample.response_ids),
        "finish": sample.finish_reason,
    }


def cut(text: str, longest: int) -> str:
    """The text, or its beginning and its end with how much is left out between."""
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"
