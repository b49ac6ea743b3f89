"""Supervised examples: exactly the tokens of the assistant are trained."""

import importlib.util
import json
from pathlib import Path

import pytest

from rlpost.errors import DataError
from rlpost.extensions.supervised.tokenizer import SupervisedTokenizer
from rlpost.types import Prompt

TEMPLATE = (
    "{% for m in messages %}[{{ m['role'][0] }}]{{ m['content'] }}{% if m['role'] == 'assistant' %};{% endif %}|"
    "{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)
REWRITING = "{% for m in messages %}{% if loop.last or m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}"


def tokenizer(folder, template=TEMPLATE, **template_kwargs):
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocab = {letter: i for i, letter in enumerate("?abcdefghijklmnopqrstuvwxyz[]|;")}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="?"))
    core.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="?", eos_token=";", chat_template=template
    )
    made.save_pretrained(folder)
    return SupervisedTokenizer(folder, apply_chat_template=True, template_kwargs=template_kwargs)


def sample_of(tokenize, content, label=None):
    text, ids = tokenize(content)
    (scored,) = tokenize.group(Prompt(7, text, ids, label)).samples
    return scored.sample


def trained(tokenize, sample):
    """Return the trained text, with ``_`` for each token that is not trained."""
    pairs = zip(sample.response_ids, sample.mask, strict=True)
    return "".join((tokenize.decode([token]) or ";") if mask else "_" for token, mask in pairs)


def test_a_label_is_the_response_and_gets_an_end_token(tmp_path):
    tokenize = tokenizer(tmp_path)
    sample = sample_of(tokenize, "abc", label="xyz")
    assert tokenize.decode(sample.prompt_ids) == "[u]abc|[a]"
    assert trained(tokenize, sample) == "xyz;" and sample.prompt_id == 7


def test_every_assistant_message_is_trained_up_to_its_end_token(tmp_path):
    tokenize = tokenizer(tmp_path)
    turns = [("user", "ab"), ("assistant", "cd"), ("user", "ef"), ("assistant", "gh")]
    sample = sample_of(tokenize, [{"role": role, "content": content} for role, content in turns])
    assert tokenize.decode(sample.prompt_ids) == "[u]ab|[a]"
    assert trained(tokenize, sample) == "cd;" + "_" * len("|[u]ef|[a]") + "gh;_"


def test_a_prompt_without_a_response_and_a_template_that_rewrites_turns_are_refused(tmp_path):
    tokenize = tokenizer(tmp_path)
    with pytest.raises(DataError, match="prompt 7 has no response to train on; set --label-key"):
        sample_of(tokenize, [{"role": "user", "content": "ab"}])
    with pytest.raises(DataError, match="needs a message before"):
        tokenize([{"role": "assistant", "content": "ab"}])
    rewriting = tokenizer(tmp_path, REWRITING)
    turns = [("user", "ab"), ("assistant", "cd"), ("user", "ef"), ("assistant", "gh")]
    with pytest.raises(DataError, match=r"message 2 .* template rewrites earlier turns"):
        rewriting([{"role": role, "content": content} for role, content in turns])


def test_arguments_of_the_chat_template_apply_to_conversations_too(tmp_path):
    template = "{{ mark }}" + TEMPLATE
    turns = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
    sample = sample_of(tokenizer(tmp_path, template, mark="x"), turns)
    assert tokenizer(tmp_path).decode(sample.prompt_ids) == "x[u]ab|[a]"


def test_a_conversation_that_the_chat_template_refuses_is_bad_data(tmp_path):
    template = "{{ raise_exception('roles must alternate') if messages|length > 1 }}" + TEMPLATE
    turns = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
    with pytest.raises(
        DataError, match="the chat template rejects the messages: roles must alternate"
    ):
        tokenizer(tmp_path, template)(turns)


GLM = (  # as in GLM-4.5: no end token, the next role's token ends an answer
    "{% for m in messages %}{{ '[' if m['role'] == 'user' else ']' }}{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}]{% endif %}"
)


def test_the_token_of_the_next_role_is_trained_where_it_ends_an_answer(tmp_path):
    tokenize = tokenizer(tmp_path, GLM)
    turns = [("user", "ab"), ("assistant", "cd"), ("user", "ef"), ("assistant", "gh")]
    messages = [{"role": role, "content": content} for role, content in turns]
    assert trained(tokenize, sample_of(tokenize, messages)) == "cd" + "_" * len("[ef]") + "gh;"
    (next_role,) = tokenize.encode("[")
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": [{next_role}]}}')
    tokenize = SupervisedTokenizer(tmp_path, apply_chat_template=True)
    assert trained(tokenize, sample_of(tokenize, messages)) == "cd[" + "_" * len("ef]") + "gh["


