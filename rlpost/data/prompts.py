"""A prompt file: JSON Lines, one prompt a line, read line by line where it is needed.

Comes in: a path and the keys of prompt and label. Goes out: ``Prompt``s. A set holds the place of each line, never
the lines. ``check_prompt_file`` reads everything once and needs nothing but the standard library.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlpost.data.tokenizer import Content
from rlpost.errors import DataError
from rlpost.types import Prompt

Tokenize = Callable[[Content], tuple[str, tuple[int, ...]]]


def check_prompt_file(
    path: str | Path, input_key: str, label_key: str | None = None, *, apply_chat_template: bool = True
) -> int:
    """Read every line as a run would; return their number.

    Raises:
        DataError: naming file, line, what is wrong, and what to do.
    """
    file, offsets = Path(path), _offsets(Path(path))
    with file.open("rb") as stream:
        for number, offset in offsets:
            stream.seek(offset)
            where = f"{file}, line {number}"
            content, _, _ = _parse(stream.readline(), where, input_key, label_key)
            if not isinstance(content, str) and not apply_chat_template:
                raise DataError(f"{where}: {input_key!r} is a list of messages; add --apply-chat-template")
    return len(offsets)


class PromptSet:
    """The prompts of one file, by position."""

    def __init__(
        self, path: str | Path, *, tokenize: Tokenize, input_key: str = "input", label_key: str | None = None
    ) -> None:
        self._path = Path(path)
        self._tokenize = tokenize
        self._input_key = input_key
        self._label_key = label_key
        found = _offsets(self._path)
        self._numbers = array("q", (number for number, _ in found))
        self._offsets = array("q", (offset for _, offset in found))

    def __len__(self) -> int:
        return len(self._offsets)

    def prompt(self, position: int, prompt_id: int) -> Prompt:
        """The prompt at ``position`` (0 is the first line) under the name ``prompt_id``.

        Raises:
            DataError: naming file and line.
        """
        where = f"{self._path}, line {self._numbers[position]}"
        with self._path.open("rb") as stream:
            stream.seek(self._offsets[position])
            content, label, metadata = _parse(stream.readline(), where, self._input_key, self._label_key)
        try:
            text, token_ids = self._tokenize(content)
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
        return Prompt(prompt_id=prompt_id, text=text, token_ids=token_ids, label=label, metadata=metadata)


def _offsets(path: Path) -> list[tuple[int, int]]:
    """(line number, byte offset) of each line that is not blank."""
    found, offset = [], 0
    try:
        with path.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    found.append((number, offset))
                offset += len(line)
    except OSError as error:
        raise DataError(f"{path}: cannot read the prompts: {error.strerror}; is the path right?") from error
    if not found:
        raise DataError(f"{path}: no prompts in it; it needs one JSON object a line")
    return found


def _parse(
    line: bytes, where: str, input_key: str, label_key: str | None
) -> tuple[Content, str | None, dict[str, Any]]:
    """(content, label, everything else) of one line."""
    try:
        raw = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: not JSON ({error}); each line must be one JSON object") from error
    if not isinstance(raw, dict):
        raise DataError(f"{where}: {type(raw).__name__} instead of a JSON object such as {{{input_key!r}: ...}}")
    content = _content(_value(raw, input_key, where, "--input-key"), f"{where}: {input_key!r}")
    label = None
    if label_key is not None:
        label = _value(raw, label_key, where, "--label-key")
        if isinstance(label, bool) or not isinstance(label, str | int):
            raise DataError(f"{where}: {label_key!r} is {type(label).__name__}; the label must be a string")
        label = str(label)
    metadata = {key: value for key, value in raw.items() if key not in (input_key, label_key)}
    return content, label, metadata


def _value(raw: Mapping[str, Any], key: str, where: str, flag: str) -> Any:
    if key not in raw:
        raise DataError(
            f"{where}: no key {key!r}; it has {', '.join(map(repr, raw)) or 'none'}. Set {flag} to one of them"
        )
    return raw[key]


def _content(value: Any, what: str) -> Content:
    """A text or chat messages, each with a role and a text."""
    if isinstance(value, str):
        if not value:
            raise DataError(f"{what} is empty")
        return value
    if not isinstance(value, list) or not value:
        raise DataError(f"{what} is {type(value).__name__}; it must be a string or a list of messages")
    for message in value:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise DataError(f"{what}: a message must have the texts 'role' and 'content', got {message!r}")
    return value
