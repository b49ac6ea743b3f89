"""Parses answers of a policy into reasoning, text and tool calls. Pure.

Input: the text of an answer, the tools of the request. Output: ``Parsed``.

SGLang's parsers (``srt/function_call``, ``srt/parser``) do the same, but importing them loads torch
and takes five seconds, which the driver does not need for two formats. A contract test compares the
results. Parsing may lose spelling (white space, the order of text and calls); this is harmless,
because the gateway keeps the tokens of an answer and not its parsed form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rlpost.agents.chat_messages import END_THINK, THINK, Tool

Tools = Sequence[Tool]
Format = Literal["qwen", "glm", "none"]
OPEN_CALL, CLOSE_CALL = "<tool_call>", "</tool_call>"
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_GLM_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
MARKS = (THINK, END_THINK, OPEN_CALL, CLOSE_CALL)


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call as the model wrote it; ``arguments`` is JSON text of an object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Parsed:
    """An answer in its parts."""

    reasoning: str
    content: str
    calls: tuple[ParsedCall, ...]


def format_of(template: str) -> Format:
    """Return the format of tool calls that a chat template shows to the model."""
    if "<arg_key>" in template:
        return "glm"
    return "qwen" if OPEN_CALL in template else "none"


def parse_answer(text: str, form: Format, tools: Tools, *, opens_thinking: bool = False) -> Parsed:
    """Split an answer.

    Calls are searched only if there are ``tools``. An invalid call stays in the content, so that
    the harness can tell the model. ``opens_thinking``: the prompt ended inside a thought.
    """
    reasoning, content = split_reasoning(text, opens_thinking=opens_thinking)
    if form == "none" or not tools or OPEN_CALL not in content:
        return Parsed(reasoning, content, ())
    read = _READERS[form]
    calls = [read(found[1], tools) for found in _CALL.finditer(content)]
    valid = tuple(call for call in calls if call is not None)
    if len(valid) < len(calls) or not calls:
        return Parsed(reasoning, content, ())
    return Parsed(reasoning, content[: content.index(OPEN_CALL)].strip(), valid)


def split_reasoning(text: str, *, opens_thinking: bool = False) -> tuple[str, str]:
    """Return reasoning and the rest; without an end mark, all of the text is reasoning."""
    start = text.lstrip()
    begins = start.startswith(THINK)
    if not begins and not opens_thinking:
        return "", text
    thought = start[len(THINK) :] if begins else text
    reasoning, _, content = thought.partition(END_THINK)
    return reasoning.strip("\n"), content.lstrip("\n")


def _qwen_call(text: str, tools: Tools) -> ParsedCall | None:
    """Parse ``{"name": ..., "arguments": {...}}``; None if it is malformed."""
    try:
        call = json.loads(text)
    except ValueError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return ParsedCall(call["name"], json.dumps(arguments, ensure_ascii=False))


def _glm_call(text: str, tools: Tools) -> ParsedCall | None:
    """Parse a name, then keys and values between marks; the schema names the string values."""
    name, _, rest = text.partition("<arg_key>")
    name = name.strip()
    if not name:
        return None
    types = _types(name, tools)
    arguments: dict[str, object] = {}
    for found in _GLM_ARGUMENT.finditer("<arg_key>" + rest):
        key, value = found[1].strip(), found[2]
        arguments[key] = value if types.get(key) == "string" else _value(value)
    return ParsedCall(name, json.dumps(arguments, ensure_ascii=False))


def _types(name: str, tools: Tools) -> dict[str, object]:
    """The JSON types of a tool's parameters."""
    for tool in tools:
        function = tool.get("function", {})
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties") or {}
            return {key: (schema or {}).get("type") for key, schema in properties.items()}
    return {}


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


_READERS: Mapping[str, Callable[[str, Tools], ParsedCall | None]] = {
    "qwen": _qwen_call,
    "glm": _glm_call,
}
