r"""Mathematical answers: which ones equal the label and which do not.

``deepscaler`` and ``dapo`` grade like the graders that were published with these recipes. Where
those are plainly wrong, ours differ, and the case says so.
"""

import random
import re
import time
from pathlib import Path

import pytest

import rlpost.extensions.rewards.deepscaler as deepscaler_module
from rlpost.extensions.rewards.dapo import dapo, normalized, same_number
from rlpost.extensions.rewards.deepscaler import answer_equals, deepscaler, plain_form
from rlpost.extensions.rewards.mathverify import math
from rlpost.tasks.reward.answer_extraction import last_boxed


@pytest.mark.parametrize(
    ("response", "content"),
    [
        (r"first \boxed{1}, then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed {7}", "7"),
        (r"so $\boxed 7$", "7"),
        (r"\fbox{7}", "7"),
        (r"\fbox{6} \boxed{7}", "7"),
        (r"\boxed{}", ""),
        (r"\boxed{never closes", None),
        (r"\boxed{1} and \boxed{never closes", None),
        ("no box", None),
    ],
)
def test_the_last_box_with_its_inner_braces(response: str, content: str | None) -> None:
    assert last_boxed(response) == content


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        (r"Hm \boxed{99}</think>Final: \boxed{42}", "42", 1),
        (r"<think></think> a </think> \boxed{42}", "42", 1),
        (r"\boxed{7}###Response\boxed{42}", "42", 1),
        (r"\boxed{42}", "42", 0),  # no marker of where the answer begins
        ("42</think>42", "42", 0),
        (r"</think>\boxed{42}", "", 0),
        (r"</think>\boxed{42}", None, 0),
        (r"</think>\boxed{42}", r"\boxed{42}", 1),
        (r"</think>\boxed{43}", "42", 0),
        (r"</think>\boxed{1}, no: \boxed{42}", "42", 1),
        (r"</think>\boxed{42", "42", 0),
    ],
)
def test_deepscaler_grades_the_box_after_the_reasoning(
    response: str, label: str | None, reward: int
) -> None:
    assert deepscaler(response, label, {}) == reward


