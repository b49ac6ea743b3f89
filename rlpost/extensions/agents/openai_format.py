"""OpenAI's chat completions: requests in, responses and stream events out. Pure.

Reference: platform.openai.com/docs/api-reference/chat.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlpost.extensions.agents import custom_tools, request_fields
from rlpost.extensions.agents.chat_messages import (
    BadRequest,
    Message,
    Tool,
    check_function,
    constrains_sampling,
    messages_from_openai,
    name_of,
)
from rlpost.extensions.agents.requests import (
    MAX_CHOICES,
    MAX_STOP_CHARS,
    MAX_STOPS,
    ChatChoice,
    ChatRequest,
    Recall,
    Reply,
    recall_nothing,
)


def chat_request(body: Mapping[str, object], recall: Recall = recall_nothing) -> ChatRequest:
    """Read a request; ``recall`` returns the answers with its custom calls. Raises BadRequest."""
    overridden = request_fields.CHAT.check(body)
    check_format("response_format", body.get("response_format"))
    if body.get("top_logprobs"):
        raise BadRequest(
            "top_logprobs must be 0; only sampled tokens have log-probs", param="top_logprobs"
        )
    limit_field = (
        "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    )
    stream_options = body.get("stream_options") or {}
    tools, custom = _tools(body)
    return ChatRequest(
        messages=messages_from_openai(custom_tools.with_functions(body.get("messages"), recall)),
        tools=tools,
        custom_tools=custom,
        n=whole_number(body, "n", 1, MAX_CHOICES) or 1,
        max_tokens=whole_number(body, limit_field, 1, 2**31 - 1),
        stop=stop_strings(body.get("stop"), "stop"),
        with_logprobs=boolean(body, "logprobs"),
        is_stream=boolean(body, "stream"),
        with_usage=isinstance(stream_options, Mapping)
        and bool(stream_options.get("include_usage")),
        overridden=overridden,
    )


def chat_completion(reply: Reply) -> dict[str, object]:
    """Return the body of a response."""
    return {
        **_head(reply, "chat.completion"),
        "choices": [
            {
                "index": index,
                "message": {"refusal": None, **_message(choice.message, reply)},
                "logprobs": _logprobs(choice, reply),
                "finish_reason": choice.ended_by,
            }
            for index, choice in enumerate(reply.completion.choices)
        ],
        "usage": _usage(reply),
    }


def chat_chunks(reply: Reply) -> Iterator[dict[str, object]]:
    """Yield the events of a streamed response."""
    head = _head(reply, "chat.completion.chunk")

    def chunk(index: int, delta: dict[str, object], **other: object) -> dict[str, object]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return {**head, "choices": [{**choice, **other}]}

    for index, choice in enumerate(reply.completion.choices):
        message = choice.message
        # A client may take an empty text before a call for the answer.
        first = None if message.tool_calls and not message.content else ""
        yield chunk(index, {"role": "assistant", "content": first})
        if message.reasoning:
            yield chunk(index, {"reasoning_content": message.reasoning})
        logprobs = _logprobs(choice, reply)
        if message.content or logprobs:
            yield chunk(index, {"content": message.content}, logprobs=logprobs)
        for number, call in enumerate(_message(message, reply).get("tool_calls", ())):
            yield chunk(index, {"tool_calls": [{"index": number, **call}]})
        yield chunk(index, {}, finish_reason=choice.ended_by)
    if reply.request.with_usage:
        yield {**head, "choices": [], "usage": _usage(reply)}


def error_body(
    message: str, *, status: int, code: str | None, param: str | None
) -> dict[str, object]:
    """Return the body of a refusal."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    if status == 401:
        kind = "authentication_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def model_body(model: str, created: int) -> dict[str, str | int]:
    """Return the description of a model; ``created`` is Unix time in seconds."""
    return {"id": model, "object": "model", "created": created, "owned_by": "rlpost"}


def whole_number(body: Mapping[str, object], field: str, least: int, most: int) -> int | None:
    """Return a number of a request, or None if it has none. Raises BadRequest."""
    value = body.get(field)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise BadRequest(f"{field} must be an integer from {least} to {most}", param=field)
    return value


def boolean(body: Mapping[str, object], field: str) -> bool:
    """Return a truth value of a request, False if it has none. Raises BadRequest."""
    value = body.get(field)
    if value not in (None, True, False):
        raise BadRequest(f"{field} must be true or false", param=field)
    return bool(value)


