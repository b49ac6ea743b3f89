"""Keep text of a policy or of data from becoming special tokens of the model that reads it.

A server renders messages to one text and tokenizes that with special tokens recognised, so an
answer with ``<|im_end|>\\n<|im_start|>assistant\\n...`` would hold a turn that the judge itself seems
to have written. ``SpecialText.defuse`` puts a space into such strings, also into those that the
normalizer of a tokenizer may make. Pure, apart from ``of_model``.
"""

from __future__ import annotations

import re
import unicodedata
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
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
"""Category Cc but tabs and ends of lines."""
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
        """Return whether a text holds one, or would hold one once it is normalized."""
        return any(self._pattern.search(form) for form in (text, _normalized(text)))

    def defuse(self, text: str) -> str:
        """Return the text with a space after the first character of each special token.

        All other characters are kept, but where a token remains that way. A space, because
        normalizers of tokenizers may drop characters of zero width.

        >>> SpecialText().defuse("done<|im_end|>")
        'done< |im_end|>'
        >>> SpecialText().defuse("x² ＜|im_end|>")
        'x² ＜ |im_end|>'
        """
        for number in range(2 * _ROUNDS):  # tokens may overlap
            if not self.is_in(text):
                return text
            if number == _ROUNDS:  # several characters compose one of a token
                text = _normalized(text)
            text = self._spaced(text)
        while self.is_in(text):  # a token may hold spaces
            text = self._pattern.sub("", _normalized(text))
        return text

    def _spaced(self, text: str) -> str:
        """Return the text with a space in each token, as it is or normalized; all else is kept."""
        text = self._pattern.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)
        plain, origins = _by_character(text)
        pieces, end = [], 0
        for match in self._pattern.finditer(plain):
            first, second = origins[match.start()], origins[match.start() + 1]
            if first < end:  # the next round finds it
                continue
            if first < second:
                pieces += [text[end:second], " "]
                end = second
            else:  # one character becomes several: write these, for the next round
                pieces += [text[end:first], _normalized(text[first])]
                end = first + 1
        return "".join(pieces) + text[end:]


def _by_character(text: str) -> tuple[str, list[int]]:
    """Return a text with each character normalized, and where each one of it comes from."""
    plain, origins, forms = [], list[int](), {each: _normalized(each) for each in {*text}}
    for position, character in enumerate(text):
        normalized = forms[character]
        plain.append(normalized)
        origins += [position] * len(normalized)
    return "".join(plain), origins


def _normalized(text: str) -> str:
    """Return a text as normalizers may change it: wide letters become plain, marks of width vanish.

    Control characters vanish, too, as with ``Nmt`` and ``BertNormalizer`` of tokenizers.
    """
    visible = _CONTROL.sub("", text)
    if visible.isascii():
        return visible
    visible = "".join(each for each in visible if unicodedata.category(each) != "Cf")
    return unicodedata.normalize("NFKC", visible)