def test_the_end_tokens_of_the_generation_config_end_an_answer(tmp_path):
    """As in Gemma 3, whose eos_token is not the token that ends a turn."""
    template = TEMPLATE.replace("%};{%", "%}[{%")
    tokenize = tokenizer(tmp_path, template)
    (end_of_turn,) = tokenize.encode("[")
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {end_of_turn}}}')
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
    assert trained(tokenize, sample_of(tokenize, messages)) == "cd[_"
    beyond_vocabulary = 10**6
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [end_of_turn, beyond_vocabulary]})
    )
    tokenize = SupervisedTokenizer(tmp_path, apply_chat_template=True)
    assert trained(tokenize, sample_of(tokenize, messages)) == "cd[_"


def test_a_conversation_of_which_the_template_leaves_out_a_message_is_refused(tmp_path):
    template = "{% for m in messages if m['role'] != 'developer' %}{{ m['content'] }}{% endfor %}"
    turns = [("user", "ab"), ("developer", "xyz"), ("assistant", "cd")]
    messages = [{"role": role, "content": content} for role, content in turns]
    with pytest.raises(DataError, match=r"leaves out message 2 \(role 'developer'\): 'xyz'"):
        tokenizer(tmp_path, template)(messages)


def published(folder, name, special, ends):
    """Make a byte-level tokenizer with a published template, as TRL ships it, and its tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    spec = importlib.util.find_spec("trl")
    if spec is None:
        pytest.skip("TRL is not installed")
    template = (Path(spec.origin).parent / f"chat_templates/{name}.jinja").read_text()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(special)
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=special[0], eos_token=special[1], chat_template=template
    )
    made.save_pretrained(folder)
    ids = [core.token_to_id(token) for token in ends]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return SupervisedTokenizer(folder, apply_chat_template=True), made


@pytest.mark.parametrize(
    ("name", "special", "ends"),
    [
        (
            "glm4moe",
            ["[gMASK]", "<|endoftext|>", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>"],
            ["<|endoftext|>", "<|user|>", "<|observation|>"],
        ),
        (
            "gemma3",
            ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
            ["<eos>", "<end_of_turn>"],
        ),
        (
            "llama3",
            ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
            ["<|end_of_text|>", "<|eot_id|>"],
        ),
        (
            "phi3",
            ["<s>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"],
            ["<|endoftext|>", "<|end|>"],
        ),
        ("qwen2_5", ["<|endoftext|>", "<|im_end|>", "<|im_start|>"], ["<|im_end|>", "<|endoftext|>"]),
    ],
)  # fmt: skip
def test_published_templates_train_the_token_that_ends_the_answer(tmp_path, name, special, ends):
    tokenize, tokenizer = published(tmp_path, name, special, ends)
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
    sample = sample_of(tokenize, messages)
    trained_ids = [i for i, mask in zip(sample.response_ids, sample.mask, strict=True) if mask]
    *answer, last = tokenizer.convert_ids_to_tokens(trained_ids)
    assert last in ends
    assert not set(answer) & set(special)
    assert "".join(answer).endswith("cd")


@pytest.mark.parametrize(
    "written", [{}, {"reasoning_content": "hm"}, {"content": "<think>hm</think>cd"}]
)
def test_an_answer_with_a_thought_or_a_call_ends_as_the_template_ends_it(tmp_path, written):
    """Those of GLM-4.5 end with the next role's token, which a later message would move away."""
    name, special, ends = (
        "glm4moe",
        ["[gMASK]", "<|endoftext|>", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>"],
        ["<|endoftext|>", "<|user|>", "<|observation|>"],
    )
    tokenize, tokenizer = published(tmp_path, name, special, ends)
    question = {"role": "user", "content": "ab"}
    answer = {"role": "assistant", "content": "cd", **written}
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    for message, end in (
        (answer, "<|user|>"),
        ({**answer, "tool_calls": [call]}, "<|observation|>"),
    ):
        sample = sample_of(tokenize, [question, message])
        assert list(sample.mask)[-1] == 1
        assert tokenizer.convert_ids_to_tokens(sample.response_ids[-1]) == end
