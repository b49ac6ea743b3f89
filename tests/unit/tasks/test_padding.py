"""A tokenizer that cannot pad is refused where an engine pads each request with images."""

import json

import pytest
from transformers import PreTrainedTokenizerFast

from rlpost.config.load import load
from rlpost.errors import ConfigError
from rlpost.tasks.prompt_settings import prompt_set
from rlpost.tasks.tokenizer import PromptTokenizer
from tests.image_model import make_image_folder
from tests.unit.tasks.sets import write


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    make_image_folder(folder)
    return folder


def read_prompts(model):
    rollout = {"multimodal_keys": {"image": "images"}, "apply_chat_template": True}
    config = load([], {"checkpoint": {"hf_checkpoint": str(model)}, "rollout": rollout}).config
    source = write(model / "rows.jsonl", {"input": "1+1="})
    tokenizer = PromptTokenizer(model, apply_chat_template=True)
    return prompt_set([str(source)], config, config.rollout, tokenizer)


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("pad_token", [None, "<|end|>"])
def test_what_transformers_cannot_pad_is_refused_before_an_engine_refuses_it(
    model, kind, pad_token
):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": kind}))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    if pad_token is not None:
        tokenizer.pad_token = pad_token
        tokenizer.save_pretrained(model)
    try:
        tokenizer(["a", "bc"], padding=True)
        can_pad = True
    except ValueError:
        can_pad = False
    assert can_pad == (pad_token is not None)
    if can_pad or kind == "qwen3_vl":  # of which an engine reads each image alone
        assert len(read_prompts(model)) == 1
    else:
        with pytest.raises(ConfigError, match="no pad_token, and engines refuse each prompt"):
            read_prompts(model)
