"""Answers of an evaluation as files, and the table that follows from them."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from rlpost.algorithm.evaluation_statistics import mean_interval, wilson
from rlpost.errors import DataError
from rlpost.extensions.evaluating.evaluate_verb import table
from rlpost.extensions.evaluating.set_results import read_results, result_of
from rlpost.observe.evaluation_answers import write_answers
from rlpost.types import ImageSpan, Sample, SampleGroup, ScoredSample


def group(prompt_id: int, *rewards: float, finish: Any = "stop") -> SampleGroup:
    return SampleGroup(
        prompt_id,
        tuple(
            ScoredSample(
                Sample(
                    prompt_id,
                    i,
                    (1, 2),
                    (3,) * (i + 1),
                    (0.0,) * (i + 1),
                    f"a\u2028{i}",
                    finish,
                    0,
                    "L",
                ),
                reward,
            )
            for i, reward in enumerate(rewards)
        ),
    )


def test_answers_survive_the_file_and_give_the_result_of_their_set(tmp_path: Path) -> None:
    groups = [group(3, 1.0, 0.0), group(4, 0.0, 0.5), group(5, 1.0, 1.0, finish="length")]
    weights, decode = "tiny-0123 step 4", lambda ids: "".join(map(str, ids))
    write_answers(tmp_path / "e", "math/aime", groups, decode, weights=weights)
    lines = (tmp_path / "e" / "math%2Faime.jsonl").read_text().split("\n")[:-1]
    assert json.loads(lines[1]) == {
        **{"set": "math/aime", "weights": weights, "prompt_id": 3, "index": 1},
        **{"prompt": "12", "answer": "a\u20281"},
        **{"label": "L", "reward": 0.0, "num_tokens": 2, "finish": "stop"},
    }
    (result,) = read_results(tmp_path / "e")
    assert result.weights == weights
    assert (result.name, result.prompts, result.answers) == ("math/aime", 3, 6)
    assert (result.tokens, result.truncated) == (1.5, pytest.approx(1 / 3))
    assert result.reward.mean == pytest.approx((0.5 + 0.25 + 1.0) / 3)
    assert {k: each.mean for k, each in result.pass_at.items()} == {1: 0.5, 2: pytest.approx(2 / 3)}
    head, row = table([result])
    assert head.split()[:6] == ["set", "prompts", "answers", "reward", "pass@1", "pass@2"]
    assert "0.667 [0.208, 0.939]" in row and row.endswith("33.3 %")


def test_questions_of_one_text_are_told_apart_by_their_images(tmp_path: Path) -> None:
    """verl grouped them by their text: one prompt of 26 answers (verl#3238)."""
    groups = []
    for prompt_id, digest in ((3, "a"), (4, "b")):
        (scored,) = group(prompt_id, float(prompt_id - 3)).samples
        seen = replace(scored.sample, images=(ImageSpan(digest, 0, 1, (1, 2, 2)),))
        groups.append(SampleGroup(prompt_id, (replace(scored, sample=seen),)))
    write_answers(tmp_path, "geo3k", groups, str, weights="w")
    lines = (tmp_path / "geo3k.jsonl").read_text().splitlines()
    assert [json.loads(line)["images"] for line in lines] == [["a"], ["b"]]
    (result,) = read_results(tmp_path)
    assert result.prompts == 2 and result.reward.mean == 0.5


def test_each_set_has_a_file_of_its_own(tmp_path: Path) -> None:
    names = ["a/b", "a_b", "a%2Fb", "..", ".", ".a", "a", "x" * 300, "x" * 301, "é" * 90, "a b"]
    for name in names:
        write_answers(tmp_path, name, [group(1, 1.0)], str, weights="w")
    assert sorted(result.name for result in read_results(tmp_path)) == sorted(names)
    assert (tmp_path / "a b.jsonl").is_file()


def test_a_prompt_with_fewer_answers_does_not_count_for_a_larger_k() -> None:
    lines: list[Any] = [
        {"prompt_id": p, "index": i, "reward": float(p), "num_tokens": 1, "finish": "stop"}
        for p, count in ((0, 1), (1, 2))
        for i in range(count)
    ]
    result = result_of("x", lines)
    assert result.pass_at[1].mean == 0.5 and result.pass_at[2].mean == 1.0


def test_intervals_equal_those_of_scipy_and_cover_the_truth() -> None:
    dice = random.Random(7)
    for count in (2, 9, 100):
        values = [dice.random() for _ in range(count)]
        mean, low, high = mean_interval(values)
        wanted = stats.norm.interval(0.95, loc=mean, scale=stats.sem(values))
        assert (low, high) == pytest.approx(wanted)
    for successes, trials in ((0, 5), (7, 10), (50, 50), (123, 1000)):
        exact = stats.binomtest(successes, trials).proportion_ci(0.95, method="wilson")
        assert wilson(successes, trials) == pytest.approx(tuple(exact), abs=1e-12)
        values = [1.0] * successes + [0.0] * (trials - successes)
        assert mean_interval(values)[1:] == pytest.approx(tuple(exact), abs=1e-12)
    assert mean_interval([0.5])[1:] == (-math.inf, math.inf)
    covered = 0
    for _ in range(400):  # answers to a prompt are alike, as they are in evaluations
        prompts = [
            sum(dice.random() < p for _ in range(4)) / 4 for p in (dice.random() for _ in range(50))
        ]
        _, low, high = mean_interval(prompts)
        covered += low <= 0.5 <= high
    assert 0.92 <= covered / 400 <= 0.98


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    for text in ("not JSON\n", "{}\n", ""):
        (tmp_path / "set.jsonl").write_text(text)
        with pytest.raises(DataError, match=r"set.jsonl: not the answers of an evaluation"):
            read_results(tmp_path)
