"""The detector of repetition loops, measured on labelled texts: loops found, regular texts spared."""

from __future__ import annotations

from rlpost.algorithm.repetition import LEAST_ENDED, is_repetitive
from tests.unit.algorithm.repetition_texts import LOOPS, PROBLEM, REGULAR

CUT_OFF = {
    "Base64 of zeros",
    "HTML table of zeros",
    "JSON records of equal values",
    "SQL",
    "hex dump of zeros",
    "song with a counter",
    "table of floats",
}
"""Uniform texts that cannot be told from a loop if a limit ends them."""


def test_all_loops_but_one_are_found_when_a_limit_ended_them() -> None:
    missed = {
        name for name, loop in LOOPS.items() if not is_repetitive(PROBLEM + loop, is_truncated=True)
    }
    assert missed == {"a short line with a counter"}


def test_no_regular_text_that_ended_is_called_a_loop() -> None:
    called = {name for name, text in REGULAR.items() if is_repetitive(text, is_truncated=False)}
    assert called == set()


def test_of_regular_texts_that_a_limit_ended_only_uniform_ones_are_called_loops() -> None:
    called = {name for name, text in REGULAR.items() if is_repetitive(text, is_truncated=True)}
    assert called <= CUT_OFF


def test_a_long_loop_counts_also_if_it_ended() -> None:
    loop = "**Final Answer** is 6. "
    long = loop * (LEAST_ENDED // len(loop) + 1)
    assert is_repetitive(PROBLEM + long, is_truncated=False)
    assert not is_repetitive(PROBLEM + long[: LEAST_ENDED // 2], is_truncated=False)
    assert not is_repetitive("", is_truncated=True)
