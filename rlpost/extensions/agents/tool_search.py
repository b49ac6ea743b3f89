"""A search for tools that the client runs, in OpenAI's responses. Pure.

A program with many tools sends one of type ``tool_search`` in their place. The policy sees it as a
function. Its call is answered by the client with an item that holds the tools found, and these are
shown to the policy there, as the output of the call: the tools of the request stay the same, and so
does the conversation. A call of a found tool is parsed by its schema.

Reference: developers.openai.com/api/docs/guides/tools-tool-search.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlpost.extensions.agents.chat_messages import (
    BadRequest,
    Tool,
    ToolCall,
    checked_arguments,
    function_tool,
)

NAME = "tool_search"
CALL, OUTPUT = "tool_search_call", "tool_search_output"


def is_run_by_client(tool: object) -> bool:
    """Return whether a tool is a search that the client runs."""
    return (
        isinstance(tool, Mapping) and tool.get("type") == NAME and tool.get("execution") == "client"
    )


def search_function(tool: Mapping[str, Any]) -> Tool:
    """Return the function that the policy sees."""
    return function_tool({**tool, "name": NAME}, tool.get("parameters"))


def call_of(item: Mapping[str, Any], where: str) -> ToolCall:
    """Return a call in the conversation. Raises BadRequest."""
    if item.get("execution") != "client":
        raise BadRequest(
            f"{where} is a search for tools that a server ran; use execution 'client', or send all "
            "tools as functions",
            param=where,
        )
    arguments = checked_arguments(item.get("arguments"), where)
    return ToolCall(str(item.get("call_id") or ""), NAME, arguments)


def call_item(item: Mapping[str, Any]) -> dict[str, object]:
    """Return the item of a call of the policy, given that of a function."""
    kept = {key: item[key] for key in ("id", "status", "call_id")}
    arguments = json.loads(item["arguments"])
    return {"type": CALL, **kept, "execution": "client", "arguments": arguments}


def shown(found: Sequence[Tool]) -> str:
    """Return what the policy reads of the tools found: their functions as JSON."""
    return json.dumps([tool["function"] for tool in found], ensure_ascii=False)
