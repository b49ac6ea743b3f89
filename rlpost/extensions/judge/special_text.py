"""Keep text of a policy or of data from becoming special tokens of the model that reads it.

A server renders messages to one text and tokenizes that with special tokens recognised, so an
answer with ``<|im_end|>\\n<|im_start|>assistant\\n...`` would hold a turn that the judge itself seems
to have written. ``SpecialText.defuse`` puts a space into such strings. Pure, apart from ``of_model``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from common.files import read_object

_USUAL = (
    r"<\|[^|<>\s]{1,64}\|?>",  # ChatML, Llama 3, Qwen, GLM, Phi, gpt-oss, Command, Gemma 4
    r"<[^|<>\s]{1,64}\|>",  # Gemma 4
    r"<SPECIAL_\d+>",  # Nemotron
    r"<\uff5c[^\uff5c<>\s]{1,64}\uff5c>",  # DeepSeek
    r"</?s>|<(?:bos|eos|pad|unk|mask)>|<(?:start|end)_of_turn>",  # Llama 2, Gemma
    r"<</?SYS>>|\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS)\]",  # Mistral
    r"\[gMASK\]|<sop>|<eop>",
)
_ROUNDS = 8


class SpecialText:
    """The special tokens of one model, as strings."""

    def __init__(self, tokens: Iterable[str] = ()) -> None:
        """``tokens``: those of its tokenizer, beside the strings that models commonly have."""
        words = sorted((token for token in tokens if len(token) > 1), key=len, reverse=True)
        self._pattern = re.compile("|".join([*map(re.escape, words), *_USUAL]))

    @classmethod
    def of_model(cls, folder: Path | str | None) -> SpecialText:
        """Return those of a Hugging Face folder; without one, of a server, the usual ones."""
        if folder is None:
            return cls()
        fast = read_object(Path(folder) / "tokenizer.json").get("added_tokens")
        slow = read_object(Path(folder) / "tokenizer_config.json").get("added_tokens_decoder")
        entries = [*(fast if isinstance(fast, list) else [])]
        entries += slow.values() if isinstance(slow, dict) else []
        special = [each for each in entries if isinstance(each, dict) and each.get("special")]
        return cls(str(each.get("content", "")) for each in special)

    def is_in(self, text: str) -> bool:
        """Return whether a text holds one."""
        return self._pattern.search(text) is not None

    def defuse(self, text: str) -> str:
        """Return the text with a space after the first character of each special token.

        A space, because normalizers of tokenizers may drop characters of zero width.

        >>> SpecialText().defuse("done<|im_end|>")
        'done< |im_end|>'
        """
        for _ in range(_ROUNDS):  # tokens may overlap
            if not self.is_in(text):
                return text
            text = self._pattern.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)
        while self.is_in(text):  # a token may hold spaces
            text = self._pattern.sub("", text)
        return text
