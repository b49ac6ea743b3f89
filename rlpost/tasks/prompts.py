"""Read prompts from files and reject invalid rows.

Input: files (JSON Lines or Parquet, whole or sliced), the keys of prompt, label, metadata and
tools, and whether to skip invalid rows. Output: ``Prompt``s by position; a skipped one is None, and
counted. ``check_prompt_file`` reads all rows once and needs no tokenizer.
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from rlpost.columns import IntColumn
from rlpost.errors import DataError
from rlpost.tasks.rows import Rows
from rlpost.tasks.tokenizer import Content, Tools
from rlpost.types import Prompt

logger = logging.getLogger(__name__)

Tokenize = Callable[[Content, Tools | None], tuple[str, tuple[int, ...]]]

BAD, LONG = "rollout/bad_prompts", "rollout/long_prompts"
LIMITS = "--rollout-max-prompt-len or --rollout-max-context-len"
"""The flags that limit a prompt's length (``rlpost.tasks.prompt_settings.longest_prompt``), for
messages.
"""


@dataclass(frozen=True, slots=True)
class PromptFields:
    """The keys of a row.

    Without ``metadata_key`` all keys except those of prompt and label are metadata.
    """

    input_key: str = "input"
    label_key: str | None = None
    metadata_key: str | None = None
    tool_key: str | None = None

    @property
    def columns(self) -> list[str] | None:
        """The keys to read, or None for all."""
        if self.metadata_key is None:
            return None
        keys = (self.input_key, self.label_key, self.metadata_key, self.tool_key)
        return [key for key in keys if key is not None]


@dataclass(frozen=True, slots=True)
class Row:
    """A valid row."""

    content: Content
    label: str | None
    metadata: dict[str, object]
    tools: Tools | None


def check_prompt_file(
    source: str | Path,
    fields: PromptFields,
    *,
    apply_chat_template: bool = True,
    skip_bad: bool = False,
) -> int:
    """Read every row as a run would and return the number of valid rows.

    Raises:
        DataError: a row is invalid (file, line, problem, remedy); with ``skip_bad``, all rows are;
            or every label is empty.
    """
    rows = Rows(source, columns=fields.columns)
    first_error: DataError | None = None
    num_bad, has_label = 0, fields.label_key is None
    for position in range(len(rows)):
        try:
            row = parse(rows.row(position), rows.where(position), fields)
            if not apply_chat_template and (row.tools or not isinstance(row.content, str)):
                what = (
                    f"{fields.tool_key!r} has tools"
                    if row.tools
                    else f"{fields.input_key!r} is a list of messages"
                )
                raise DataError(f"{rows.where(position)}: {what}; add --apply-chat-template")
            has_label = has_label or bool(row.label and row.label.strip())
        except DataError as error:
            if not skip_bad:
                raise DataError(f"{error} (--bad-prompts skip skips such lines)") from error
            first_error = first_error or error
            num_bad += 1
    if num_bad == len(rows):
        raise DataError(
            f"{source}: none of {len(rows)} rows is a valid prompt; the first: {first_error}"
        )
    if not has_label:
        raise DataError(
            f"{source}: every label under {fields.label_key!r} is empty, so no response can be right; "
            "give the key of the answers as --label-key, or leave it out"
        )
    if num_bad:
        logger.warning(
            "%s: %d of %d rows are invalid and are skipped; the first: %s",
            source,
            num_bad,
            len(rows),
            first_error,
        )
    return len(rows) - num_bad


class PromptSet:
    """The prompts of one or more files, one file after the other, by position."""

    def __init__(
        self,
        sources: str | Path | Sequence[str | Path],
        *,
        tokenize: Tokenize,
        fields: PromptFields = PromptFields(),
        max_prompt_len: int | None = None,
        skip_bad: bool = False,
    ) -> None:
        """``max_prompt_len`` is in tokens."""
        files = [sources] if isinstance(sources, str | Path) else list(sources)
        self._files = [Rows(file, columns=fields.columns) for file in files]
        self._starts = list(accumulate((len(file) for file in self._files), initial=0))
        self._tokenize = tokenize
        self._fields = fields
        self._max_prompt_len = max_prompt_len
        self._skip_bad = skip_bad
        self._skipped: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each file."""
        return tuple(len(file) for file in self._files)

    def prompt(self, position: int, prompt_id: int) -> Prompt | None:
        """Return the prompt at ``position``, from 0, with the id ``prompt_id``; None to skip it.

        Raises:
            DataError: the row is bad and bad rows are not skipped; the message names file and line.
        """
        which = bisect_right(self._starts, position) - 1
        file, at = self._files[which], position - self._starts[which]
        where = file.where(at)
        try:
            row = parse(file.row(at), where, self._fields)
            try:
                text, token_ids = self._tokenize(row.content, row.tools)
            except DataError as error:
                raise DataError(f"{where}: {error}") from error
        except DataError as error:
            if not self._skip_bad:
                raise
            self._skip(BAD, str(error))
            return None
        if self._max_prompt_len is not None and len(token_ids) > self._max_prompt_len:
            self._skip(
                LONG,
                f"{where}: {len(token_ids)} tokens, more than {self._max_prompt_len} ({LIMITS})",
            )
            return None
        column = IntColumn(token_ids)
        return Prompt(
            prompt_id=prompt_id, text=text, token_ids=column, label=row.label, metadata=row.metadata
        )

    def all(self) -> list[Prompt]:
        """Return every prompt that is not skipped, with its position as its id.

        Raises:
            DataError: a row is bad and bad rows are not skipped, or all rows are skipped.
        """
        found = [self.prompt(position, position) for position in range(len(self))]
        kept = [prompt for prompt in found if prompt is not None]
        if not kept:
            names = ", ".join(str(file.path) for file in self._files)
            raise DataError(f"{names}: all {len(self)} rows are bad or longer than {LIMITS} allows")
        return kept

    def counters(self) -> Mapping[str, float]:
        """Return the number of prompts skipped since the last call, by metric name."""
        found = {name: float(self._skipped[name]) for name in (BAD, LONG)}
        self._skipped.clear()
        return found

    def _skip(self, metric: str, why: str) -> None:
        self._skipped[metric] += 1
        logger.debug("skipped: %s", why)