SAME = [
    ("0.5", r"\frac{1}{2}"),
    (".5", r"\frac12"),
    (r"\dfrac12", r"\tfrac{1}{2}"),
    ("1/2", r"\frac{1}{2}"),
    ("0.25", r"\frac{1}{4}"),
    (r"\frac{\sqrt3}3", r"\frac{1}{\sqrt{3}}"),
    (r"\sqrt3", r"\sqrt{3}"),
    (r"11\sqrt2", r"11 \sqrt{2}"),
    (r"3\frac{1}{2}", "7/2"),
    (r"-3\frac12", "-7/2"),  # the published grader reads -3 + 1/2
    ("3 1/2", "3.5"),
    ("x=5", "5"),
    ("y = 5", "5"),
    ("5.0", "5"),
    ("05", "5"),
    ("1e3", "1000"),
    ("1,000,000", "1000000"),
    (r"1,\!000", "1000"),
    (r"50\%", "50"),
    (r"\$5", "5"),
    (r"5\text{ cm}", "5"),
    ("5 cm", "5"),
    (r"45^\circ", "45"),
    ("6 inches", "6"),
    (r"\text{Evelyn}", "evelyn"),
    (r"\text{(C)}", "(C)"),
    (r"\left(1, 2\right)", "(1,2)"),
    (r"(\frac12, 3)", "(0.5,3)"),
    (r"(-\infty,3)", r"(-\infty, 3)"),
    (r"(-\infty,2)\cup(3,\infty)", r"(-\infty, 2) \cup (3, \infty)"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}"),
    ("1+x", "x+1"),
    ("(x+1)^2", "x^2+2x+1"),
    (r"2\cdot x", "2x"),
    (r"\pi/2", r"\dfrac{\pi}{2}"),
    ("-0", "0"),
    ("12:30", "12:30"),
    ("January 1", r"\text{January 1}"),
    ("1 or 2", "1,2"),
    ("a_1+b", "b+a_1"),
    ("x_1^2-1", "(x_1-1)(x_{1}+1)"),
    ("2.x", "2x"),
    (r"2.\pi", r"2\pi"),
    ("1.e-3x", "0.001x"),
]
OTHER = [
    ("42", "43"),
    (r"\frac{2}{4}", r"\frac{1}{2}"),  # fractions must be reduced
    ("(2,1)", "(1,2)"),
    ("[1,2]", "(1,2]"),
    ("(1,2,3)", "(1,2)"),
    ("2,1", "1,2"),
    ("0.1", r"10\%"),
    ("3.14159", r"\pi"),
    ("2^{10}", "1024"),  # integers must be evaluated
    ("5!", "120"),
    ("1.5 million", "1500000"),
    ("-5", "5"),
    (r"\text{B}", "C"),
    ("2x", "x"),
    ("a_1+b", "a_2+b"),
    ("a_1+b", "a+b"),
    ("0.xff+x", "255+x"),
    (r"\begin{pmatrix}1&2\\3&5\end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    # the published grader compares them as floats, which are equal
    (
        "12345678901234567891",
        "12345678901234567890",
    ),
    ("", "5"),
    ("{}", "5"),
    # With more than one \text{ ...}, the data set's own code removes no unit, and so does ours.
    ("3", r"3 \text{ or } 5 \text{ or } 7"),
    (r"42 \text{ or } 41 \text{ or } 43", "42"),
    (r"2\text{ hours }30\text{ minutes}", r"2\text{ hours }15\text{ minutes}"),
]


@pytest.mark.parametrize(("answer", "truth"), SAME)
def test_deepscaler_considers_these_equal(answer: str, truth: str) -> None:
    assert answer_equals(answer, truth) == 1
    assert answer_equals(truth, answer) == 1


@pytest.mark.parametrize(("answer", "truth"), OTHER)
def test_deepscaler_considers_these_different(answer: str, truth: str) -> None:
    assert answer_equals(answer, truth) == 0


@pytest.mark.parametrize(
    ("answer", "form"),
    [
        (r"\frac12", r"\frac{1}{2}"),
        (r"\frac1{72}", r"\frac{1}{72}"),
        (".7", "0.7"),
        ("1 + 1", "1+1"),
        (r"\text{42}", "42"),
        (r"\left(1\right)", "(1)"),
        (r"42\text{ cm}", "42"),
        (r" 1\text{ h }2\text{ min} ", r"1\text{ h }2\text{ min}"),
    ],
)
def test_the_plain_form_of_the_math_data_set(answer: str, form: str) -> None:
    assert plain_form(answer) == form


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        ("Long. Answer: 42", "42", 1),
        ("Answer: 41 was wrong.\nAnswer: 42", "42", 1),
        ("Answer: 42\nAnswer: 41", "42", -1),
        ("answer : $42$.", "42", 1),
        (r"Answer: \boxed{42}", "42", 1),
        ("Answer: $x = 42$", "42", 1),
        ("Answer: 42 dollars", "42", 1),
        ("Answer: 1,234", "1234", 1),
        ("Answer: 42", "42.0", 1),
        ("Answer: 042", "42", -1),
        (r"\boxed{42}", "42", -1),
        ("42", "42", -1),
        ("Answer: 42" + " filler" * 60, "42", -1),  # only the end of a response is searched
        # the published grader crashes if the label is not a number
        (
            r"Answer: \frac34",
            r"\frac{3}{4}",
            1,
        ),
        ("Answer: 3.5", "3.5", 1),  # the published grader reads the label as 3
        ("Answer: 3", "3.5", -1),
        (r"Answer: $\frac{1}{2}$", "1/2", 1),
        (r"Answer: \frac{1}{2}", "0.5", 1),
        (r"Answer: \dfrac{1}{2}", r"\frac{1}{2}", 1),
        (r"Answer: \(\frac12\)", r"\tfrac{1}{2}", 1),
        (r"Answer: $-\frac{1}{2}$", "-0.5", 1),
        ("Answer: 0.5", r"\frac{1}{2}", 1),
        (r"Answer: \frac{1}{3}", r"\frac{1}{2}", -1),
        (r"Answer: \frac{1}{0}", r"\frac{1}{2}", -1),
        # as in the published grader, integers must be evaluated
        (
            r"Answer: \frac{84}{2}",
            "42",
            -1,
        ),
        ("Answer\uff1a42\u3002", "42", 1),  # the colon and full stop of Chinese and Japanese
        ("Answer: 42", None, -1),
    ],
)
def test_dapo_grades_the_last_answer_line_as_1_or_minus_1(
    response: str, label: str | None, reward: int
) -> None:
    assert dapo(response, label, {}) == reward


