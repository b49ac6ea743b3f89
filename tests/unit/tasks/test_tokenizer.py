"""Tokenizer folders are checked without heavy imports, and used through one callable."""

import importlib.util
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpost.errors import ConfigError, DataError
from rlpost.tasks.tokenizer import (
    PromptTokenizer,
    check_all_rendered,
    check_tokenizer_folder,
    eos_token_ids,
    hf_tokenizer,
    render_chat,
)
from tests.unit.tasks.sets import byte_tokenizer

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
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: is a pointer of git LFS"):
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


@pytest.mark.parametrize("ends", ["5", [1, "2"], -1, True, 1.0])
def test_an_end_token_is_an_id(tmp_path: Path, ends) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    with pytest.raises(ConfigError, match=r"eos_token_id = .*; give an id, or a list of ids"):
        eos_token_ids(tmp_path)


def test_the_end_token_of_the_tokenizer_ends_an_answer_too(folder: Path) -> None:
    """Blaizzy/mlx-vlm#2112: configs may name <|endoftext|> alone, and the template another token."""
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7]}))
    assert PromptTokenizer(folder).end_ids == {7}
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"eos_token": "]"}))
    assert PromptTokenizer(folder).end_ids == {7, 28}


def with_template(folder: Path, template: str) -> PromptTokenizer:
    (folder / "chat_template.jinja").write_text(template)
    return PromptTokenizer(folder, apply_chat_template=True)


def test_every_error_of_a_template_is_bad_data_with_its_own_words(folder: Path) -> None:
    for template, words in [
        ("{{ 1 // 0 }}", "ZeroDivisionError: integer division or modulo by zero"),
        ("{{ messages[0]['content']['x']['y'] }}", "has no attribute 'x'"),
        ("{{ messages | nothing }}", "No filter named 'nothing'"),
        ("{{ raise_exception('') }}", "TemplateError"),
    ]:
        with pytest.raises(DataError, match=f"the chat template rejects the messages: .*{words}"):
            with_template(folder, template)("abc")


def test_a_message_that_the_template_leaves_out_is_bad_data(folder: Path) -> None:
    known = "{% for m in messages if m['role'] in ('system', 'user', 'assistant') %}"
    tokenize = with_template(folder, known + "{{ m['content'] }}{% endfor %}")
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "abc"}]
    with pytest.raises(DataError, match=r"leaves out message 1 \(role 'developer'\): 'be brief'"):
        tokenize(messages)
    first_system = "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}{% endif %}"
    users = "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}"
    systems = [{"role": "system", "content": text} for text in ("one", "one")]
    with pytest.raises(DataError, match=r"leaves out message 2 \(role 'system'\): 'one'"):
        with_template(folder, first_system + users)([*systems, {"role": "user", "content": "x"}])


def test_a_template_may_trim_escape_and_leave_out_thoughts(folder: Path) -> None:
    answer = "{% if m['role'] == 'assistant' %}{{ m['content'].split('</think>')[-1] }}"
    tool = "{% elif m['role'] == 'tool' %}{{ m['content'] | tojson }}"
    template = "{% for m in messages %}" + answer + tool
    template += "{% else %}{{ m['content'] | trim }}{% endif %}{% endfor %}"
    messages = [
        {"role": "user", "content": "  abc\n\n"},
        {"role": "assistant", "content": "<think>hm</think>de"},
        {"role": "tool", "content": 'a "b"\nc'},
    ]
    assert with_template(folder, template)(messages)[0] == 'abcde"a \\"b\\"\\nc"'


@given(st.lists(st.sampled_from(["a", "b", " ", "\n", "\t", "é", '"', "\\", "{"])).map("".join))
def test_a_tools_result_may_be_written_as_text_or_as_json(content: str) -> None:
    """Code, tables and tracebacks have several spaces in a row."""
    messages = [{"role": "tool", "content": content}]
    for text in (content, content.strip()):
        for is_ascii in (False, True):
            for written in (text, json.dumps(text, ensure_ascii=is_ascii)):
                check_all_rendered(messages, f"<|tool|>{written}<|end|>")
    if content.strip():
        with pytest.raises(DataError, match="leaves out message 1"):
            check_all_rendered(messages, "<|tool|><|end|>")


def test_a_prompt_that_ends_with_an_answer_is_refused(folder: Path) -> None:
    messages = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "de"}]
    with pytest.raises(DataError, match="the last message is the assistant's: the chat template"):
        PromptTokenizer(folder, apply_chat_template=True)(messages)


def test_the_added_tokens_that_a_template_writes_are_known(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path, "<|user|>{{ messages[0].content }}<|assistant|><think>")
    tokenize = PromptTokenizer(tmp_path, apply_chat_template=True)
    assert tokenize.template_tokens == ("<|user|>", "<|assistant|>", "<think>")
    assert set(tokenize.special_tokens) == {"<|end|>", "<|user|>", "<|assistant|>"}


