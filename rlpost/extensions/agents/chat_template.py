"""The chat template and tokenizer of the policy, as the gateway uses them.

Input: messages and tools. Output: the text of the template, token ids of texts, texts of ids.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from rlpost.columns import IntColumn
from rlpost.errors import ConfigError, DataError
from rlpost.extensions.agents.aside import without_turn
from rlpost.extensions.agents.chat_messages import Message
from rlpost.tasks.tokenizer import check_tokenizer_folder, hf_tokenizer, render_chat

LONG_TEXT = 4  # characters a token of a text that may exceed the context
_SLICE = 16384  # characters
SYSTEM_PLACES = ("system system user", "system user system user")
"""Roles of conversations of harnesses such as Codex and Claude Code."""
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


def _bytes_of_gpt2() -> dict[str, int]:
    """Return the letters that stand for bytes in vocabularies of byte-level BPE.

    Printable bytes of Latin-1 stand for themselves, the others for the letters from U+0100 on
    (GPT-2's encoder.py).
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + number): byte for number, byte in enumerate(others)}


_BYTES_OF_GPT2 = _bytes_of_gpt2()


def with_one_system(messages: Sequence[Message]) -> list[Message]:
    """Return messages with the leading system messages joined, and later ones as the user's."""
    leading = list(itertools.takewhile(lambda message: message.role == "system", messages))
    joined = Message("system", "\n\n".join(message.content for message in leading))
    later = [
        replace(message, role="user") if message.role == "system" else message
        for message in messages[len(leading) :]
    ]
    return [joined, *later] if leading else later


class TooLong(DataError):
    """Texts have more tokens than the context of the model."""


class ChatTemplate:
    """Renders conversations, and is the codec of their response builders.

    Safe for several threads: no call sets truncation or padding, the state of a fast tokenizer.
    """

    def __init__(self, model_folder: str, kwargs: Mapping[str, object] | None = None) -> None:
        """``kwargs`` are additional arguments of the template.

        Raises:
            ConfigError: the folder has no tokenizer, or the tokenizer no chat template.
        """
        check_tokenizer_folder(model_folder)
        self._tokenizer = hf_tokenizer(model_folder)
        self._kwargs = dict(kwargs or {})
        if not self._tokenizer.chat_template:
            raise ConfigError(
                f"--hf-checkpoint {model_folder}: its tokenizer has no chat template, which agents "
                "need; add chat_template.jinja from the model's page"
            )
        self._special = frozenset(self._tokenizer.all_special_ids)
        self.takes_systems = True
        """Whether the template writes several system messages, and later ones."""
        self.takes_systems = all(self._writes_all(roles.split()) for roles in SYSTEM_PLACES)

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]] | None = None
    ) -> str:
        """Return the text of a conversation, up to and including the header of the next answer.

        Where the template takes one system message alone, the first ones are joined, and later ones
        are the user's: joined with the first, they would rewrite the text before them.

        Raises:
            DataError: the template rejects the messages.
        """
        options = {
            "tools": list(tools) if tools else None,
            "add_generation_prompt": True,
            **self._kwargs,
        }
        if not self.takes_systems:
            messages = with_one_system(messages)
        return render_chat(
            self._tokenizer, [message.for_template() for message in messages], options
        )

    def _writes_all(self, roles: Sequence[str]) -> bool:
        """Whether the template writes the texts of messages with these roles."""
        messages = [Message(role, f"text-{place}") for place, role in enumerate(roles)]
        try:
            text = self.render(messages)
        except DataError:
            return False
        return all(message.content in text for message in messages)

    def written_for(self, answer: Message, tools: Sequence[Mapping[str, object]]) -> str:
        """Return what the template writes for an answer; empty if it rejects the answer."""
        question = Message("user", "?")
        try:
            before, whole = (self.render(each, tools) for each in ([question], [question, answer]))
        except DataError:
            return ""
        same = itertools.takewhile(
            lambda pair: pair[0] == pair[1], zip(before, whole, strict=False)
        )
        return whole[len(list(same)) :]

    def check_length(self, texts: Sequence[str], longest: int | None) -> None:
        """Raise TooLong if texts have so many characters that they exceed ``longest`` tokens.

        Texts of up to LONG_TEXT characters a token pass, because their tokens are soon counted.
        """
        if longest is None or sum(map(len, texts)) <= LONG_TEXT * longest:
            return
        if self.exceeds(texts, longest):
            raise TooLong(f"more than {longest} tokens")

    def exceeds(self, texts: Iterable[str], limit: int) -> bool:
        """Whether texts have more than ``limit`` tokens.

        Tokenises slices, and no more of them than it takes to know.
        """
        count = 0
        for text in texts:
            for start in range(0, len(text), _SLICE):
                # Between slices a few tokens are more than those of the whole text.
                count += max(0, len(self.encode(text[start : start + _SLICE])) - _SLICE // 256)
                if count > limit:
                    return True
        return False

    def encode(self, text: str) -> IntColumn:
        """Return the ids of a text; special tokens in it become their ids, and none is added."""
        with without_turn():
            return IntColumn(self._tokenizer.encode(text, add_special_tokens=False))

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids with special tokens, without any clean-up."""
        return self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, which may end inside a character."""
        text = self.decode_all([token_id])
        if "\ufffd" not in text:
            return text.encode()
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if _BYTE_TOKEN.fullmatch(token):  # byte fallback of SentencePiece
            return bytes([int(token[3:5], 16)])
        if all(letter in _BYTES_OF_GPT2 for letter in token):
            return bytes(_BYTES_OF_GPT2[letter] for letter in token)
        return text.encode()

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids without special tokens, as an engine decodes an answer."""
        return self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def is_special(self, text: str) -> bool:
        """Whether a text is one special token, which ``decode`` leaves out."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return len(ids) == 1 and ids[0] in self._special
