"""Anthropic's messages: requests in, responses and stream events out. Pure.

Reference: docs.anthropic.com/en/api/messages. Internally messages follow OpenAI's order: each
result of a tool is a message, and the system prompt is the first one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rlpost.extensions.agents import request_fields
from rlpost.extensions.agents.chat_messages import (
    WITH_IMAGES,
    BadRequest,
    Message,
    Tool,
    ToolCall,
    checked,
    constrains_sampling,
    content_of,
    function_tool,
    text_of,
)
from rlpost.extensions.agents.openai_format import (
    boolean,
    check_format,
    stop_strings,
    whole_number,
)
from rlpost.extensions.agents.requests import (
    ChatChoice,
    ChatRequest,
    Earlier,
    Recall,
    Reply,
    recall_nothing,
    recalled,
)

IGNORED_BLOCKS = ("redacted_thinking",)
SIGNATURE = "rlpost"
"""Of thoughts; ignored when it comes back."""
Event = dict[str, object]


def messages_request(
    body: Mapping[str, object], recall: Recall = recall_nothing, *, needs_answer: bool = True
) -> ChatRequest:
    """Read a request.

    ``recall`` returns the answer that it continues. Without ``needs_answer`` it may end with an
    answer.

    Raises BadRequest.
    """
    overridden = request_fields.MESSAGES.check(body)
    check_format("output_config.format", _format_of(body))
    raw_messages = body.get("messages")
    if not isinstance(raw_messages, list) or not raw_messages:
        raise BadRequest("messages must be a list with at least one message", param="messages")
    system = text_of(_without_billing(body.get("system")), "system")
    messages = [Message("system", system)] if system else []
    tools, dropped = _tools(body)
    earlier = _continued(body.get("thread"), recall)
    if earlier is not None:
        messages += earlier.conversation(with_instructions=not system)
        tools = tools if "tools" in body else earlier.tools
    sent = [
        message
        for place, raw in enumerate(raw_messages)
        for message in _messages(raw, f"messages[{place}]")
    ]
    if not sent and earlier is None:
        raise BadRequest(
            "messages has settings alone; send a message of the user", param="messages"
        )
    messages += sent
    return ChatRequest(
        messages=checked(messages, needs_answer=needs_answer),
        tools=tools,
        dropped_tools=dropped,
        has_instructions=bool(system) or (earlier is not None and earlier.has_instructions),
        max_tokens=whole_number(body, "max_tokens", 1, 2**31 - 1),
        stop=stop_strings(body.get("stop_sequences"), "stop_sequences"),
        is_stream=boolean(body, "stream"),
        with_usage=True,
        overridden=overridden,
    )


def message_body(reply: Reply) -> dict[str, Any]:
    """Return the body of a response."""
    completion = reply.completion
    choice = completion.choices[0]
    return {
        "id": f"msg_{completion.id}",
        "type": "message",
        "role": "assistant",
        "model": reply.model,
        "content": _blocks(choice.message),
        "stop_reason": _stop_reason(choice),
        "stop_sequence": choice.stop,
        "usage": {
            "input_tokens": completion.num_prompt_tokens,
            "output_tokens": completion.num_tokens,
        },
    }


def message_events(reply: Reply) -> Iterator[Event]:
    """Yield the events of a streamed response."""
    body = message_body(reply)
    usage = {**body["usage"], "output_tokens": 0}
    start = {**body, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield {"type": "message_start", "message": start}
    for index, block in enumerate(body["content"]):
        empty, deltas = _begun(block)
        at = {"index": index}
        yield {"type": "content_block_start", **at, "content_block": empty}
        for delta in deltas:
            yield {"type": "content_block_delta", **at, "delta": delta}
        yield {"type": "content_block_stop", **at}
    delta = {"stop_reason": body["stop_reason"], "stop_sequence": body["stop_sequence"]}
    output = {"output_tokens": reply.completion.num_tokens}
    yield {"type": "message_delta", "delta": delta, "usage": output}
    yield {"type": "message_stop"}


def error_body(message: str, *, status: int) -> dict[str, object]:
    """Return the body of a refusal."""
    kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def _format_of(settings: Mapping[str, object]) -> object:
    """Return the format of answers that a request, or a message of the system, asks for."""
    output = settings.get("output_config")
    return output.get("format") if isinstance(output, Mapping) else None


def _without_billing(system: object) -> object:
    """Return a system prompt without the blocks that Claude Code writes for Anthropic's servers.

    Its first block is ``x-anthropic-billing-header: ...`` with a value that changes with every
    request, so no request would continue the one before.
    """
    if not isinstance(system, list):
        return system
    texts = [block.get("text") if isinstance(block, Mapping) else None for block in system]
    return [
        block
        for block, text in zip(system, texts, strict=True)
        if not (isinstance(text, str) and text.startswith("x-anthropic-"))
    ]


def _messages(raw: Any, where: str) -> list[Message]:
    """Convert one message; results of tools become messages before its text."""
    role = raw.get("role") if isinstance(raw, Mapping) else None
    if role not in ("user", "assistant", "system"):
        raise BadRequest(f"{where}.role {role!r} must be user or assistant", param=where)
    content = raw.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, Mapping) for block in blocks):
        raise BadRequest(f"{where}.content must be a string or a list of blocks", param=where)
    if role == "assistant":
        return [_assistant(blocks, where)]
    messages, others = [], []
    for block in blocks:
        if block.get("type") == "tool_result":
            content = _with_names_of_tools(block.get("content"), where)
            result = content_of(content, where, image_kind="image")
            if block.get("is_error") is True and not (
                result.text or result.images
            ):  # as Anthropic's server does
                raise BadRequest(
                    f"{where}: the content of a tool_result cannot be empty if is_error is true, "
                    "because the policy reads the content alone; write the error into it",
                    param=where,
                )
            call_id = str(block.get("tool_use_id") or "")
            messages.append(
                Message("tool", result.text, tool_call_id=call_id, images=result.images)
            )
        else:
            others.append(block)
    if role == "system":
        check_format("output_config.format", _format_of(raw))
        # settings alone: nothing to read for the policy
        if not messages and not content_of(others, where).text:
            return []
    if others or not messages:
        both = content_of(others, where, image_kind="image" if role in WITH_IMAGES else None)
        messages.append(Message(role, both.text, images=both.images))
    return messages


def _with_names_of_tools(content: object, where: str) -> object:
    """Return the content of a result with references to tools as text.

    Claude Code answers a search for tools with them (ENABLE_TOOL_SEARCH); the tools that they name are
    those of the request. Raises BadRequest.
    """
    if not isinstance(content, list):
        return content
    blocks = []
    for block in content:
        if isinstance(block, Mapping) and block.get("type") == "tool_reference":
            name = block.get("tool_name")
            if not name or not isinstance(name, str):
                raise BadRequest(f"{where} has a tool_reference without tool_name", param=where)
            blocks.append({"type": "text", "text": f"{name} is available.\n"})
        else:
            blocks.append(block)
    return blocks


def _assistant(blocks: list[Mapping[str, Any]], where: str) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_use":
            if not isinstance(block.get("name"), str) or not isinstance(block.get("input"), dict):
                raise BadRequest(f"{where} has a tool_use without name or input", param=where)
            arguments = json.dumps(block["input"], ensure_ascii=False)
            calls.append(ToolCall(str(block.get("id") or ""), block["name"], arguments))
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind not in IGNORED_BLOCKS:
            texts.append(text_of([block], where))
    return Message("assistant", "".join(texts), "".join(thoughts), tuple(calls))


def _continued(thread: object, recall: Recall) -> Earlier | None:
    """Return the answer that a thread continues, whose request sends only new messages.

    None for a thread that is begun. Raises BadRequest.
    """
    kind = thread.get("type") if isinstance(thread, Mapping) else thread
    if kind in (None, "create"):
        return None
    if not isinstance(thread, Mapping) or kind != "continue":
        raise BadRequest(f"thread {kind!r} must be of type create or continue", param="thread")
    remedy = "send all messages"
    name, field = thread.get("previous_message_id"), "thread.previous_message_id"
    return recalled(name, "msg", recall, field=field, remedy=remedy)


def _tools(body: Mapping[str, object]) -> tuple[tuple[Tool, ...], tuple[str, ...]]:
    """Return the tools, and the kinds that are left out because a server would run them."""
    raw_tools, choice = body.get("tools") or [], body.get("tool_choice") or {"type": "auto"}
    if not isinstance(raw_tools, list) or not isinstance(choice, Mapping):
        raise BadRequest("tools must be a list, and tool_choice an object", param="tools")
    if choice.get("type") == "none":
        return (), ()
    if choice.get("type") != "auto":
        raise constrains_sampling(
            f"tool_choice {choice.get('type')!r}", "tool_choice", remedy="use 'auto' or 'none'"
        )
    if choice.get("disable_parallel_tool_use"):
        raise constrains_sampling(
            "disable_parallel_tool_use", "tool_choice", remedy="leave it out or send false"
        )
    dropped = request_fields.server_tools(raw_tools)
    tools: list[Tool] = []
    for place, tool in enumerate(raw_tools):
        if request_fields.server_tool(tool) is not None:
            continue
        if not isinstance(tool, Mapping) or not isinstance(tool.get("name"), str):
            raise BadRequest(f"tools[{place}] must have a name", param="tools")
        kind = tool.get("type")
        if kind not in (None, "custom") and not tool.get("input_schema"):
            raise BadRequest(
                f"tools[{place}] is of type {str(kind)[:80]!r}, whose arguments only Anthropic's "
                "models know; send it without type, with description and input_schema",
                param="tools",
            )
        tools.append(function_tool(tool, tool.get("input_schema")))
    return tuple(tools), dropped


def _blocks(message: Message) -> list[dict[str, object]]:
    blocks: list[dict[str, object]] = []
    if message.reasoning:
        # Clients take a thought without a signature for one of another model.
        signed = {"thinking": message.reasoning, "signature": SIGNATURE}
        blocks.append({"type": "thinking", **signed})
    if message.content or not message.tool_calls:
        blocks.append({"type": "text", "text": message.content})
    for call in message.tool_calls:
        use = {"type": "tool_use", "id": call.id, "name": call.name}
        blocks.append({**use, "input": json.loads(call.arguments)})
    return blocks


def _begun(block: dict[str, object]) -> tuple[dict[str, object], list[dict[str, object]]]:
    """Return a block without its content, and the deltas with all of it."""
    if block["type"] == "thinking":
        thought = {"type": "thinking_delta", "thinking": block["thinking"]}
        signed = {"type": "signature_delta", "signature": block["signature"]}
        return {**block, "thinking": "", "signature": ""}, [thought, signed]
    if block["type"] == "tool_use":
        arguments = json.dumps(block["input"], ensure_ascii=False)
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": arguments}]
    return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]


def _stop_reason(choice: ChatChoice) -> str:
    if choice.ended_by == "tool_calls":
        return "tool_use"
    if choice.ended_by == "length":
        return "max_tokens"
    return "stop_sequence" if choice.stop is not None else "end_turn"
