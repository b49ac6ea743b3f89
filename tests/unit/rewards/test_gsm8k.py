"""The final number of an answer, on real problems from the head of the GSM8K test split."""

import json
from itertools import product
from pathlib import Path

import pytest

from rlpost.extensions.rewards.gsm8k import gsm8k

LINES = (Path(__file__).parents[2] / "data/gsm8k/test.jsonl").read_text().splitlines()
SOLUTIONS = [json.loads(line)["answer"] for line in LINES]
NUMBERS = [int(solution.partition("#### ")[2].replace(",", "")) for solution in SOLUTIONS]


def test_a_solution_is_right_for_exactly_the_problems_with_its_number() -> None:
    for given, wanted in product(range(len(LINES)), repeat=2):
        reward = gsm8k(SOLUTIONS[given], SOLUTIONS[wanted], {})
        assert reward == (NUMBERS[given] == NUMBERS[wanted]), (given, wanted)
        assert gsm8k(f"The answer is {NUMBERS[given]}.", str(NUMBERS[wanted]), {}) == reward


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        ("The answer is $18.", "18", 1),
        ("#### 18 dollars in 3 days", "18", 1),
        ("#### $1,234.00", "1234", 1),
        ("#### 18 no #### 19", "19", 1),
        (r"\boxed{70{,}000} is more than 3", "70000", 1),
        (r"\boxed{70\,000}", "70000", 1),
        ("18 eggs. She has 3", "18", 0),
        ("10 - 15 = -5", "-5", 1),
        ("10-5", "5", 1),
        ("it is \u22125", "-5", 1),
        ("it costs $.50", "0.5", 1),
        ("18.0", "18", 1),
        ("50%", "50", 1),
        ("**18**", "18", 1),
        ("x18", "18", 0),
        ("<think>7</think> nothing", "7", 0),
        (r"\boxed{41/42}", "42", 0),
        (r"\boxed{\frac{41}{42}}", "42", 0),
        (r"\boxed{\dfrac{84}{2}}", "42", 1),
        ("#### 84 / 2", "42", 1),
        ("so 84/2 = 42", "42", 1),
        ("#### 1/0", "1", 0),
        ("#### 8/4/2", "2", 0),
        ("#### 2,1259", "2125", 0),
        ("#### 2,1259", "2", 0),
        ("#### 2,1259", "1259", 0),
        ("21,25,125", "125", 0),
        ("eggs,18", "18", 1),
        ("2 \u00d7 10^3", "3", 0),
        (r"$2 \times 10^{3}$", "2000", 1),
        (r"about $3.5 \cdot 10^{-2}$", "0.035", 1),
        ("so 1e5", "1", 0),
        ("so 1.5e3", "1500", 1),
        ("2^3", "3", 0),
        (r"\boxed{2^{3}}", "8", 1),
        ("it takes 2 1/2 hours", "2.5", 1),
        ("it takes 2 1/2 hours", "1/2", 0),
        (r"\boxed{2\frac{1}{2}}", "5/2", 1),
        (r"\boxed{2\frac{1}{2}}", "21/2", 0),
        ("1.234.567", "1.234", 0),
        ("1\u202f234 or so", "1234", 1),
        ("1'234", "1234", 1),
        ("3 或 4", "4", 0),  # 3 or 4
        ("1,234,567", "1234567", 1),
        ("<think>\nmaybe 18", "18", 0),
        ("<think>7</think> <think>it is 18", "18", 0),
        ("no", "1", 0),
        ("", "1", 0),
        ("1", None, 0),
    ],
)
def test_the_number_of_an_answer(response: str, label: str | None, reward: int) -> None:
    assert gsm8k(response, label, {}) == reward


@pytest.mark.parametrize(
    "sentence",
    [
        *("答案是{}", "共{}元。", "答案\uff1a{}个"),  # Han
        *("答えは{}です", "답은{}입니다"),  # Kana, Hangul
        *("คำตอบคือ{}บาท", "eggs {} eggs"),  # Thai
    ],
)
@pytest.mark.parametrize("number", ["42", "-5", "$1,234.5", "3/4", "\uff14\uff12"])
def test_a_number_is_found_in_every_script(sentence: str, number: str) -> None:
    label = {"\uff14\uff12": "42"}.get(number, number)
    assert gsm8k(sentence.format(number), label, {}) == 1
    assert gsm8k(sentence.format(number), f"{label}1", {}) == 0
