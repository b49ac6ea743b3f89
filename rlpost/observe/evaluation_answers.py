"""Every answer of an evaluation as JSON Lines, and what follows from them.

Input: the scored groups of a set. Output: RUN/report/evaluation/SET.jsonl; and of such a file the
mean reward, pass@k and the mean length, each with a 95 % interval.

Answers to one prompt are not independent, so an interval is that of the mean over prompts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from common.files import write_atomic
from rlpost.algorithm.evaluation_statistics import mean_interval, pass_at_k
from rlpost.config.eval_sets import answers_file
from rlpost.errors import DataError
from rlpost.types import SampleGroup

EVALUATION = "evaluation"
RIGHT = 1.0  # the lowest reward of a correct answer


class EvaluatedAnswer(TypedDict):
    """One line of the file of a set."""

    set: str
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

    ``pass_at``: for k of 1, 2, 4, ... and the number of answers; an answer is correct if its reward
    is at least 1.
    """

    name: str
    prompts: int
    answers: int
    reward: Estimate
    pass_at: Mapping[int, Estimate]
    tokens: float
    truncated: float


def write_answers(
    folder: Path,
    name: str,
    groups: Sequence[SampleGroup],
    decode: Callable[[Sequence[int]], str],
) -> None:
    """Write the answers of a set, atomically. Raises OSError."""
    lines = []
    for group in groups:
        for scored in group.samples:
            sample = scored.sample
            answer: EvaluatedAnswer = {
                "set": name,
                "prompt_id": sample.prompt_id,
                "index": sample.index,
                "prompt": decode(sample.prompt_ids),
                "answer": sample.text,
                "label": sample.label,
                "reward": scored.reward,
                "num_tokens": len(sample.response_ids),
                "finish": sample.finish_reason,
            }
            lines.append(json.dumps(answer) + "\n")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / answers_file(name), lines)


def read_results(folder: Path) -> list[SetResult]:
    """Return the result of each set in a folder, by name. Raises DataError for a damaged line."""
    results = []
    for path in sorted(folder.glob("*.jsonl")):
        try:
            answers = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
            results.append(result_of(answers[0]["set"], answers))
        except (ValueError, LookupError, TypeError) as error:
            raise DataError(f"{path}: not the answers of an evaluation: {error!r}") from error
    return results


def result_of(name: str, answers: Sequence[EvaluatedAnswer]) -> SetResult:
    """Return the result of the answers of a set; there is at least one."""
    rewards: dict[int, dict[int, float]] = {}
    for answer in answers:  # all samples of an episode have its index and its reward
        rewards.setdefault(answer["prompt_id"], {}).setdefault(answer["index"], answer["reward"])
    by_prompt = [list(each.values()) for each in rewards.values()]
    most = max(map(len, by_prompt))
    ks = sorted({*(2**power for power in range(most.bit_length()) if 2**power <= most), most})
    return SetResult(
        name,
        prompts=len(by_prompt),
        answers=sum(map(len, by_prompt)),
        reward=estimate([sum(each) / len(each) for each in by_prompt]),
        pass_at={
            k: estimate([pass_rate(each, k) for each in by_prompt if len(each) >= k]) for k in ks
        },
        tokens=sum(answer["num_tokens"] for answer in answers) / len(answers),
        truncated=sum(answer["finish"] == "length" for answer in answers) / len(answers),
    )


def pass_rate(rewards: Sequence[float], k: int) -> float:
    """Return the estimate of pass@k for the rewards of one prompt."""
    return pass_at_k(len(rewards), sum(reward >= RIGHT for reward in rewards), k)


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of a value per prompt with its interval."""
    return Estimate(*mean_interval(values))
