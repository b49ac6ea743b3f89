"""Messages of a row: the forms in which data sets hold them, as the one that chat templates read.

Input: the value of a prompt's key. Output: a string, or OpenAI chat messages. Parquet gives every
object the keys of all objects in its column, and holds nested values as JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlpost.errors import DataError

Content = str | Sequence[Mapping[str, object]]


def content_of(value: object, what: str, *, takes_images: bool = False) -> Content:
    """Return a string, or OpenAI chat messages whose text parts are joined.

    Messages may be JSON text, as in Parquet columns. Those with other parts keep their parts if the
    model ``takes_images``.
    """
    if isinstance(value, str):
        if not value.strip():
            raise DataError(f"{what} is {'blank' if value else 'empty'}")
        messages = from_text(value) if value.lstrip().startswith("[") else None
        if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
            return value
        value = messages
    if not isinstance(value, list) or not value:
        raise DataError(
            f"{what} is {type(value).__name__}; it must be a string or a list of messages"
        )
    messages = [_message(message, what, takes_images=takes_images) for message in value]
    if not any(str(one["content"]).strip() or one.get("tool_calls") for one in messages):
        raise DataError(f"{what} is blank: no message has text")
    return messages


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)


def _message(message: object, what: str, *, takes_images: bool) -> dict[str, object]:
    message = without_nulls(message) if isinstance(message, dict) else message
    fields = message if isinstance(message, dict) else {}
    content = fields.get("content", "" if fields.get("tool_calls") else None)
    if isinstance(content, list) and all(map(_is_text, content)):
        content = "".join(str(part.get("text", "")) for part in content)
    has_parts = isinstance(content, list) and all(_is_text(x) or is_image_part(x) for x in content)
    if has_parts and not takes_images:
        raise DataError(
            f"{what}: a message with images, which --multimodal-keys would read: {message!r:.200}"
        )
    if not isinstance(fields.get("role"), str) or not (isinstance(content, str) or has_parts):
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
    arguments = from_text(function["arguments"] or "{}")
    if not isinstance(arguments, dict):
        raise DataError(
            f"{what}: the arguments of a tool call must be a JSON object or its text, got "
            f"{function['arguments']!r:.200}"
        )
    return {**call, "function": {**function, "arguments": arguments}}


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text"


def from_text(value: object) -> Any:
    """Decode JSON text, which Parquet columns use for objects; return other values as they are."""
    try:
        return json.loads(value) if isinstance(value, str) and value.strip() else value
    except ValueError:
        return value


def without_nulls(value: object) -> Any:
    """Remove nulls: Parquet gives every object the keys of all objects in the column."""
    if isinstance(value, dict):
        return {key: without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [without_nulls(entry) for entry in value] if isinstance(value, list) else value


def is_image_part(part: object) -> bool:
    """Whether a part of a message is of an image, a video or an audio clip."""
    return isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] != "text"


def text_parts(content: object) -> list[str]:
    """Return the texts of a message: of its parts, or the one that it is."""
    if isinstance(content, list):
        return [str(part.get("text") or "") for part in content if part.get("type") == "text"]
    return [str(content or "")]
