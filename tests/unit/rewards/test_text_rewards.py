"""Text rewards: letters of multiple-choice answers, word overlap, and format instructions."""

from typing import Any

import pytest

from rlpost.errors import DataError
from rlpost.extensions.rewards.f1 import f1
from rlpost.extensions.rewards.gpqa import gpqa
from rlpost.extensions.rewards.ifeval import CHECKS, ifeval

TEXTS_OF_A_CHOICE = (
    *("C) is not conserved", "C. are not affected", "C is not in equilibrium", "C isn't observed"),
    *("C is false", "C) is incorrect", "C is not correct"),
)
FOUR = {"choices": ["alpha", "beta", "gamma", "delta"]}


@pytest.mark.parametrize(
    ("response", "label", "metadata", "reward"),
    [
        ("The answer is B.", "B", {}, 1),
        ("Answer: C", "C", {}, 1),
        ("Answer: C", "D", {}, 0),
        ("My choice is D", "D", {}, 1),
        ("A is correct here", "A", {}, 1),
        ("E is the correct option", "E", {}, 1),
        ("the final option is C", "C", {}, 1),
        ("answer is b", "B", {}, 1),
        ("**Answer:** (C)", "C", {}, 1),
        (r"The answer is \boxed{\text{C}}", "C", {}, 1),
        ("we ruled out A, then B, settled on C", "C", {}, 1),
        ("Answer: A? No. The answer is B.", "B", {}, 1),
        ("Answer: A is wrong.</think>The answer is B.", "B", {}, 1),
        ("the answer is definitely B", "B", {}, 1),  # not the D of "definitely"
        ("The answer is B. Option A is wrong.", "B", {}, 1),
        ("Option B is the correct answer. Choice C fails.", "B", {}, 1),
        ("I settle on C, I think", "C", {}, 1),
        ("b.", "B", {}, 1),
        ("nobody gave a letter", "A", {}, 0),  # the article "a" is not a choice
        ("I do not know. A pity.", "A", {}, 0),  # marin-community/marin#7527
        ("we settle on B. A short check agrees", "B", {}, 1),
        ("between A and B, A fits", "A", {}, 1),
        ("A because it fits", "A", {}, 1),
        ("The answer is not A.", "A", {}, 0),
        ("It is not A but B", "B", {}, 1),
        ("Option A is incorrect", "A", {}, 0),
        ("answer (A) is wrong, so C", "C", {}, 1),
        ("A is not the worst; A is correct", "A", {}, 1),
        *((f"Answer: {answer}", "C", {}, 1) for answer in TEXTS_OF_A_CHOICE),
        *((answer, "C", {}, 1) for answer in TEXTS_OF_A_CHOICE[:4]),
        ("Final answer: (C) was not observed", "C", {}, 1),
        ("The correct answer is C) is incorrect", "C", {}, 1),
        (r"\boxed{C} is false", "C", {}, 1),
        ("Answer: D. Answer C is not the right one.", "C", {}, 0),
        ("C isn't correct, D is", "C", {}, 0),
        ("Choice C is the wrong one", "C", {}, 0),
        ("答えはCではない", "C", {}, 0),  # the answer is not C
        ("故选C。因为选项A不对", "C", {}, 1),  # so C; A is wrong
        ("答案为B。vitamin C matters", "B", {}, 1),
        ("答案为B。vitamin C matters", "C", {}, 0),
        ("是C\uff0c而不是A", "C", {}, 1),  # C and not A
        ("答案\uff1a\uff08\uff23\uff09", "C", {}, 1),  # full-width
        ("A或B", "B", {}, 0),  # A or B
        ("it is 5", "-5", {"choices": ["5", "-5"]}, 0),
        ("it is 1.5", "1 5", {"choices": ["1.5", "15"]}, 0),
        ("2 things", "2", FOUR, 0),
        ("Answer: C, but actually A was right, no wait B.", "B", {"valid_letters": ["A", "B"]}, 1),
        ("Answer: C", "2", FOUR, 1),
        ("Answer: C", "gamma", FOUR, 1),
        ("Answer: B", "1", {"choices": {"a": "first", "b": "second"}}, 1),
        ("Answer: A", "anything", {"correct_letter": "a"}, 1),
        ("Definitely Gamma.", "gamma", FOUR, 1),
        ("no gammas here", "gamma", FOUR, 0),  # only whole words count
        ("no idea", "A", {}, 0),
        ("<think>maybe C", "C", {}, 0),
        (r"<think>so \boxed{C}", "C", {}, 1),
        ("", "A", {}, 0),
        ("The answer is B.", None, {}, 0),
    ],
)
def test_the_chosen_letter_or_text(
    response: str, label: str | None, metadata: dict[str, Any], reward: int
) -> None:
    assert gpqa(response, label, metadata) == reward


@pytest.mark.parametrize(
    "sentence",
    [
        "I choose {} with confidence",
        "Comparing all of them, {} gives the greatest yield.",
        "I compared all. {} gives the greatest yield.",
        "So {} then.",
        "{} then.",
        "Out of these, {} makes most sense",
    ],
)
def test_no_letter_is_harder_to_choose_than_another(sentence: str) -> None:
    chosen = [gpqa(sentence.format(letter), letter, {}) for letter in "ABCD"]
    assert chosen == [1.0] * 4


