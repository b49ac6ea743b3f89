"""Every answer of an evaluation as JSON Lines.

Input: the scored groups of a set. Output: RUN/report/evaluation/SET.jsonl with one line per answer,
however many samples it has.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NotRequired, TypedDict
from urllib.parse import quote

from common.files import write_atomic
from rlpost.algorithm.answers import answers_of
from rlpost.types import SampleGroup

EVALUATION = "evaluation"
LONGEST_NAME = 180  # of a file, which may have 255 bytes


class EvaluatedAnswer(TypedDict):
    """One line of the file of a set: one answer, with the prompt of its first sample."""

    set: str
    weights: str
    prompt_id: int
    index: int
    prompt: str
    answer: str
    label: str | None
    reward: float
    num_tokens: int
    finish: str
    images: NotRequired[list[str]]
    """As in ``RecordedAnswer``: many questions about images have the same text."""


def write_answers(
    folder: Path,
    name: str,
    groups: Sequence[SampleGroup],
    decode: Callable[[Sequence[int]], str],
    *,
    weights: str,
) -> None:
    """Write the answers of a set, atomically; ``weights`` says whose they are. Raises OSError."""
    lines = []
    for group in groups:
        for answer in answers_of(group):
            first, last = answer.samples[0].sample, answer.samples[-1].sample
            line: EvaluatedAnswer = {
                "set": name,
                "weights": weights,
                "prompt_id": first.prompt_id,
                "index": first.index,
                "prompt": decode(first.prompt_ids),
                "answer": "\n".join(scored.sample.text for scored in answer.samples),
                "label": first.label,
                "reward": answer.reward,
                "num_tokens": answer.length,
                "finish": last.finish_reason,
            }
            if first.images:
                line["images"] = [span.hash for span in first.images]
            lines.append(json.dumps(line) + "\n")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / answers_file(name), lines)


def answers_file(name: str) -> str:
    """Return the name of a set's file; no two sets have the same.

    >>> answers_file("math/500")
    'math%2F500.jsonl'
    """
    quoted = quote(name, safe=" +,;=@()")
    if len(quoted) > LONGEST_NAME or quoted.startswith("."):
        quoted = (
            f"{quoted[:LONGEST_NAME].lstrip('.')}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
        )
    return f"{quoted}.jsonl"
