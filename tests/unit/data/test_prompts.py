"""Prompt files: what is wrong is named with file, line and a way out; what is right is read by position."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlpost.data.prompts import PromptSet, check_prompt_file
from rlpost.errors import DataError


def letters(content: object) -> tuple[str, tuple[int, ...]]:
    """A tokenizer of one id a character."""
    text = content if isinstance(content, str) else "".join(message["content"] for message in content)
    return text, tuple(ord(letter) for letter in text)


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


GOOD = {"prompt": "Q", "label": "A"}


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ('{"prompt": "Q", ', "not JSON"),
        ("[1, 2]", "list instead of a JSON object"),
        ({"question": "Q", "label": "A"}, "no key 'prompt'; it has 'question', 'label'. Set --input-key"),
        ({"prompt": "Q"}, "no key 'label'"),
        ({"prompt": 7, "label": "A"}, "'prompt' is int"),
        ({"prompt": "", "label": "A"}, "'prompt' is empty"),
        ({"prompt": [], "label": "A"}, "'prompt' is list"),
        ({"prompt": [{"role": "user"}], "label": "A"}, "'role' and 'content'"),
        ({"prompt": "Q", "label": ["A"]}, "'label' is list"),
        ({"prompt": "Q", "label": True}, "'label' is bool"),
    ],
)
def test_a_broken_line_is_named_with_file_and_line(tmp_path: Path, line: object, wanted: str) -> None:
    path = write(tmp_path / "p.jsonl", GOOD, "", line, GOOD)
    with pytest.raises(DataError) as error:
        check_prompt_file(path, "prompt", "label")
    assert f"{path}, line 3" in str(error.value)
    assert wanted in str(error.value)


def test_messages_without_a_chat_template_are_refused_only_then(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": [{"role": "user", "content": "Q"}], "label": "A"})
    assert check_prompt_file(path, "prompt", "label") == 1
    with pytest.raises(DataError, match=r"line 1.*--apply-chat-template"):
        check_prompt_file(path, "prompt", "label", apply_chat_template=False)


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_an_empty_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match="no prompts"):
        check_prompt_file(path, "prompt")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.jsonl.*No such file"):
        check_prompt_file(tmp_path / "nowhere.jsonl", "prompt")


def test_every_position_is_its_line_whatever_the_alphabet_and_the_blank_lines(tmp_path: Path) -> None:
    texts = ["eins", "zwei größer", "三", "four"]
    path = tmp_path / "p.jsonl"
    path.write_text("\n\n".join(json.dumps({"prompt": t, "label": i}, ensure_ascii=False) for i, t in enumerate(texts)))
    prompts = PromptSet(path, tokenize=letters, input_key="prompt", label_key="label")
    assert check_prompt_file(path, "prompt", "label") == len(prompts) == 4
    for position in (3, 0, 2, 1):
        prompt = prompts.prompt(position, prompt_id=position + 40)
        assert (prompt.prompt_id, prompt.text, prompt.label) == (position + 40, texts[position], str(position))
        assert prompt.token_ids == letters(texts[position])[1]


def test_the_rest_of_a_line_is_metadata(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {**GOOD, "source": "book", "page": 3})
    prompt = PromptSet(path, tokenize=letters, input_key="prompt", label_key="label").prompt(0, 0)
    assert prompt.metadata == {"source": "book", "page": 3}


def test_the_check_needs_nothing_heavy(tmp_path: Path) -> None:
    """It runs on a login node."""
    path = write(tmp_path / "p.jsonl", GOOD)
    program = (
        "import sys; from rlpost.data.prompts import check_prompt_file; import rlpost.data.tokenizer;"
        f"check_prompt_file({str(path)!r}, 'prompt', 'label');"
        "heavy = {'torch', 'transformers', 'numpy', 'ray', 'sglang'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
