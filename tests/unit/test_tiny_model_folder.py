"""rlpost/extensions/fetching/tiny_model.py writes into its own folder only, never into one with another model."""

import pytest

from rlpost.extensions.agents.chat_messages import Message
from rlpost.extensions.agents.chat_template import ChatTemplate
from rlpost.extensions.agents.policy import Policy
from rlpost.extensions.fetching.tiny_model import (
    AGENTS_TEMPLATE,
    CHARACTERS,
    CHAT_TEMPLATE,
    OF_CALLS,
    is_complete,
    make_tokenizer,
    produce,
    publish,
)

SETTINGS = {"seed": 1}


def make(text):
    def fill(built):
        (built / "config.json").write_text(text)
        return 0.5

    return fill


def test_a_folder_with_another_model_is_not_changed(tmp_path):
    (tmp_path / "config.json").write_text("of a model of 400 GB")
    with pytest.raises(SystemExit, match=r"holds config\.json and no tiny_model\.json"):
        produce(tmp_path, SETTINGS, make("tiny"))
    assert (tmp_path / "config.json").read_text() == "of a model of 400 GB"


def test_the_tiny_model_is_made_again_with_other_settings_and_after_a_crash(tmp_path, monkeypatch):
    produce(tmp_path, SETTINGS, make("first"))
    built = tmp_path / ".building"
    built.mkdir()
    (built / "config.json").write_text("half")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("builtins.sorted", interrupted)
        publish(built, tmp_path, {"settings": {"seed": 2}})
    assert not is_complete(tmp_path, SETTINGS)
    produce(tmp_path, {"seed": 3}, make("third"))
    assert (tmp_path / "config.json").read_text() == "third" and is_complete(tmp_path, {"seed": 3})


def interrupted(*_):
    raise KeyboardInterrupt


def test_the_template_for_agents_writes_tools_and_calls_that_the_gateway_reads(tmp_path):
    """Conversations without tools are those of the tiny model, and their characters have ids."""
    texts = []
    for for_agents in (False, True):
        folder = tmp_path / str(for_agents)
        characters = CHARACTERS + OF_CALLS if for_agents else CHARACTERS
        template = AGENTS_TEMPLATE if for_agents else CHAT_TEMPLATE
        make_tokenizer(template=template, characters=characters).save_pretrained(folder)
        policy = Policy(ChatTemplate(str(folder)))
        texts.append(policy.template.render([Message("user", "Q:01+02")], ()))
        assert policy.format == ("qwen" if for_agents else "none")
    assert texts[0] == texts[1]
    call = '<tool_call>{"name": "f", "arguments": {"a_b": 1}}</tool_call>'
    assert policy.template.decode(policy.template.encode(call)) == call
