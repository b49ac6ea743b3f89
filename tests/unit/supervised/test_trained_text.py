"""What is trained is the text of the row, once, with one end token; other rows are refused."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpost.errors import DataError
from rlpost.extensions.supervised.tokenizer import SupervisedTokenizer
from rlpost.tasks.prompts import PromptFields, PromptSet
from tests.unit.tasks.sets import byte_tokenizer, write

END, TAGS = "<|end|>", ("<think>", "</think>")
MARKED = "<|{{ m.role }}|>"
PLAIN = (
    "{% for m in messages %}" + MARKED + "{{ m.content }}{% if m.role == 'assistant' %}<|end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
OPENS = PLAIN.replace("<|assistant|>{%", "<|assistant|><think>\n{%")  # as DeepSeek-R1, QwQ
CLOSES = PLAIN.replace("<|assistant|>{%", "<|assistant|><think>\n\n</think>\n\n{%")
STRIPS = PLAIN.replace("m.content }}", "m.content.split('</think>')[-1] }}")
QWEN = PLAIN.replace(  # as Qwen3: the thought is written in its own form, once
    "{{ m.content }}",
    "{% if m.role == 'assistant' and '</think>' in m.content %}{{ '<think>\n' + "
    "m.content.split('</think>')[0].split('<think>')[-1].strip('\n') + '\n</think>\n\n' + "
    "m.content.split('</think>')[-1].lstrip('\n') }}{% else %}{{ m.content }}{% endif %}",
)
TEMPLATES = {"plain": PLAIN, "opens": OPENS, "closes": CLOSES, "strips": STRIPS, "qwen": QWEN}
TEXTS = st.lists(
    st.sampled_from(
        ["a", "bc", " ", "\n", "  ", "é", "数", "{", "<think>", "</think>", END, "<|user|>", "<|"]
    ),
    max_size=6,
).map("".join)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict[str, SupervisedTokenizer]:
    made = {}
    for name, template in TEMPLATES.items():
        folder = tmp_path_factory.mktemp(name)
        byte_tokenizer(folder, template)
        made[name] = SupervisedTokenizer(folder, apply_chat_template=True)
    return made


def trained_texts(tokenize: SupervisedTokenizer, row: dict[str, Any], path: Path) -> list[str]:
    """Return the text of each trained part of a row that a file holds, end tokens included."""
    label_key = "label" if "label" in row else None
    prompts = PromptSet(
        write(path, row),
        tokenize=tokenize,
        fields=PromptFields("input", label_key=label_key, trains_label=True),
        whole=tokenize.whole,
    )
    (prompt,) = prompts.all()
    (scored,) = tokenize.group(prompt).samples
    sample, at, texts = scored.sample, 0, []
    assert list(tokenize.whole(prompt)) == [*sample.prompt_ids, *sample.response_ids]
    for value, count in sample.mask.runs:
        part = list(sample.response_ids[at : at + count])
        texts += [written(tokenize, part)] if value else []
        at += count
    return texts


def written(tokenize: SupervisedTokenizer, ids: Sequence[int]) -> str:
    return tokenize._tokenizer.decode(list(ids), skip_special_tokens=False)


def chat(*contents: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[at % 2], "content": text} for at, text in enumerate(contents)]


def untagged(text: str) -> str:
    """Return a text without tags of thoughts and white space, which templates place around them."""
    for tag in TAGS:
        text = text.replace(tag, " ")
    return "".join(text.split())


def without_end(text: str) -> str:
    while text.rstrip().endswith(END):
        text = text.rstrip().removesuffix(END)
    return text


@settings(max_examples=150, deadline=None)
@given(label=TEXTS, name=st.sampled_from(sorted(TEMPLATES)))
def test_a_label_is_trained_once_and_ends_once_or_is_refused(
    tokenizers, tmp_path_factory, label: str, name: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "label.jsonl"
    row_text = without_end(label)
    try:
        (text,) = trained_texts(tokenizers[name], {"input": "q", "label": label}, path)
    except DataError as error:
        assert f"{path}, line 1: " in str(error)
        is_contradiction = name == "closes" and row_text.lstrip().startswith("<think>")
        has_special = any(token in row_text for token in (END, "<|user|>"))
        has_text = untagged(row_text)
        assert is_contradiction or has_special or not has_text, (label, error)
        return
    assert text.endswith(END) and text.count(END) == 1
    opened = "<think>\n" if name == "opens" and row_text.lstrip().startswith("<think>") else ""
    assert (opened + text.removesuffix(END)).split() == row_text.split() or (
        # the tag and the white space behind it are the prompt's
        opened and "".join((opened + text.removesuffix(END)).split()) == "".join(row_text.split())
    )


@settings(max_examples=150, deadline=None)
@given(
    answers=st.lists(TEXTS, min_size=1, max_size=2),
    name=st.sampled_from(["plain", "strips", "qwen"]),
)
def test_messages_are_trained_once_and_end_once_or_are_refused(
    tokenizers, tmp_path_factory, answers: list[str], name: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "chat.jsonl"
    contents = [text for answer in answers for text in ("q", answer)]
    row_texts = [without_end(answer) for answer in answers]
    try:
        texts = trained_texts(tokenizers[name], {"input": chat(*contents)}, path)
    except DataError as error:
        assert f"{path}, line 1: " in str(error)
        plain = [text for text in row_texts if untagged(text)]
        if name == "plain" and len(plain) == len(row_texts):
            assert any(token in text for text in row_texts for token in (END, "<|user|>")), error
        return
    for text, row_text in zip(texts, row_texts, strict=True):
        assert text.endswith(END) and text.count(END) == 1
        assert untagged(text.removesuffix(END)) == untagged(row_text)
        for tag in TAGS:  # a template may add those of a thought
            assert row_text.count(tag) <= text.count(tag) <= max(1, row_text.count(tag))


def test_the_tag_that_the_prompt_opens_is_not_trained_twice(tokenizers, tmp_path) -> None:
    row = {"input": "q", "label": "<think>\nhm</think>2"}
    assert trained_texts(tokenizers["opens"], row, tmp_path / "p.jsonl") == [f"hm</think>2{END}"]
    assert trained_texts(tokenizers["plain"], row, tmp_path / "p.jsonl") == [row["label"] + END]
    with pytest.raises(DataError, match="line 1: the label begins with <think>, and the prompt al"):
        trained_texts(tokenizers["closes"], row, tmp_path / "p.jsonl")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"input": chat("q", "<think>hm</think>2")}, r"leaves a part of message 2 .*'hm'"),
        (
            {"input": [*chat("q"), {"role": "assistant", "content": "2", "reasoning_content": "hm"}]},
            r"leaves a part of message 2 .*'hm'",
        ),
        (
            {
                "input": [
                    *chat("q"),
                    {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f"}}]},
                ]
            },
            r"does not write the tool call 'f' of message 2",
        ),
        ({"input": chat("q", "")}, r"message 2 \(role 'assistant'\) has no text to train on"),
        ({"input": chat("q", "a", "r", "")}, r"message 4 .* has no text to train on"),
        ({"input": chat("q", "a<|user|>b")}, r"message 2 .* has '<\|user\|>'"),
        ({"input": chat("q", "a"), "label": "b"}, "the row has a label: two responses"),
        ({"input": chat("q")}, "the row has no response to train on"),
        ({"input": "q", "label": " "}, "'label' is blank, and it is the response"),
        ({"input": "q", "label": END}, "the label has no text to train on"),
        ({"input": "q", "label": {"answer": "2"}}, "use --label-key label.answer"),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_trained_as_it_is_is_named(tokenizers, tmp_path, row, words) -> None:
    with pytest.raises(DataError, match=f"{tmp_path}/p.jsonl, line 1: .*{words}"):
        trained_texts(tokenizers["strips"], row, tmp_path / "p.jsonl")


def test_prompt_and_response_are_bounded_together_and_counted(tokenizers, tmp_path) -> None:
    tokenize = tokenizers["plain"]
    rows = [{"input": "q", "label": "x" * length} for length in (4, 5)]
    length = len(tokenize("q")[1]) + 4 + len([END])
    prompts = PromptSet(
        write(tmp_path / "p.jsonl", *rows),
        tokenize=tokenize,
        fields=PromptFields("input", label_key="label", trains_label=True),
        whole=tokenize.whole,
        max_len=length,
    )
    assert [prompt.label for prompt in prompts.all()] == ["xxxx"]
    assert prompts.counters()["rollout/long_prompts"] == 1


def test_ids_of_responses_are_compared_with_the_models_vocabulary(tokenizers, tmp_path) -> None:
    tokenize = tokenizers["plain"]
    (largest,) = tokenize.encode("</think>")
    prompts = PromptSet(
        write(tmp_path / "p.jsonl", {"input": "q", "label": "a</think>b"}),
        tokenize=tokenize,
        fields=PromptFields("input", label_key="label", trains_label=True),
        whole=tokenize.whole,
        vocab_size=largest,
    )
    with pytest.raises(DataError, match=f"line 1: the tokenizer gives the id {largest}, and the m"):
        prompts.all()


def test_the_tag_that_messages_are_written_without_is_named(tokenizers, tmp_path) -> None:
    words = "begins a new answer with '<think>.n', and writes this one without it; give the prompt"
    with pytest.raises(DataError, match=words):
        trained_texts(
            tokenizers["opens"], {"input": chat("q", "hm</think>2")}, tmp_path / "p.jsonl"
        )


def test_a_template_that_opens_the_thought_may_have_it_in_the_message(tmp_path) -> None:
    folder = tmp_path / "opening"
    template = PLAIN.replace(
        "{{ m.content }}", "{% if m.role == 'assistant' %}<think>\n{% endif %}{{ m.content }}"
    )
    byte_tokenizer(folder, template.replace("<|assistant|>{%", "<|assistant|><think>\n{%"))
    tokenize = SupervisedTokenizer(folder, apply_chat_template=True)
    row = {"input": chat("q", "hm</think>2")}
    assert trained_texts(tokenize, row, tmp_path / "p.jsonl") == [f"hm</think>2{END}"]
    row = {"input": chat("q", "<think>hm</think>2")}
    with pytest.raises(
        DataError, match="has <think> 1 times, and as the chat template writes it 2"
    ):
        trained_texts(tokenize, row, tmp_path / "p.jsonl")


def test_a_label_of_a_family_with_channels_has_them(tmp_path) -> None:
    special = ("<|return|>", "<|end|>", "<|call|>", "<|start|>", "<|channel|>", "<|message|>")
    harmony = (
        "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}"
        "<|message|>{{ m.content }}{% if loop.last and m.role == 'assistant' %}<|return|>"
        "{% else %}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    )
    folder, path = tmp_path / "model", tmp_path / "p.jsonl"
    byte_tokenizer(folder, harmony, special=special)
    architectures = {"architectures": ["GptOssForCausalLM"], "eos_token_id": 256}
    (folder / "config.json").write_text(json.dumps(architectures))
    tokenize = SupervisedTokenizer(folder, apply_chat_template=True)
    final = "<|channel|>final<|message|>2<|return|>"
    assert trained_texts(tokenize, {"input": "q", "label": final}, path) == [final]
    assert trained_texts(tokenize, {"input": chat("q", "2")}, path) == [final]
    for row, words in (
        ({"input": "q", "label": "2"}, "writes its answers in channels, and the label has none"),
        ({"input": chat("q", "2<|end|>3")}, r"message 2 .* has '<\|end\|>'"),
    ):
        with pytest.raises(DataError, match=words):
            trained_texts(tokenize, row, path)


def test_a_token_over_the_beginning_of_a_message_is_trained(tmp_path) -> None:
    """A word and the space before it are often one token."""
    folder = tmp_path / "model"
    spaced = PLAIN.replace("<|{{ m.role }}|>", "<|{{ m.role }}|>: ").replace(
        "<|assistant|>{", "<|assistant|>: {"
    )
    byte_tokenizer(folder, spaced, merges=[("\u0120", "h")])
    tokenize = SupervisedTokenizer(folder, apply_chat_template=True)
    row = {"input": chat("q", "hi")}
    assert trained_texts(tokenize, row, tmp_path / "p.jsonl") == [f" hi{END}"]


def test_a_row_is_shown_with_what_is_trained(tokenizers, tmp_path) -> None:
    tokenize = tokenizers["plain"]
    text, ids = tokenize(chat("q", "a", "r", "b" * 50))
    (prompt,) = PromptSet(
        write(tmp_path / "p.jsonl", {"input": json.loads(text)}),
        tokenize=tokenize,
        fields=PromptFields("input"),
    ).all()
    assert prompt.token_ids == ids
    shown = tokenize.marked(prompt, most=40)
    assert shown == (
        "<|user|>q<|assistant|>⟦a<|end|>⟧<|user|>r<|assistant|>⟦"
        + "b" * 20 + " ... " + "b" * 13 + "<|end|>⟧"
    )  # fmt: skip
