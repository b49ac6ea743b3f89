"""The chat template and tokenizer of the policy, as the gateway uses them.

Input: messages and tools. Output: the text of the template, token ids of texts, texts of ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from rlpost.agents.chat_messages import Message
from rlpost.columns import IntColumn
from rlpost.data.tokenizer import check_tokenizer_folder, hf_tokenizer
from rlpost.errors import ConfigError, DataError


class ChatTemplate:
    """Renders conversations, and is the codec of their response builders.

    Not safe for use by several threads at once.
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
        self.source: str = _default_template(self._tokenizer.chat_template)
        self._special = frozenset(self._tokenizer.all_special_ids)

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]] | None = None
    ) -> str:
        """Return the text of a conversation, up to and including the header of the next answer.

        Raises:
            DataError: the template rejects the messages.
        """
        from jinja2 import TemplateError

        try:
            return self._tokenizer.apply_chat_template(
                [message.for_template() for message in messages],
                tools=list(tools) if tools else None,
                add_generation_prompt=True,
                tokenize=False,
                **self._kwargs,
            )
        except (TemplateError, TypeError, ValueError, AttributeError, KeyError) as error:
            raise DataError(f"the chat template rejects the messages: {error}") from error

    def encode(self, text: str) -> IntColumn:
        """Return the ids of a text; special tokens in it become their ids, and none is added."""
        return IntColumn(self._tokenizer.encode(text, add_special_tokens=False))

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids with special tokens, without any clean-up."""
        return self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids without special tokens, as an engine decodes an answer."""
        return self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def is_special(self, text: str) -> bool:
        """Whether a text is one special token, which ``decode`` leaves out."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return len(ids) == 1 and ids[0] in self._special


def _default_template(given: str | Mapping[str, str]) -> str:
    """Return the template to use, of a tokenizer that may have several by name."""
    if isinstance(given, str):
        return given
    return str(given["default"]) if "default" in given else json.dumps(given)