def add_to_texts(folder: Path, before: dict[str, int], after: dict[str, int]) -> None:
    """Let the tokenizer add these tokens around each text."""
    core = json.loads((folder / "tokenizer.json").read_text())

    def tokens(added: dict[str, int]) -> list[dict[str, object]]:
        return [{"SpecialToken": {"id": name, "type_id": 0}} for name in added]

    core["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [*tokens(before), {"Sequence": {"id": "A", "type_id": 0}}, *tokens(after)],
        "pair": [],
        "special_tokens": {
            name: {"id": name, "ids": [number], "tokens": [name]}
            for name, number in (before | after).items()
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(core))


@pytest.mark.parametrize("before", [{}, {"[": 27}])
def test_a_prompt_does_not_end_with_the_token_that_the_tokenizer_adds(folder: Path, before) -> None:
    """``add_eos_token`` of a tokenizer that was saved for training on documents."""
    add_to_texts(folder, before, {"]": 28})
    plain, whole = PromptTokenizer(folder), [*before.values(), 1, 2]
    assert list(plain("ab")[1]) == whole
    assert list(plain("ab]")[1]) == [*whole, 28], "that of the text stays"
    assert list(plain.encode_whole("ab")) == [*whole, 28], "as engines encode a text"
    templated = with_template(folder, "{{ messages[0]['content'] }}]")
    assert list(templated("ab")[1]) == [1, 2, 28], "that of the template stays"


@pytest.mark.parametrize("kind", ["BPE", "WordLevel"])
def test_no_token_of_a_prompt_is_taken_for_one_that_the_tokenizer_adds(
    folder: Path, kind: str
) -> None:
    """The vocabulary has no letters: "a" is no token of it, or an error."""
    core = json.loads((folder / "tokenizer.json").read_text())
    vocab = {letter: number for number, letter in enumerate("0123456789+=")}
    core["model"] = {"type": kind, "vocab": vocab}
    core["model"] |= {"merges": []} if kind == "BPE" else {"unk_token": "?"}
    core["added_tokens"] = []
    (folder / "tokenizer.json").write_text(json.dumps(core))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    add_to_texts(folder, {"[": 27}, {})
    text = "12+3=" if kind == "BPE" else "7"
    assert list(PromptTokenizer(folder)(text)[1]) == [27, *(vocab[letter] for letter in text)]


def test_the_bos_occurs_once(folder: Path) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    add_to_texts(folder, {"[": 27}, {})
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "bos_token": "["}))
    tokenize = PromptTokenizer(folder)
    assert tokenize("ab")[1] == tokenize("[ab")[1] == (27, 1, 2)
    assert with_template(folder, "{{ bos_token }}{{ messages[0]['content'] }}")("[ab")[1] == (
        27,
        1,
        2,
    )


def test_the_template_of_an_older_processor_is_read(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    assert PromptTokenizer(folder, apply_chat_template=True)("abc")[0] == "[user]abc>"


def test_code_of_a_tokenizer_is_refused_and_never_asked_about(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on standard input"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {
        "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]},
        "tokenizer_class": "OwnTokenizer",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "own"}))
    (folder / "own.py").write_text("raise SystemExit('executed')")
    with pytest.raises(ConfigError, match="cannot be loaded without code of the folder"):
        hf_tokenizer(str(folder))
    (folder / "tokenizer.json").rename(folder / "tiktoken.model")
    for model_type in ("own", "deepseek_v3"):
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
        with pytest.raises(ConfigError, match=r"own\.OwnTokenizer.* is never run; add a tokenizer"):
            PromptTokenizer(folder)


def test_published_templates_leave_out_only_roles_that_they_do_not_know() -> None:
    """With the templates that TRL ships."""
    from transformers.utils.chat_template_utils import render_jinja_template

    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("TRL is not installed")
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    system = {"role": "system", "content": 'Be  brief <b> & "x".\n'}
    user = {"role": "user", "content": " hello\n\nworld é "}
    answer = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nfine answer"}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "name": "f", "tool_call_id": "abcdefghi", "content": '{"r": "é"}\nz'}
    checked, left_out = 0, set()
    for file in sorted((Path(spec.origin).parent / "chat_templates").glob("*.jinja")):
        for messages in ([system, user, answer, user], [user, calling, result]):
            try:
                ((text,), _) = render_jinja_template(
                    conversations=[messages],
                    chat_template=file.read_text(),
                    add_generation_prompt=True,
                    bos_token="<s>",
                    eos_token="</s>",
                )
            except Exception:  # it refuses the roles, or needs parts of content
                continue
            checked += 1
            try:
                check_all_rendered(messages, text)
            except DataError as error:
                role = str(error).partition("(role '")[2].partition("'")[0]
                left_out.add((file.stem.removesuffix("_training"), role))
    assert checked > 50
    assert left_out == {
        ("phi3", "tool"),
        ("phi3_5", "tool"),
        ("cohere2", "tool"),
        ("smolvlm", "system"),  # these two read contents as lists of parts only
        ("idefics3", "system"),
    }


CALLS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALL{% endfor %}{% endfor %}"
)


def calling(tmp_path: Path, call: str) -> list[str]:
    """Return the texts of a conversation with a tool call, as prompt and as the gateway has it."""
    byte_tokenizer(tmp_path, CALLS.replace("CALL", call))
    function = {"name": "f", "arguments": {"a": "é"}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "x", "tool_calls": [{"function": function}]},
        {"role": "tool", "content": "r"},
    ]
    before = json.dumps(messages)
    gateway = render_chat(hf_tokenizer(str(tmp_path)), messages, {"add_generation_prompt": True})
    prompt, _ = PromptTokenizer(tmp_path, apply_chat_template=True)(messages)
    assert json.dumps(messages) == before
    return [prompt, gateway]


@pytest.mark.parametrize(
    "call",
    [
        "{{ c.function.name + c.function.arguments }}",  # as DeepSeek-V3 and R1
        "{{ c.function.name }}{{ c.function.arguments | tojson }}",  # as Qwen2.5
    ],
)
def test_arguments_of_calls_are_written_once_whichever_form_the_template_reads(
    tmp_path: Path, call: str
) -> None:
    expected = '[user]q[assistant]xf{"a": "é"}[tool]r'
    assert calling(tmp_path, call) == [expected, expected]


def test_a_prompt_of_which_the_template_leaves_out_the_calls_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="leaves out the tool calls of assistant messages"):
        calling(tmp_path, "")
