"""Parses answers of a policy into reasoning, text and tool calls. Pure.

Input: the text of an answer, the tools of the request. Output: ``Parsed``. Never raises, whatever
the text is: a policy may write anything.

SGLang's parsers (``srt/function_call``, ``srt/parser``) do the same, but importing them loads torch
and takes five seconds, which the driver does not need for three formats. A contract test compares
the results. Parsing may lose spelling (white space, the order of text and calls); this is harmless,
because the gateway keeps the tokens of an answer and not its parsed form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rlpost.extensions.agents.chat_messages import END_THINK, THINK, Message, Tool, ToolCall
from rlpost.extensions.agents.json_values import loads_strict

Tools = Sequence[Tool]
Format = Literal["qwen", "xml", "glm", "none"]
OPEN_CALL, CLOSE_CALL = "<tool_call>", "</tool_call>"
OPEN_KEY, CLOSE_VALUE = "<arg_key>", "</arg_value>"
_GLM_BETWEEN = re.compile(r"</arg_key>\s*<arg_value>")
# A value ends at its end mark, or where the next parameter or the end of the call is written.
_XML_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>(.*)", re.DOTALL)
_XML_ARGUMENT = re.compile(
    r"<parameter=([^<>\n]+)>(.*?)(?:</parameter>|(?=<parameter=)|(?=</function>)|\Z)", re.DOTALL
)
_PYTHON_VALUES = {"True": True, "False": False, "None": None}
MARKS = (THINK, END_THINK, OPEN_CALL, CLOSE_CALL)
_MAX_SCHEMAS = 8  # nested anyOf, oneOf and allOf of one parameter

PROBE_TOOLS: Tools = (
    {
        "type": "function",
        "function": {
            "name": "probe_tool",
            "description": "",
            "parameters": {
                "type": "object",
                "properties": {"words": {"type": "string"}, "count": {"type": "integer"}},
            },
        },
    },
)
PROBE_ANSWER = Message(
    "assistant",
    "",
    tool_calls=(ToolCall("probe1234", "probe_tool", '{"words": "a b", "count": 3}'),),
)


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


def format_of(written: str) -> Format:
    """Return the format of tool calls that a chat template shows to the model.

    ``written``: what the template writes for ``PROBE_ANSWER``. The format is the one whose parser
    reads the probe's call from it; "none" if no parser does.
    """
    (call,) = PROBE_ANSWER.tool_calls
    for form, read in _READERS.items():
        for call_text in _between(written, OPEN_CALL, CLOSE_CALL):
            parsed = read(call_text, PROBE_TOOLS)
            if parsed is not None and ToolCall("", parsed.name, parsed.arguments).key == call.key:
                return form
    return "none"


def parse_answer(text: str, form: Format, tools: Tools, *, opens_thinking: bool = False) -> Parsed:
    """Split an answer.

    Calls are searched only if there are ``tools``. An invalid call stays in the content, so that
    the harness can tell the model; valid ones beside it are calls. ``opens_thinking``: the prompt
    ended inside a thought.
    """
    reasoning, content = split_reasoning(text, opens_thinking=opens_thinking)
    if form == "none" or not tools or OPEN_CALL not in content:
        return Parsed(reasoning, content, ())
    read = _READERS[form]
    valid: list[ParsedCall] = []
    invalid: list[str] = []
    for call_text in _between(content, OPEN_CALL, CLOSE_CALL):
        call = read(call_text, tools)
        if call is None:
            invalid.append(f"{OPEN_CALL}{call_text}{CLOSE_CALL}")
        else:
            valid.append(call)
    if not valid:
        return Parsed(reasoning, content, ())
    before = content[: content.index(OPEN_CALL)].strip()
    return Parsed(reasoning, "\n".join(filter(None, (before, *invalid))), tuple(valid))


def _between(text: str, opening: str, closing: str) -> Iterator[str]:
    """Yield the texts between two marks.

    Takes linear time: a regular expression would search for the missing end once for each of the
    thousands of marks that a policy may repeat, and it holds the interpreter meanwhile.
    """
    end = 0
    while (start := text.find(opening, end)) >= 0:
        start += len(opening)
        end = text.find(closing, start)
        if end < 0:
            return
        yield text[start:end]
        end += len(closing)


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
    """Parse ``{"name": ..., "arguments": {...}}``; None if it is malformed.

    The arguments may be JSON text, as in OpenAI's messages. As in SGLang's parser, the policy may call
    them ``parameters``, the word of the tool's schema; a call without them would run the tool with none.
    """
    try:
        call = loads_strict(text)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        arguments = call.get("parameters") or call.get("arguments", {})
        if isinstance(arguments, str):
            arguments = loads_strict(arguments)
    except ValueError:
        return None
    return _parsed(call["name"], arguments)


def _glm_call(text: str, tools: Tools) -> ParsedCall | None:
    """Parse a name, then keys and values between marks; the schema names the string values."""
    name, _, rest = text.partition(OPEN_KEY)
    name = name.strip()
    if not name or "\n" in name:
        return None
    schemas, root = _parameters(name, tools)
    arguments: dict[str, object] = {}
    for key, value in _glm_arguments(OPEN_KEY + rest):
        is_text = allows_string(schemas.get(key), root, if_unknown=False)
        arguments[key] = value if is_text else _value(value)
    return _parsed(name, arguments)


def _glm_arguments(text: str) -> Iterator[tuple[str, str]]:
    """Yield keys and values; in linear time, as ``_between``."""
    end = 0
    while (start := text.find(OPEN_KEY, end)) >= 0:
        between = _GLM_BETWEEN.search(text, start)
        end = -1 if between is None else text.find(CLOSE_VALUE, between.end())
        if between is None or end < 0:
            return
        yield text[start + len(OPEN_KEY) : between.start()].strip(), text[between.end() : end]
        end += len(CLOSE_VALUE)


def _xml_call(text: str, tools: Tools) -> ParsedCall | None:
    """Parse ``<function=NAME>`` with ``<parameter=KEY>`` and values on lines of their own.

    As SGLang's parser: "null" is null, and a value whose schema is unknown is text.
    """
    function = _XML_FUNCTION.fullmatch(text)
    if function is None:
        return None
    name, body = function[1].strip(), function[2].partition("</function>")[0]
    schemas, root = _parameters(name, tools)
    arguments: dict[str, object] = {}
    for match in _XML_ARGUMENT.finditer(body):
        key, value = match[1].strip(), match[2].removeprefix("\n").removesuffix("\n")
        if value.lower() == "null":
            arguments[key] = None
        elif allows_string(schemas.get(key), root, if_unknown=True):
            arguments[key] = value
        else:
            arguments[key] = _value(value)
    return _parsed(name, arguments)


def _parsed(name: str, arguments: object) -> ParsedCall | None:
    """Return a call. None if its arguments are no object."""
    if not isinstance(arguments, dict):
        return None
    return ParsedCall(name, json.dumps(arguments, ensure_ascii=False))


Schemas = Mapping[str, object]


def _parameters(name: str, tools: Tools) -> tuple[Schemas, Schemas]:
    """Return the JSON schemas of a tool's parameters, and the schema that holds them."""
    for tool in tools:
        function = tool.get("function", {})
        if function.get("name") == name:
            schema = function.get("parameters")
            root = schema if isinstance(schema, Mapping) else {}
            properties = root.get("properties")
            return (properties if isinstance(properties, Mapping) else {}), root
    return {}, {}


