"""Every answer of an evaluation as JSON Lines, and what follows from them.

Input: the scored groups of a set. Output: RUN/report/evaluation/SET.jsonl with one line per answer,
however many samples it has; and of such a file the figures that the metrics of evaluations are the
means of, with 95 % intervals of reward and pass@k.

Answers to one prompt are not independent, so an interval is that of the mean over prompts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict
from urllib.parse import quote

from common.files import write_atomic
from rlpost.algorithm.answers import answers_of
from rlpost.algorithm.evaluation_statistics import (
    AnswerFigures,
    mean,
    mean_interval,
    prompt_figures,
)
from rlpost.errors import DataError
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


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts and its 95 % interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class SetResult:
    """The result on one set.

    All are means over prompts. ``pass_at``: for k of 1, 2, 4, ... and the number of answers; an
    answer is correct if its reward is at least 1.
    """

    name: str
    prompts: int
    answers: int
    reward: Estimate
    pass_at: Mapping[int, Estimate]
    tokens: float
    truncated: float
    weights: str = ""
    """Whose answers they are: run and step, or the folder of the model."""


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


def read_results(folder: Path) -> list[SetResult]:
    """Return the result of each set in a folder, by name. Raises DataError for a damaged line."""
    results = []
    for path in sorted(folder.glob("*.jsonl")):
        try:
            answers = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
            result = result_of(answers[0]["set"], answers)
            results.append(replace(result, weights=answers[0].get("weights", "")))
        except (ValueError, LookupError, TypeError) as error:
            raise DataError(f"{path}: not the answers of an evaluation: {error!r}") from error
    return results


def result_of(name: str, answers: Sequence[EvaluatedAnswer]) -> SetResult:
    """Return the result of the answers of a set; there is at least one."""
    by_prompt: dict[int, list[AnswerFigures]] = {}
    for answer in answers:
        by_prompt.setdefault(answer["prompt_id"], []).append(
            AnswerFigures(answer["reward"], answer["num_tokens"], answer["finish"] == "length")
        )
    figures = prompt_figures(list(by_prompt.values()))
    return SetResult(
        name,
        prompts=len(by_prompt),
        answers=len(answers),
        reward=estimate(figures.rewards),
        pass_at={k: estimate(values) for k, values in figures.pass_at.items()},
        tokens=mean(figures.lengths),
        truncated=mean(figures.truncated),
    )


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of a value per prompt with its interval."""
    return Estimate(*mean_interval(values))
