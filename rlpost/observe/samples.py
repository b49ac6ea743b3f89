"""Record sample answers of selected steps for inspection.

The files are ``samples.jsonl`` and ``eval_samples.jsonl`` in ``RUN/report``.

Input: the scored groups of a rollout, or of an evaluation, and a decoder of token ids.
Output: the best and the worst answer of the first group with different rewards (otherwise of the
first group); of an evaluation one answer to each of the first prompts of each set, which are the
same each time. Both are truncated to a readable length. The files have the format of a metrics
file, so a resume truncates them in the same way. The first holds at most about MAX_LINES steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypedDict

from rlpost.algorithm.answers import Answer, answers_of
from rlpost.observe.writer import MetricsWriter
from rlpost.types import SampleGroup

FILE_NAME = "samples.jsonl"
FIXED_NAME = "eval_samples.jsonl"
FIXED_PROMPTS = 2  # of each evaluation set
MAX_LINES = 500
MAX_PROMPT, MAX_ANSWER = 1200, 2400  # characters


class RecordedAnswer(TypedDict, total=False):
    """A sample answer as the files hold it; readers add the ``step`` of its line."""

    step: int
    set: str
    """The evaluation set; none for answers of the rollout."""
    prompt_id: int
    prompt: str
    answer: str
    label: str | None
    reward: float
    num_tokens: int
    finish: str
    images: list[str]
    """Digests of the images of prompt and answer, files of RUN/images; absent if there are none."""


Decode = Callable[[Sequence[int]], str]


class SampleWriter:
    """Writes answers of every n-th step."""

    def __init__(
        self,
        report_folder: Path,
        *,
        num_steps: int,
        decode: Decode,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Create a writer.

        Args:
            num_steps: steps of the whole run.
            check: raises Fenced when another attempt owns the run.
        """
        self._writer = MetricsWriter(report_folder / FILE_NAME, check=check)
        self._fixed = MetricsWriter(report_folder / FIXED_NAME, check=check)
        self._interval = max(1, -(-num_steps // MAX_LINES))
        self._decode = decode

    async def begin(self, step: int) -> None:
        """Remove the answers of all steps after ``step``. Raises Fenced."""
        await self._writer.begin(step)
        await self._fixed.begin(step)

    def write(self, step: int, groups: Sequence[SampleGroup]) -> None:
        """Queue sample answers if ``step`` is selected. A failed write never ends the run."""
        if groups and (step - 1) % self._interval == 0:
            self._writer.put_soon(step, {"samples": chosen(groups, self._decode)})

    def write_evaluated(self, step: int, answered: Mapping[str, Sequence[SampleGroup]]) -> None:
        """Queue the answers of an evaluation, by set. A failed write never ends the run."""
        found = [
            {"set": name, **_record(answers_of(group)[0], self._decode)}
            for name, groups in sorted(answered.items())
            for group in groups
        ]
        if found:
            self._fixed.put_soon(step, {"samples": found})

    def close(self) -> None:
        """Wait for pending writes."""
        self._writer.close()
        self._fixed.close()


def chosen(groups: Sequence[SampleGroup], decode: Decode) -> list[RecordedAnswer]:
    """Return the best and worst answer of one group as JSON values; on ties the first answer.

    The group is the first one with different rewards, otherwise the first of all.
    """
    by_group = [answers_of(group) for group in groups]
    with_different_rewards = (
        answers for answers in by_group if len({answer.reward for answer in answers}) > 1
    )
    answers = next(with_different_rewards, by_group[0])
    best = max(answers, key=lambda answer: answer.reward)
    worst = min(answers, key=lambda answer: answer.reward)
    return [_record(answer, decode) for answer in ([best] if best is worst else [best, worst])]


def _record(answer: Answer, decode: Decode) -> RecordedAnswer:
    first = answer.samples[0].sample
    text = "\n".join(scored.sample.text for scored in answer.samples)
    record: RecordedAnswer = {
        "prompt_id": first.prompt_id,
        "prompt": cut(decode(first.prompt_ids), MAX_PROMPT),
        "answer": cut(text, MAX_ANSWER),
        "label": None if first.label is None else cut(first.label, MAX_PROMPT),
        "reward": answer.reward,
        "num_tokens": answer.length,
        "finish": answer.samples[-1].sample.finish_reason,
    }
    if first.images:
        record["images"] = [span.hash for span in first.images]
    return record


def cut(text: str, longest: int) -> str:
    """Return the text, with its middle replaced by a note if it exceeds ``longest`` characters."""
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"