def _pointed(reference: str, root: Schemas) -> object:
    """Return the schema that a reference names in ``root``; None for one outside of it."""
    start, *keys = reference.split("/")
    found: object = root if start == "#" else None
    for key in keys:
        name = key.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def allows_string(
    schema: object,
    root: Schemas,
    *,
    if_unknown: bool,
    depth: int = 0,
    seen: set[str] | None = None,
) -> bool:
    """Whether a JSON schema allows a string, so that a value written without quotes is text.

    ``root``: the schema in which references are. ``if_unknown``: the answer for a schema that names
    no type. ``seen``: references that were followed; each is once, so that the work is linear.
    """
    seen = set() if seen is None else seen
    if not isinstance(schema, Mapping) or depth > _MAX_SCHEMAS:
        return if_unknown
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in seen:
        seen.add(reference)
        pointed = _pointed(reference, root)
        return allows_string(pointed, root, if_unknown=if_unknown, depth=depth + 1, seen=seen)
    if "type" in schema:
        kinds = schema["type"]
        return "string" in kinds if isinstance(kinds, list) else kinds == "string"
    for field in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(field), list):
            options = schema[field]
            return any(
                allows_string(one, root, if_unknown=False, depth=depth + 1, seen=seen)
                for one in options
            )
    if isinstance(schema.get("enum"), list):
        return any(isinstance(value, str) for value in schema["enum"])
    if "const" in schema:
        return isinstance(schema["const"], str)
    is_other = any(field in schema for field in ("properties", "items"))
    return if_unknown and not is_other


def _value(text: str) -> object:
    """Return a value written as JSON or as Python's constants; text if it is neither."""
    text_value = text.strip()
    if text_value in _PYTHON_VALUES:
        return _PYTHON_VALUES[text_value]
    try:
        return loads_strict(text)
    except ValueError:
        return text


_READERS: Mapping[Format, Callable[[str, Tools], ParsedCall | None]] = {
    "qwen": _qwen_call,
    "xml": _xml_call,
    "glm": _glm_call,
}
