"""Tokenize prompts; the only module that loads a tokenizer.

Input: a Hugging Face folder; a string or a list of chat messages. Output: text and token ids.
transformers is imported when the first tokenizer is loaded; the checks do not import it and run on
the login node.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypedDict

from common.git_lfs import pointer_problem
from rlpost.errors import ConfigError, DataError
from rlpost.models.families import family_of
from rlpost.tasks.answer_text import (
    BEGIN_OF_THOUGHT,
    END_OF_THOUGHT,
    Channels,
    ThoughtTokens,
)
from rlpost.tasks.messages import Content, text_parts
from rlpost.tasks.without_torch import imports_deferred, load_hf_config

Tools = Sequence[Mapping[str, object]]

END_TOKEN_FILES = ("generation_config.json", "config.json")
# transformers can build a tokenizer from any one of them.
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tiktoken.model")


class Encoded(TypedDict, total=False):
    """The result of calling a tokenizer; offsets are positions of characters, (start, end)."""

    input_ids: list[int]
    offset_mapping: list[tuple[int, int]]


class HfTokenizer(Protocol):
    """The part of transformers' ``PreTrainedTokenizerBase`` that rlpost uses."""

    chat_template: str | dict[str, str] | None
    all_special_ids: list[int]
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token: str | None
    added_tokens_decoder: Mapping[int, Any]

    def __call__(
        self, text: str, *, add_special_tokens: bool = True, return_offsets_mapping: bool = False
    ) -> Encoded:
        """Return the ids of a text, and on request the place of each in it."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text."""

    def convert_ids_to_tokens(self, ids: int) -> str:
        """Return an entry of the vocabulary."""

    def decode(
        self,
        token_ids: list[int],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        """Return the text of ids."""

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, object]], **options: object
    ) -> str:
        """Return the text of a conversation; without ``tokenize=False`` it would be token ids."""