def parse(raw: Mapping[str, object], where: str, fields: PromptFields) -> Row:
    """Parse a row. Raises DataError, whose message begins with ``where``."""
    content = _content(
        _value(raw, fields.input_key, where, "--input-key"), f"{where}: {fields.input_key!r}"
    )
    label = None if fields.label_key is None else _label(raw, where, fields.label_key)
    if fields.metadata_key is None:
        metadata = {
            key: value
            for key, value in raw.items()
            if key not in (fields.input_key, fields.label_key)
        }
    else:
        metadata = _from_text(_value(raw, fields.metadata_key, where, "--metadata-key"))
        metadata = {} if metadata is None else metadata  # null in a Parquet column
        if not isinstance(metadata, dict):
            raise DataError(
                f"{where}: {fields.metadata_key!r} is {type(metadata).__name__}; it must be an object"
            )
    if isinstance(label, dict):  # the label is text; the metadata keeps the object for rewards
        metadata = {**metadata, str(fields.label_key): label}
        label = label_text(label)
    tools = _tools(raw, where, fields.tool_key)
    if tools is not None:  # for a generate function that runs them
        metadata = {**metadata, str(fields.tool_key): tools}
    return Row(content, label, metadata, tools)


def label_text(label: Mapping[str, object]) -> str:
    """Return the text of a label that is an object."""
    return json.dumps(label, ensure_ascii=False, default=str)


def _label(raw: Mapping[str, object], where: str, key: str) -> str | dict[str, object]:
    label = _value(raw, key, where, "--label-key")
    if isinstance(label, bool) or not isinstance(label, str | int | float | dict):
        kind = type(label).__name__
        raise DataError(
            f"{where}: {key!r} is {kind}; the label must be a string, a number or an object"
        )
    return label if isinstance(label, dict) else str(label)


def _tools(raw: Mapping[str, object], where: str, key: str | None) -> Tools | None:
    """Return a prompt's tools, or None if the key is missing or empty."""
    tools = _from_text(raw.get(key)) if key is not None else None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(
            f"{where}: {key!r} must be a list of OpenAI function schemas (--tool-key), got {tools!r:.200}"
        )
    return [_without_nulls(tool) for tool in tools]


def _from_text(value: object) -> Any:
    """Decode JSON text, which Parquet columns use for objects; return other values as they are."""
    try:
        return json.loads(value) if isinstance(value, str) and value.strip() else value
    except ValueError:
        return value


def _without_nulls(value: object) -> Any:
    """Remove nulls: Parquet gives every object the keys of all objects in the column."""
    if isinstance(value, dict):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value


def _value(raw: Mapping[str, object], key: str, where: str, flag: str) -> object:
    if key not in raw:
        raise DataError(
            f"{where}: no key {key!r}; it has {', '.join(map(repr, raw)) or 'none'}. Set {flag} to one of them"
        )
    return raw[key]


def _content(value: object, what: str) -> Content:
    """Return a string, or OpenAI chat messages whose text parts are joined."""
    if isinstance(value, str):
        if not value:
            raise DataError(f"{what} is empty")
        return value
    if not isinstance(value, list) or not value:
        raise DataError(
            f"{what} is {type(value).__name__}; it must be a string or a list of messages"
        )
    return [_message(message, what) for message in value]


def _message(message: Any, what: str) -> dict[str, object]:
    message = _without_nulls(message) if isinstance(message, dict) else message
    fields = message if isinstance(message, dict) else {}
    content = fields.get("content", "" if fields.get("tool_calls") else None)
    if isinstance(content, list) and all(map(_is_text, content)):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(fields.get("role"), str) or not isinstance(content, str):
        raise DataError(
            f"{what}: a message must have the texts 'role' and 'content', got {message!r:.200}"
        )
    calls = fields.get("tool_calls")
    if isinstance(calls, list):
        fields = {**fields, "tool_calls": [_call(call, what) for call in calls]}
    return {**fields, "content": content}


def _call(call: Any, what: str) -> Any:
    """Return a tool call whose arguments are an object, which templates need.

    OpenAI's API and its records have JSON text, which a template would encode again.
    """
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    arguments = _from_text(function["arguments"] or "{}")
    if not isinstance(arguments, dict):
        raise DataError(
            f"{what}: the arguments of a tool call must be a JSON object or its text, got "
            f"{function['arguments']!r:.200}"
        )
    return {**call, "function": {**function, "arguments": arguments}}


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text"
