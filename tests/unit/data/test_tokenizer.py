"""Tokenizer folders are checked without heavy imports, and used through one callable."""

import json
from pathlib import Path

import pytest

from rlpost.data.tokenizer import PromptTokenizer, check_tokenizer_folder, eos_token_ids
from rlpost.errors import ConfigError, DataError

MESSAGES = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
TEMPLATE = MESSAGES + "{% if add_generation_prompt %}>{% endif %}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocab = {letter: i for i, letter in enumerate("?abcdefghijklmnopqrstuvwxyz[]>")}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="?"))
    core.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="?", chat_template=TEMPLATE
    ).save_pretrained(tmp_path)
    return tmp_path


def test_a_string_is_tokenised_unchanged(folder: Path) -> None:
    check_tokenizer_folder(folder)
    assert PromptTokenizer(folder)("abc") == ("abc", (1, 2, 3))


def test_the_chat_template_takes_a_string_or_messages(folder: Path) -> None:
    tokenize = PromptTokenizer(folder, apply_chat_template=True)
    text, ids = tokenize("abc")
    assert text == "[user]abc>"
    assert len(ids) == len(text)
    assert tokenize([{"role": "user", "content": "abc"}]) == (text, ids)
    assert (
        tokenize([{"role": "system", "content": "x"}, {"role": "user", "content": "y"}])[0]
        == "[system]x[user]y>"
    )


def test_the_chat_template_gets_tools_and_further_arguments(folder: Path) -> None:
    template = "{% for t in tools or [] %}{{ t['name'] }}|{% endfor %}{{ mood }}:{{ messages[0]['content'] }}"
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(template)
    tokenize = PromptTokenizer(folder, apply_chat_template=True, template_kwargs={"mood": "calm"})
    assert tokenize("abc", [{"name": "add"}, {"name": "sub"}])[0] == "add|sub|calm:abc"
    assert tokenize("abc")[0] == "calm:abc"
    with pytest.raises(DataError, match="has tools"):
        PromptTokenizer(folder)("abc", [{"name": "add"}])


def test_a_prompt_that_the_chat_template_rejects_is_bad_data(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ raise_exception('roles must take turns') }}")
    with pytest.raises(DataError, match="roles must take turns"):
        PromptTokenizer(folder, apply_chat_template=True)("abc")


def test_messages_without_the_chat_template_are_refused(folder: Path) -> None:
    with pytest.raises(DataError, match="--apply-chat-template"):
        PromptTokenizer(folder)([{"role": "user", "content": "abc"}])


def test_a_missing_folder_or_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere: no such folder"):
        check_tokenizer_folder(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"needs one of tokenizer\.json"):
        check_tokenizer_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json is missing"):
        check_tokenizer_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        check_tokenizer_folder(tmp_path)


def test_end_tokens_are_those_of_both_configs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="eos_token_id"):
        eos_token_ids(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert eos_token_ids(tmp_path) == (5,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5, 2]}))
    assert eos_token_ids(tmp_path) == (2, 5, 7)