@pytest.mark.parametrize(
    "choices",
    [
        ["5", "-5", "1/5", "0.5"],
        ["10^-4 eV", "10^4 eV", "10^-9 eV", "10^{-4} eV"],
        ["+", "-", "*", "/"],
        ["苹果", "香蕉", "橙子", "梨"],
        ["Россия", "π", "2π", "x_2"],
        ["x^2", "x_2", "X 2", "x 2"],
    ],
)
def test_a_label_that_is_the_text_of_a_choice_means_that_choice(choices: list[str]) -> None:
    for place, label in enumerate(choices):
        rewards = [gpqa(letter, label, {"choices": choices}) for letter in "ABCD"]
        assert rewards == [float(place == other) for other in range(4)], label


def test_choices_that_are_not_a_list_are_refused() -> None:
    with pytest.raises(DataError, match="'choices' in the metadata is 4; it must be a list"):
        gpqa("Answer: C", "C", {"choices": 4})


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        ("Paris is the capital", "Paris is the capital.", 1.0),
        ("the brown fox", "a quick brown fox", 0.8),
        ("fox fox", "fox", 2 / 3),
        ("apple", "carrot", 0.0),
        ("yes", "yes", 1.0),
        ("yes it is", "yes", 0.0),
        ("no", "no doubt", 0.0),
        ("", "x", 0.0),
        ("the", "a", 0.0),
        ("x", None, 0.0),
    ],
)
def test_f1_of_word_overlap(response: str, label: str | None, reward: float) -> None:
    assert f1(response, label, {}) == pytest.approx(reward)


FOLLOWED = [
    ("keywords:existence", {"keywords": ["Fox", "c++"]}, "a fox writes C++", "a fox"),
    (
        "keywords:frequency",
        {"keyword": "fox", "frequency": 2, "relation": "at least"},
        "fox Fox",
        "fox",
    ),
    ("keywords:forbidden_words", {"forbidden_words": ["dog"]}, "dogs", "a Dog"),
    (
        "keywords:letter_frequency",
        {"letter": "e", "let_frequency": 3, "let_relation": "less than"},
        "eE",
        "eee",
    ),
    (
        "language:response_language",
        {"language": "de"},
        "Das ist ein ganz normaler Satz.",
        "This is a sentence.",
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "at least"},
        "Dr. No! Yes.",
        "Dr. No.",
    ),
    (
        "length_constraints:number_words",
        {"num_words": 3, "relation": "less than"},
        "two words",
        "now three words",
    ),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "one\n***\ntwo", "one\n\ntwo"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Then"},
        "One.\n\nThen, two.",
        "One.\n\nNow two.",
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        "[name] of [town]",
        "[name]",
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        "Bye.\nP. S. more",
        "Bye.\nPS more",
    ),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n* b\n- c"),
    ("detectable_format:constrained_response", {}, "My answer is no.", "no"),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        "*a* and *b*",
        "*a* and **",
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Part", "num_sections": 2},
        "Part 1 x Part 2",
        "Part x",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
    ("detectable_format:title", {}, "<<joy>>\ntext", "<< >>\ntext"),
    ("combination:two_responses", {}, "one ****** two", "one ****** one"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi"}, "say hi: hi", "hi. say hi"),
    ("startend:end_checker", {"end_phrase": "the end."}, '"This is The End."', "the end. Not."),
    ("startend:quotation", {}, ' "all" ', '"'),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "exactly"},
        "A BIG-ONE x",
        "A x",
    ),
    (
        "change_case:english_capital",
        {},
        "THIS IS AN ENGLISH SENTENCE",
        "This is an English sentence",
    ),
    (
        "change_case:english_lowercase",
        {},
        "this is an english sentence",
        "dies ist ein deutscher satz",
    ),
    ("punctuation:no_comma", {}, "none", "one, two"),
]


@pytest.mark.parametrize(
    ("name", "arguments", "good", "bad"), FOLLOWED, ids=[case[0] for case in FOLLOWED]
)
def test_an_instruction_is_followed_or_not(
    name: str, arguments: dict[str, Any], good: str, bad: str
) -> None:
    metadata = {"instruction_id_list": [name], "kwargs": [{**arguments, "unused": None}]}
    assert ifeval(good, None, metadata) == 1
    assert ifeval(bad, None, metadata) == 0


def test_every_instruction_of_ifeval_has_a_case() -> None:
    assert {case[0] for case in FOLLOWED} == set(CHECKS)
    assert len(CHECKS) == 25


def test_all_instructions_must_be_followed_and_an_empty_answer_follows_none() -> None:
    metadata = {
        "instruction_id_list": ["punctuation:no_comma", "startend:quotation"],
        "kwargs": [{}, {}],
    }
    assert ifeval('"both"', None, metadata) == 1
    assert ifeval("one", None, metadata) == 0
    assert ifeval(" ", None, {"instruction_id_list": ["punctuation:no_comma"]}) == 0
    assert ifeval("<think>cut off", None, {"instruction_id_list": ["punctuation:no_comma"]}) == 0


@pytest.mark.parametrize(
    ("metadata", "wanted"),
    [
        ({}, "instruction_id_list"),
        (
            {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}, {}]},
            "'kwargs' of equal length",
        ),
        ({"instruction_id_list": ["punctuation:no_commas"]}, "did you mean 'punctuation:no_comma'"),
    ],
)
def test_invalid_instructions_are_refused(metadata: dict[str, Any], wanted: str) -> None:
    with pytest.raises(DataError, match=wanted):
        ifeval("text", None, metadata)
