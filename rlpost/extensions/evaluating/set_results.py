"""The results of an evaluation, from the answers of its sets.

Input: files of answers (``rlpost.observe.evaluation_answers``). Output: of each set the figures that
the metrics of evaluations are the means of, with 95 % intervals of reward and pass@k.

Answers to one prompt are not independent, so an interval is that of the mean over prompts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlpost.algorithm.evaluation_statistics import (
    AnswerFigures,
    mean,
    mean_interval,
    prompt_figures,
)
from rlpost.errors import DataError
from rlpost.observe.evaluation_answers import EvaluatedAnswer


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