def check_tokenizer_folder(path: str | Path) -> None:
    """Check that a folder holds a tokenizer.

    Raises:
        ConfigError: a file is missing or invalid.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(
            f"--hf-checkpoint {folder}: no such folder; give a Hugging Face folder on this file system"
        )
    if not any((folder / name).is_file() for name in VOCABULARIES):
        raise ConfigError(
            f"--hf-checkpoint {folder}: no tokenizer in it; it needs one of {', '.join(VOCABULARIES)} "
            "(copy them from the model's page)"
        )
    for name in VOCABULARIES:
        if (folder / name).is_file() and (problem := pointer_problem(folder / name)):
            raise ConfigError(f"--hf-checkpoint {problem}")
    settings = folder / "tokenizer_config.json"
    if not settings.is_file():
        raise ConfigError(
            f"--hf-checkpoint {folder}: tokenizer_config.json is missing; copy it from the model's page"
        )
    auto_map = _read_json(settings).get("auto_map")
    if isinstance(auto_map, dict) and "AutoTokenizer" in auto_map and not _is_fast(folder):
        raise ConfigError(
            f"--hf-checkpoint {folder}: its tokenizer is Python code ({auto_map['AutoTokenizer']} in "
            "tokenizer_config.json), which is never run; add a tokenizer.json, which the model's page or "
            "transformers' save_pretrained of a converted tokenizer gives"
        )


def _is_fast(folder: Path) -> bool:
    """Whether a folder has the vocabulary in the format of the library tokenizers."""
    return (folder / "tokenizer.json").is_file()


def eos_token_ids(path: str | Path) -> tuple[int, ...]:
    """Return the ids that end an answer, sorted, by generation_config.json and config.json.

    Raises:
        ConfigError: neither file has any.
    """
    ids: set[int] = set()
    for name in END_TOKEN_FILES:
        file = Path(path) / name
        value = _read_json(file).get("eos_token_id") if file.is_file() else None
        ends = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(one) is int and one >= 0 for one in ends):
            raise ConfigError(
                f"{file}: eos_token_id = {json.dumps(value)}; give an id, or a list of ids"
            )
        ids.update(ends)
    if not ids:
        raise ConfigError(
            f"--hf-checkpoint {path}: neither generation_config.json nor config.json has an eos_token_id, "
            "so no answer would end; add it"
        )
    return tuple(sorted(ids))


def hf_tokenizer(path: str) -> HfTokenizer:
    """Load the tokenizer of a Hugging Face folder.

    Code in the folder is never executed. ``chat_template.json``, where older processors keep the
    template, is read if the tokenizer has none.

    Raises:
        ConfigError: it cannot be loaded, or only by code in the folder.
    """
    with imports_deferred():
        from transformers import AutoTokenizer

        try:
            config = load_hf_config(path)
        except Exception:  # transformers may know the tokenizer without the model
            config = None
        try:
            # None would ask on standard input whether to run the code
            tokenizer = AutoTokenizer.from_pretrained(
                path, config=config, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # any type, from the files' content
            raise ConfigError(
                f"--hf-checkpoint {path}: the tokenizer cannot be loaded without code of the folder: "
                f"{_reason(error)}"
            ) from error
    file = Path(path) / "chat_template.json"
    if not tokenizer.chat_template and file.is_file():
        tokenizer.chat_template = _read_json(file).get("chat_template")
    return tokenizer


class PromptTokenizer:
    """A callable that converts content to (text, token ids)."""

    def __init__(
        self,
        path: str | Path,
        *,
        apply_chat_template: bool = False,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> None:
        """``template_kwargs`` are additional arguments of the chat template."""
        check_tokenizer_folder(path)
        self._folder = Path(path)
        self._tokenizer = hf_tokenizer(str(path))
        self._apply_chat_template = apply_chat_template
        self._template_kwargs = dict(template_kwargs or {})
        self._added = dict(self._tokenizer.added_tokens_decoder)
        self._num_appended = _num_appended(self._tokenizer)
        self._thought_form = self._find_thought_form()
        if apply_chat_template and not self._tokenizer.chat_template:
            raise ConfigError(
                f"--apply-chat-template: the tokenizer in {path} has no chat template; leave the flag out"
            )

    def __call__(self, content: Content, tools: Tools | None = None) -> tuple[str, tuple[int, ...]]:
        """Return text and ids of a prompt; a chat template gets a string as one user message.

        Raises:
            DataError: there is no token, the chat template rejects the messages or tools, or they
                are given without one.
        """
        text = self._text(content, tools)
        # A chat template writes the special tokens itself.
        ids = self._encode(text, add_special_tokens=not self._apply_chat_template)
        if not ids:
            raise DataError(f"a prompt has no token: {content!r}")
        return text, tuple(ids)

    @property
    def end_ids(self) -> set[int]:
        """The ids that end an answer: ``eos_token_ids``, and the tokenizer's end token.

        Engines end an answer at both (``schedule_batch.py`` of SGLang 0.5.21), and a published folder
        may name the token that ends a turn in tokenizer_config.json alone. Raises ConfigError.
        """
        eos = self._tokenizer.eos_token_id
        return {*eos_token_ids(self._folder), *([] if eos is None else [eos])}

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of a prompt: one BOS, also if both text and tokenizer have one, and no EOS.

        A tokenizer that was saved with ``add_eos_token`` ends each text with EOS; an answer would
        then begin another document.
        """
        try:
            ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except Exception as error:  # tokenizers raises many types
            raise DataError(f"the tokenizer rejects the text: {_reason(error)}") from error
        if add_special_tokens and self._num_appended:
            ids = ids[: -self._num_appended]
        bos = self._tokenizer.bos_token_id
        while bos is not None and ids[:2] == [bos, bos]:
            ids = ids[1:]
        return ids

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text without special tokens."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def encode_whole(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text with special tokens, as an engine encodes a text."""
        return tuple(self._tokenizer.encode(text))

    @property
    def marks_thoughts(self) -> bool:
        """Whether ``decode`` has marks of thoughts that an engine's text lacks."""
        return self._thought_form is not None

    @property
    def template_tokens(self) -> tuple[str, ...]:
        """The added tokens that the chat template writes, by id."""
        template = self._tokenizer.chat_template or ""
        written = template if isinstance(template, str) else "".join(template.values())
        return tuple(
            token.content for _, token in sorted(self._added.items()) if token.content in written
        )

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """Return text and id of each special token, but those that mark a thought."""
        special = set(self._tokenizer.all_special_ids)
        special |= {number for number, token in self._added.items() if token.special}
        texts = {number: self._tokenizer.convert_ids_to_tokens(number) for number in special}
        marks = (BEGIN_OF_THOUGHT, END_OF_THOUGHT)
        return {text: number for number, text in texts.items() if text not in marks}

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids without special tokens, as an engine decodes an answer.

        Where special tokens mark the thought, or channels, ``<think>`` and ``</think>`` do instead.
        """
        if self._thought_form is not None:
            return self._thought_form.text(token_ids, self._plain)
        return self._plain(token_ids)

    @property
    def pad_token(self) -> str | None:
        """The token that fills a batch; None if the tokenizer cannot pad."""
        return self._tokenizer.pad_token

    def decode_with_special(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids with special tokens, as an engine decodes a prompt with images."""
        return self._tokenizer.decode(list(token_ids))

    def _plain(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def _find_thought_form(self) -> Channels | ThoughtTokens | None:
        """Return how answers mark what is not the answer; None if the plain text says it."""
        file = self._folder / "config.json"
        family = family_of(_read_json(file)) if file.is_file() else None
        if family is not None and family.writes_channels:
            return Channels.of({token.content: number for number, token in self._added.items()})
        special = {token.content: number for number, token in self._added.items() if token.special}
        begin, end = special.get(BEGIN_OF_THOUGHT), special.get(END_OF_THOUGHT)
        return None if begin is None and end is None else ThoughtTokens(begin, end)

    def _text(self, content: Content, tools: Tools | None) -> str:
        if self._apply_chat_template:
            messages = (
                [{"role": "user", "content": content}]
                if isinstance(content, str)
                else list(content)
            )
            if messages and messages[-1].get("role") == "assistant":
                raise DataError(
                    "the last message is the assistant's: the chat template would close it and begin another "
                    "answer; end the prompt with a message of the user or a tool"
                )
            options = {"add_generation_prompt": True, "tools": list(tools) if tools else None}
            text = self._templated(messages, **options)
            check_all_rendered(messages, text)
            self._check_calls_rendered(messages, text, options)
            return text
        if not isinstance(content, str) or tools:
            what = "has tools" if tools else "is a list of messages"
            raise DataError(f"a prompt {what}; add --apply-chat-template to convert it to text")
        return content

    def _check_calls_rendered(
        self, messages: Sequence[Mapping[str, object]], text: str, options: Mapping[str, object]
    ) -> None:
        """Raise DataError if a conversation without its tool calls has the same text."""
        without = [
            {key: value for key, value in message.items() if key != "tool_calls"}
            for message in messages
        ]
        if without == messages:
            return
        try:
            is_same = self._templated(without, **options) == text
        except DataError:  # an answer without text needs its calls
            return
        if is_same:
            raise DataError(
                "the chat template leaves out the tool calls of assistant messages; use a template that "
                "supports tools"
            )

    def _templated(self, messages: Sequence[Mapping[str, object]], **given: object) -> str:
        """Render messages with the chat template; its configured arguments override ``given``."""
        return render_chat(self._tokenizer, messages, {**given, **self._template_kwargs})


def _num_appended(tokenizer: HfTokenizer) -> int:
    """Return how many tokens a tokenizer adds after a text, seen at the first text that it has tokens for."""
    for text in ("a", "1", " "):
        try:
            plain, whole = tokenizer.encode(text, add_special_tokens=False), tokenizer.encode(text)
        except Exception:  # a vocabulary without this word, which raises any type
            continue
        if plain:
            ends = range(len(plain), len(whole) + 1)
            return next(
                (len(whole) - end for end in ends if whole[:end][-len(plain) :] == plain), 0
            )
    return 0


def render_chat(
    tokenizer: HfTokenizer,
    messages: Sequence[Mapping[str, object]],
    options: Mapping[str, object],
) -> str:
    """Render messages with the chat template of a tokenizer; ``options`` are its arguments.

    Raises:
        DataError: the template raised an error; the message has the template's own words.
        MemoryError: it took more than the process may have.
    """
    options = {"tokenize": False, **options}
    try:
        try:
            return tokenizer.apply_chat_template(messages, **options)
        except TypeError:
            # DeepSeek's templates join the arguments of calls to text, others need the object
            as_text = [_with_text_arguments(message) for message in messages]
            if as_text == messages:
                raise
            return tokenizer.apply_chat_template(as_text, **options)
    except MemoryError:  # a limit of this process; the messages are not its cause
        raise
    except Exception as error:  # a template is a program and may raise any type
        raise DataError(f"the chat template rejects the messages: {_reason(error)}") from error


def _with_text_arguments(message: Mapping[str, object]) -> Mapping[str, object]:
    """Return a message whose tool calls have their arguments as JSON text."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    changed = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), dict):
            arguments = json.dumps(function["arguments"], ensure_ascii=False)
            call = {**call, "function": {**function, "arguments": arguments}}
        changed.append(call)
    return {**message, "tool_calls": changed}


def check_all_rendered(messages: Sequence[Mapping[str, object]], text: str) -> None:
    """Check that a rendered conversation has the text of every message.

    Templates silently leave out roles that they do not know, or a second system message. They may
    leave out the thought of an earlier answer, trim white space and write a tool's result as JSON.

    Raises:
        DataError: a message is left out; its number counts from 1.
    """
    rendered = " ".join(text.split())
    seen: Counter[str] = Counter()
    texts = (
        (number, message, text)
        for number, message in enumerate(messages, 1)
        for text in text_parts(message.get("content"))
    )
    for number, message, whole in texts:
        content = whole.rpartition(END_OF_THOUGHT)[2]
        plain = " ".join(content.split())
        seen[plain] += 1
        spellings = {plain}
        for form in (content, content.strip()):
            for is_ascii in (False, True):
                as_json = json.dumps(form, ensure_ascii=is_ascii)[1:-1]
                spellings.add(" ".join(as_json.split()))  # in the same form as ``rendered``
        if plain and all(rendered.count(spelling) < seen[plain] for spelling in spellings):
            raise DataError(
                f"the chat template leaves out message {number} (role {message.get('role')!r}): "
                f"{content!r:.80}; use a role that the template knows, or merge the message into another"
            )


def _reason(error: Exception) -> str:
    """Return an error's own words, and its type where they alone do not say what is wrong."""
    from jinja2 import TemplateError

    if str(error) and isinstance(error, TemplateError | TypeError | ValueError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must be a JSON object, not {type(value).__name__}")
    return value
