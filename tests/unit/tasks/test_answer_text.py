"""Rewards see the answer apart from the thought, whichever tokens the model marks it with."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpost.tasks.answer_text import Channels
from rlpost.tasks.reward.answer_extraction import after_thinking
from rlpost.tasks.reward.registry import reward_function
from rlpost.tasks.tokenizer import PromptTokenizer
from tests.unit.tasks.sets import byte_tokenizer

HARMONY = ("<|return|>", "<|end|>", "<|call|>", "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>")  # fmt: skip
MARKS = {name: number for number, name in enumerate(HARMONY, 1 << 20)}
CHANNELS = Channels.of(MARKS)
TEXTS = st.text("ab é\n</think>", max_size=5)


def ids_of(text: str) -> list[int]:
    """One id for each character, and one for each mark of Harmony."""
    ids: list[int] = []
    while text:
        mark = next(filter(text.startswith, MARKS), None)
        ids.append(ord(text[0]) if mark is None else MARKS[mark])
        text = text[len(mark or " ") :]
    return ids


def decode(ids) -> str:
    return "".join(chr(each) for each in ids if each < 1 << 20)


@given(
    thoughts=st.lists(TEXTS.filter(bool), max_size=3), answer=TEXTS, end=st.sampled_from(["<|return|>", ""])
)  # fmt: skip
def test_the_final_channel_follows_the_thought(thoughts, answer, end) -> None:
    messages = [
        f"<|channel|>analysis<|message|>{text}<|end|><|start|>assistant" for text in thoughts
    ]
    response = "".join(messages) + f"<|channel|>final<|message|>{answer}{end}"
    text = CHANNELS.text(ids_of(response), decode)
    bodies = "".join(f"<think>{thought}</think>" for thought in thoughts)
    bodies = bodies or ("<think></think>" if answer else "")
    assert text == bodies + answer


@pytest.mark.parametrize(
    ("response", "text"),
    [
        ("<|channel|>analysis<|message|>so", "<think>so"),
        ("<|channel|>analysis<|message|>so<|end|><|start|>assistant<|chan", "<think>so</think>"),
        ("<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>fin", "<think>so</think>"),
        (
            "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>",
            "commentary to=functions.f json{}",
        ),
        ("42<|return|>", "42"),
        ("", ""),
    ],
)  # fmt: skip
def test_a_truncated_thought_stays_open_and_other_channels_are_text(response, text) -> None:
    assert CHANNELS.text(ids_of(response), decode) == text


def tokenizer(folder: Path, **options) -> PromptTokenizer:
    byte_tokenizer(folder, "", **options)
    return PromptTokenizer(folder)


def test_text_of_gpt_oss_is_cut_by_the_row_of_its_family(tmp_path) -> None:
    ids = tokenizer(tmp_path, special=HARMONY)
    response = ids.encode(
        "<|channel|>analysis<|message|>41 or \\boxed{42}.<|end|><|start|>assistant"
        "<|channel|>final<|message|>\\boxed{42}<|return|>"
    )
    assert not ids.marks_thoughts
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GptOssForCausalLM"]}))
    codec = PromptTokenizer(tmp_path)
    assert codec.marks_thoughts
    text = codec.decode(response)
    assert text == "<think>41 or \\boxed{42}.</think>\\boxed{42}"
    assert reward_function("deepscaler")(text, "42", {}) == 1.0


def test_special_tags_of_a_thought_are_in_the_text_and_plain_ones_stay_the_engines(
    tmp_path,
) -> None:
    tags = ("<think>", "</think>")
    special = tokenizer(tmp_path / "special", special=("<|end|>", *tags), added=())
    plain = tokenizer(tmp_path / "plain")
    assert special.marks_thoughts and not plain.marks_thoughts
    for codec in (special, plain):
        text = codec.decode(codec.encode("<think>maybe 41</think>42<|end|>"))
        assert text == "<think>maybe 41</think>42"
        assert after_thinking(text) == "42"
        for name in ("exact_match", "f1", "gsm8k"):
            assert reward_function(name)(text, "42", {}) == 1.0