def stop_strings(given: object, field: str) -> tuple[str, ...]:
    """Return the stop strings of a request. Raises BadRequest."""
    values = [given] if isinstance(given, str) else given or []
    if not isinstance(values, list) or not all(isinstance(one, str) for one in values):
        raise BadRequest(f"{field} must be a string or a list of strings", param=field)
    if len(values) > MAX_STOPS:
        raise BadRequest(f"{field} may have {MAX_STOPS} strings", param=field)
    # At each token an engine decodes as many tokens as the longest string has.
    if any(len(one) > MAX_STOP_CHARS for one in values):
        raise BadRequest(f"a string of {field} may have {MAX_STOP_CHARS} characters", param=field)
    return tuple(one for one in values if one)


def check_format(field: str, given: object) -> None:
    """Raise BadRequest for a format of the answer other than text."""
    kind = given.get("type") if isinstance(given, Mapping) else given
    if kind not in (None, "text"):
        raise constrains_sampling(
            f"{field} {kind!r}", field, remedy="ask for the format in a message"
        )


FUNCTION_FIELDS = ("name", "description", "parameters")
"""What the policy reads of a function. Others are for a server, such as where a cache ends."""


def _tools(body: Mapping[str, object]) -> tuple[tuple[Tool, ...], frozenset[str]]:
    """Return the tools as functions, and the names of custom ones. Raises BadRequest."""
    raw_tools = body.get("tools") or []
    if not isinstance(raw_tools, list):
        raise BadRequest("tools must be a list", param="tools")
    tools = [_tool(tool, f"tools[{place}]") for place, tool in enumerate(raw_tools)]
    is_custom = [custom_tools.is_custom(tool) for tool in raw_tools]
    names = [name_of(tool) for tool in tools]
    custom = frozenset(name for name, yes in zip(names, is_custom, strict=True) if yes)
    custom_tools.check_names(names, custom)
    return tuple(tools) if may_call_tools(body.get("tool_choice")) else (), custom


def _tool(raw: object, where: str) -> Tool:
    """Convert a function or a custom tool. Raises BadRequest."""
    function = raw.get("function") if isinstance(raw, Mapping) else None
    if custom_tools.is_custom(raw):
        function = custom_tools.of_chat(raw)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not (name and isinstance(name, str)):
        raise BadRequest(
            f"{where} must be a function or a custom tool with a name; other kinds of tools are not "
            "supported",
            param="tools",
        )
    if custom_tools.is_custom(raw):
        return custom_tools.custom_function(function)
    check_function(function, name)
    kept: Any = {field: function[field] for field in function if field in FUNCTION_FIELDS}
    return {"type": "function", "function": kept}


def may_call_tools(choice: object) -> bool:
    """Whether ``tool_choice`` allows calls. Raises BadRequest for one that would force a call."""
    if isinstance(choice, Mapping) and choice.keys() == {"type"}:  # as Anthropic spells it
        choice = choice["type"]
    if choice not in (None, "auto", "none"):
        raise constrains_sampling(
            f"tool_choice {choice!r}", "tool_choice", remedy="use 'auto' or 'none'"
        )
    return choice != "none"


def _message(message: Message, reply: Reply) -> dict[str, Any]:
    """Return an answer, with calls of custom tools in their form."""
    fields: dict[str, Any] = message.for_openai()
    for place, call in enumerate(message.tool_calls):
        if call.name in reply.request.custom_tools:
            fields["tool_calls"][place] = custom_tools.chat_call(call)
    return fields


def _head(reply: Reply, kind: str) -> dict[str, object]:
    return {
        "id": f"chatcmpl-{reply.completion.id}",
        "object": kind,
        "created": reply.created,
        "model": reply.model,
    }


def _usage(reply: Reply) -> dict[str, int]:
    prompt, sampled = reply.completion.num_prompt_tokens, reply.completion.num_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
    }


def _logprobs(choice: ChatChoice, reply: Reply) -> dict[str, object] | None:
    """Return one entry per sampled token, including reasoning, calls and the stop token.

    None unless the request asks for log-probs.
    """
    if not reply.request.with_logprobs:
        return None
    entries = []
    for token_id, logprob in zip(choice.token_ids, choice.logprobs, strict=True):
        # Clients join the bytes; a token may end inside a character.
        data = reply.token_bytes(token_id)
        entries.append(
            {
                "token": data.decode("utf-8", "replace"),
                "logprob": logprob,
                "bytes": list(data),
                "top_logprobs": [],
            }
        )
    return {"content": entries, "refusal": None}
