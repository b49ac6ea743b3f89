"""Custom tools of OpenAI's APIs, whose input is a text and no JSON. Pure.

Codex sends its ``apply_patch`` as one. The policy sees a function with one argument, ``input``; its
call reaches the client as the text of that argument. Chat completions have the same fields as
responses, in an object ``custom`` of tools and calls.

Reference: developers.openai.com/api/docs/guides/function-calling, custom tools.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeGuard

from rlpost.extensions.agents.chat_messages import BadRequest, Tool, ToolCall, function_tool
from rlpost.extensions.agents.requests import Recall

KIND, CALL, OUTPUT = "custom", "custom_tool_call", "custom_tool_call_output"
INPUT = "input"
"""The argument of the function, and the field of the call."""


def is_custom(tool: object) -> TypeGuard[Mapping[str, Any]]:
    """Whether a tool, or a call in chat completions, is a custom one."""
    return isinstance(tool, Mapping) and tool.get("type") == KIND


def custom_names(tools: object) -> Iterator[str]:
    """Yield the names of the custom tools of a list, those in namespaces included."""
    for tool in tools if isinstance(tools, list) else ():
        if not isinstance(tool, Mapping):
            continue
        if is_custom(tool):
            yield str(tool.get("name"))
        elif tool.get("type") == "namespace":
            yield from custom_names(tool.get("tools"))


def of_chat(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a custom tool of chat completions in the form of responses."""
    inner = tool.get(KIND)
    inner = inner if isinstance(inner, Mapping) else {}
    form = inner.get("format")
    grammar = form.get("grammar") if isinstance(form, Mapping) else None
    return {**inner, "format": grammar or form}


def check_names(names: Iterable[str], custom: Iterable[str]) -> None:
    """Raise BadRequest if a custom tool shares its name: a call could be of either."""
    count = Counter(names)
    for name in custom:
        if count[name] > 1:
            raise BadRequest(
                f"two tools have the name {name!r}, one of them a custom one; send one",
                param="tools",
            )


def with_functions(messages: object, recall: Recall) -> object:
    """Return messages of chat completions with calls of custom tools as calls of functions.

    Raises BadRequest.
    """
    if not isinstance(messages, list):
        return messages
    return [
        {**raw, "tool_calls": [_function_call(each, place, recall) for each in raw["tool_calls"]]}
        if isinstance(raw, Mapping) and isinstance(raw.get("tool_calls"), list)
        else raw
        for place, raw in enumerate(messages)
    ]


def _function_call(raw: object, place: int, recall: Recall) -> object:
    if not is_custom(raw):
        return raw
    inner = raw.get(KIND)
    item = {**(inner if isinstance(inner, Mapping) else {}), "call_id": raw.get("id")}
    call = call_of(item, f"messages[{place}]", recall)
    return {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}


def chat_call(call: ToolCall) -> dict[str, object]:
    """Return a call of the policy as chat completions have it."""
    return {"id": call.id, "type": KIND, KIND: {"name": call.name, INPUT: text_of(call)}}


def custom_function(tool: Mapping[str, Any]) -> Tool:
    """Return the function that the policy sees; the grammar of the text is its description.

    Sampling is not constrained by the grammar: the client checks a text, as it does with models
    that follow none.
    """
    form = tool.get("format")
    grammar = form.get("definition") if isinstance(form, Mapping) else None
    text: dict[str, object] = {"type": "string"}
    if isinstance(form, Mapping) and isinstance(grammar, str):
        text["description"] = f"{form.get('syntax')} grammar:\n{grammar}"
    return function_tool(tool, {"type": "object", "properties": {INPUT: text}, "required": [INPUT]})


def call_of(item: Mapping[str, Any], where: str, recall: Recall) -> ToolCall:
    """Return a call in the conversation, with the policy's arguments if it is one of the episode.

    Raises BadRequest.
    """
    if not isinstance(item.get("name"), str) or not isinstance(item.get(INPUT), str):
        raise BadRequest(f"{where} must have a name and a text {INPUT}", param=where)
    call_id = str(item.get("call_id") or "")
    earlier = recall(call_id)
    for call in earlier.answer.tool_calls if earlier else ():
        if (call.id, call.name) == (call_id, item["name"]) and text_of(call) == item[INPUT]:
            return call
    arguments = json.dumps({INPUT: item[INPUT]}, ensure_ascii=False)
    return ToolCall(call_id, item["name"], arguments)


def text_of(call: ToolCall) -> str:
    """Return the text of a call of the policy, or arguments without one, for the client to refuse."""
    text = json.loads(call.arguments).get(INPUT)
    return text if isinstance(text, str) else call.arguments


def call_item(item: Mapping[str, Any]) -> dict[str, object]:
    """Return the item of a call of the policy, given that of a function."""
    kept = {key: value for key, value in item.items() if key not in ("type", "arguments")}
    text = text_of(ToolCall(item["call_id"], item["name"], item["arguments"]))
    return {"type": CALL, **kept, INPUT: text}


def call_items(
    items: Iterable[dict[str, object]], names: frozenset[str]
) -> list[dict[str, object]]:
    """Return items of an answer with the calls of custom tools in their form."""
    return [
        call_item(item) if item["type"] == "function_call" and item.get("name") in names else item
        for item in items
    ]