@pytest.mark.parametrize("label", [r"\frac{1}{2}", "0.35", r"\sqrt{2}"])
@pytest.mark.parametrize("function", ["re", "im", "frac"])
def test_no_answer_runs_code(tmp_path: Path, function: str, label: str) -> None:
    """sympy's parser calls ``eval``, and sympy evaluates what is in a string with all builtins."""
    code = f"__import__('pathlib').Path({str(tmp_path / 'it_ran')!r}).touch()"
    spelled = "".join(f"\\{ord(letter):03o}" for letter in code)  # no letters to count
    groups = "{" * 3000 + "}" * 3000  # the parser of LaTeX gives up, and leaves the text as it is
    assert deepscaler(f"</think>\\boxed{{{function}('{spelled}'){groups}}}", label, {}) == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text",
    ["'1'", "e.e", "(1).e", "1 .e", "e_e", "[1]", "e[1]", "{1}", "1;e", "e:1", "e@e", "`e`", "\\1",
     "1.e.e", "1.5.\te", "e1.e", "1e5.e", "(1).e_1", "1 .e_1", "e.e_1",
     "1._e", "_e_1", "e_1_", "e_1.e", "e_1e", "\uff11.e"],
)  # fmt: skip
def test_only_arithmetic_reaches_the_parser_of_sympy(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    reached: list[str] = []
    monkeypatch.setattr(deepscaler_module, "_simplified", reached.append)
    for pair in ((text, "1/2"), ("1/2", text), ("e/2", "1/2")):
        deepscaler_module._difference_is_zero(*pair)
    assert reached == ["(e/2)-(1/2)"]


def test_no_attribute_or_underscore_reaches_the_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    reached: list[str] = []
    monkeypatch.setattr(deepscaler_module, "_simplified", reached.append)
    draw = random.Random(1)
    for _ in range(20_000):
        text = "".join(draw.choices("ae__11.. (')", k=draw.randint(2, 8)))
        deepscaler_module._difference_is_zero(text, "1/2")
    assert len(reached) > 100 and any("\u4e00" in text for text in reached)
    for text in reached:
        code = re.sub(r"(?<![\w.])[0-9]+\.e[0-9]", "", text)  # a number with an exponent
        assert not re.search(r"_|'|\.\s*[^\W\d]", code), text


def test_dapo_is_fast_on_hostile_input() -> None:
    """It runs in the driver's process; this input used to take minutes."""
    started = time.thread_time()
    assert same_number("$1" * 3000 + "\nx", "42") == -1
    assert time.thread_time() - started < 1


@pytest.mark.parametrize(
    ("answer", "spelling"),
    [
        ("x = 42", "42"),
        ("an answer", "answer"),
        ("42 square", "42"),
        (r"\text{hello}", "hello"),
        (r"\boxed{42}", "42"),
        ("1,234,567", "1234567"),
        ("a b c", "bc"),
        ("42<|im_end|>", "42"),
        (r"it is $\sqrt2$ then", r"\sqrt{2}"),
    ],
)
def test_dapo_normalizes_the_spelling(answer: str, spelling: str) -> None:
    assert normalized(answer) == spelling


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        ("The answer is 42", "42", 1),
        (r"<think>\boxed{1}</think> \boxed{2}", "2", 1),
        (r"first \boxed{1}, then \boxed{2}", "2", 1),
        (r"first \boxed{1}, then \boxed{2}", "1", 0),
        (r"\boxed{\{2,1\}}", r"\{1,2\}", 1),
        (r"\boxed{2,1}", "1,2", 1),
        (r"\boxed{(2,1)}", "(1,2)", 0),
        (r"\boxed{[1,2]}", "(1,2)", 0),
        (r"\boxed{x=5}", "5", 1),
        (r"\boxed{50\%}", "50", 1),
        (r"\boxed{50\%}", "0.5", 1),
        (r"\boxed{12.5\%}", "12.5", 1),
        (r"\boxed{12.5}", r"12.5\%", 1),
        (r"\boxed{0.125}", r"12.5\%", 1),
        (r"\boxed{1250}", r"12.5\%", 0),
        ("It is 17%5", "175", 0),
        (r"\boxed{1\,250\,000}", "1250000", 1),
        (r"\boxed{1250}", r"1\ 250", 1),
        (r"\boxed{(1,\,250)}", "(1,250)", 1),
        (r"\boxed{2\,50}", "250", 0),
        (r"\boxed{\text{C}}", "C", 1),
        (r"\boxed{3\frac12}", "7/2", 1),
        (
            r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}}",
            r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
            1,
        ),
        (r"\boxed{1.5\times10^3}", "1500", 1),
        (r"\boxed{2^{10}}", "1024", 1),
        (r"\boxed{90^\circ}", "90", 1),
        (r"\boxed{5\text{ cm}}", "5", 1),
        (r"\boxed{-0}", "0", 1),
        (r"\boxed{12:30}", "12:30", 1),
        ("答案是42。", "42", 1),
        (r"\boxed{42元}", "42", 1),
        (r"\boxed{42人}", r"42\text{人}", 1),
        ("\\boxed{\uff083\uff0c4\uff09}", "(3,4)", 1),
        (r"\boxed{3米}", "3厘米", 0),
        ("\\boxed{\uff5e5}", "5", 0),  # about 5
        (r"\boxed{3万}", "3", 0),
        (r"\boxed{5或7}", "7", 0),
        (r"\boxed{3小时30分}", "30", 0),
        (r"\boxed{3.14}", r"\pi", 0),
        (r"So $x^2+2x+1$.", "(x+1)^2", 1),
        ("<think>\nmaybe 42", "42", 0),
        ("<think>\nmaybe $42$", "42", 0),
        ("<think>7</think> or <think>maybe 42", "42", 0),
        (r"<think>so \boxed{42}", "42", 1),  # a box is an answer anywhere
        ("nothing", "42", 0),
        ("", "42", 0),
        (r"\boxed{42}", "", 0),
        (r"\boxed{42}", None, 0),
    ],
)
def test_math_compares_the_answers_that_math_verify_extracts(
    response: str, label: str | None, reward: int
) -> None:
    assert math(response, label, {}) == reward
