"""OpenAI's responses: requests in, responses and stream events out. Pure.

Reference: platform.openai.com/docs/api-reference/responses. A request holds the whole conversation
as items, or refers to answers of the episode by their ids. Consecutive items of the assistant
(reasoning, text, calls) become one message.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rlpost.extensions.agents import custom_tools, request_fields, tool_search
from rlpost.extensions.agents.chat_messages import (
    WITH_IMAGES,
    BadRequest,
    Message,
    Tool,
    ToolCall,
    checked,
    checked_arguments,
    content_of,
    function_tool,
    name_of,
    text_of,
)
from rlpost.extensions.agents.openai_format import (
    boolean,
    check_format,
    may_call_tools,
    whole_number,
)
from rlpost.extensions.agents.requests import (
    ChatRequest,
    Earlier,
    Recall,
    Reply,
    recall_nothing,
    recalled,
)

TEXT_PARTS = ("input_text", "output_text", "text")
IMAGE_PART = "input_image"
THOUGHT_PARTS = ("reasoning_text", "text")
Event = dict[str, object]
_Item = tuple[str, Mapping[str, Any]]  # its place in the request, for messages, and the item


def responses_request(body: Mapping[str, object], recall: Recall = recall_nothing) -> ChatRequest:
    """Read a request; ``recall`` returns the answers that it refers to. Raises BadRequest."""
    _check_model(body)  # before the fields that Codex sends for such a model
    overridden = request_fields.RESPONSES.check(body)
    text = body.get("text")
    check_format("text.format", text.get("format") if isinstance(text, Mapping) else None)
    if body.get("top_logprobs"):
        raise BadRequest("top_logprobs is not supported; leave it out", param="top_logprobs")
    instructions = text_of(body.get("instructions"), "instructions")
    messages = [Message("system", instructions)] if instructions else []
    earlier = None
    if (previous := body.get("previous_response_id")) is not None:
        field = "previous_response_id"
        remedy = "send the items of the conversation in input"
        earlier = recalled(previous, "resp", recall, field=field, remedy=remedy)
        messages += earlier.conversation(with_instructions=False)
        _check_new(body.get("input"), earlier, recall)
    messages += _messages(body.get("input"), recall)
    tools, namespaces, dropped = _tools(body)
    found_tools, found_namespaces = _found_tools(body, tools, namespaces, earlier)
    allows_calls = may_call_tools(body.get("tool_choice"))
    return ChatRequest(
        messages=checked(messages),
        tools=tools if allows_calls else (),
        namespaces={**found_namespaces, **namespaces},
        found_tools=found_tools,
        allows_calls=allows_calls,
        searches_tools=_searches(body.get("tools")),
        custom_tools=frozenset(custom_tools.custom_names(body.get("tools"))),
        dropped_tools=dropped,
        has_instructions=bool(instructions),
        max_tokens=whole_number(body, "max_output_tokens", 1, 2**31 - 1),
        is_stream=boolean(body, "stream"),
        with_usage=True,
        overridden=overridden,
    )


def response_body(reply: Reply) -> dict[str, Any]:
    """Return the body of a response."""
    completion = reply.completion
    choice = completion.choices[0]
    is_truncated = choice.ended_by == "length"
    prompt, sampled = completion.num_prompt_tokens, completion.num_tokens
    return {
        "id": f"resp_{completion.id}",
        "object": "response",
        "created_at": reply.created,
        "status": "incomplete" if is_truncated else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_truncated else None,
        "error": None,
        "model": reply.model,
        "instructions": None,
        "output": _answer_items(reply),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [
            {"type": "function", "strict": False, **tool["function"]}
            for tool in reply.request.tools
        ],
        "metadata": {},
        "temperature": None,
        "top_p": None,
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + sampled,
        },
    }


def response_events(reply: Reply, num_sent: int = 0) -> Iterator[Event]:
    """Yield the events of a streamed response, numbered; ``num_sent``: those of its wait."""
    events = itertools.islice(_events(response_body(reply)), int(num_sent > 0), None)
    for number, event in enumerate(events, num_sent):
        yield {**event, "sequence_number": number}


def waiting_event(reply: Reply, number: int) -> Event:
    """Return event ``number`` of a response whose answer, empty in ``reply``, is generated.

    Clients need ``response.created`` first; Codex ends a stream with no event for 300 seconds.
    """
    created, in_progress = itertools.islice(_events(response_body(reply)), 2)
    return {**(in_progress if number else created), "sequence_number": number}


def _events(body: dict[str, Any]) -> Iterator[Event]:
    begun = {
        **body,
        "status": "in_progress",
        "output": [],
        "usage": None,
        "incomplete_details": None,
    }
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(body["output"]):
        at = {"output_index": index}
        yield {"type": "response.output_item.added", **at, "item": _begun(item)}
        at_item = {**at, "item_id": item["id"]}
        if item["type"] == tool_search.CALL:
            pass  # it has no deltas
        elif item["type"] == custom_tools.CALL:
            kind, text = "response.custom_tool_call_input", item[custom_tools.INPUT]
            yield {"type": f"{kind}.delta", **at_item, "delta": text}
            yield {"type": f"{kind}.done", **at_item, custom_tools.INPUT: text}
        elif item["type"] == "function_call":
            kind, arguments = "response.function_call_arguments", item["arguments"]
            yield {"type": f"{kind}.delta", **at_item, "delta": arguments}
            yield {"type": f"{kind}.done", **at_item, "name": item["name"], "arguments": arguments}
        else:
            yield from _part_events(item["content"][0], {**at_item, "content_index": 0})
        yield {"type": "response.output_item.done", **at, "item": item}
    yield {"type": f"response.{body['status']}", "response": body}


def _part_events(part: dict[str, object], at: Mapping[str, object]) -> Iterator[Event]:
    """Yield the events of one part, of text or reasoning, with all of its text in one delta."""
    kind, text = part["type"], part["text"]
    logprobs: dict[str, object] = {"logprobs": []} if kind == "output_text" else {}
    yield {"type": "response.content_part.added", **at, "part": {**part, "text": ""}}
    yield {"type": f"response.{kind}.delta", **at, "delta": text, **logprobs}
    yield {"type": f"response.{kind}.done", **at, "text": text, **logprobs}
    yield {"type": "response.content_part.done", **at, "part": part}


def _begun(item: dict[str, object]) -> dict[str, object]:
    """Return an item as it is before its first delta."""
    begun = {**item, "status": "in_progress"}
    if item["type"] == "function_call":
        return {**begun, "arguments": ""}
    if item["type"] == tool_search.CALL:
        return {**begun, "arguments": {}}
    if item["type"] == custom_tools.CALL:
        return {**begun, custom_tools.INPUT: ""}
    return {**begun, "content": []}


def _answer_items(reply: Reply) -> list[dict[str, object]]:
    """Return an answer as items; a call of a function in a namespace names it.

    Calls of a search for tools and of custom tools are items of their kinds.
    """
    choice, namespaces = reply.completion.choices[0], reply.request.namespaces
    status = "incomplete" if choice.ended_by == "length" else "completed"
    items = _items(choice.message, reply.completion.id, status)
    for item in items:
        if str(item.get("name")) in namespaces:
            item["namespace"] = namespaces[str(item["name"])]
    items = custom_tools.call_items(items, reply.request.custom_tools)
    if reply.request.searches_tools:
        return [
            tool_search.call_item(item) if item.get("name") == tool_search.NAME else item
            for item in items
        ]
    return items


def _items(message: Message, name: str, status: str) -> list[dict[str, object]]:
    """Return an answer as items: reasoning, text, calls."""
    items = list[dict[str, object]]()
    if message.reasoning:
        thought = {"type": "reasoning_text", "text": message.reasoning}
        items.append(
            {
                "type": "reasoning",
                "id": f"rs_{name}",
                "status": status,
                "summary": [],
                "content": [thought],
            }
        )
    if message.content or not message.tool_calls:
        text = {"type": "output_text", "text": message.content, "annotations": [], "logprobs": []}
        items.append(
            {
                "type": "message",
                "id": f"msg_{name}",
                "status": status,
                "role": "assistant",
                "content": [text],
            }
        )
    for place, call in enumerate(message.tool_calls):
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{name}_{place}",
                "status": status,
                "call_id": call.id,
                "name": call.name,
                "arguments": call.arguments,
            }
        )
    return items


def _check_model(body: Mapping[str, object]) -> None:
    """Raise BadRequest for items that Codex sends for models whose profile it has."""
    items = body.get("input")
    for place, item in enumerate(items if isinstance(items, list) else ()):
        if isinstance(item, Mapping) and item.get("type") == "additional_tools":
            raise BadRequest(
                f"input[{place}] is of type 'additional_tools', which Codex sends for a model of "
                f'OpenAI (model {str(body.get("model"))[:80]!r}); set model = "policy" in its '
                "config.toml",
                param=f"input[{place}]",
            )


def _messages(raw_input: object, recall: Recall) -> list[Message]:
    """Convert the field ``input``. Raises BadRequest."""
    if isinstance(raw_input, str):
        return [Message("user", raw_input)]
    if not isinstance(raw_input, list) or not raw_input:
        raise BadRequest("input must be a string or a list with at least one item", param="input")
    items: list[_Item] = []
    for place, item in enumerate(raw_input):
        where = f"input[{place}]"
        if not isinstance(item, Mapping):
            raise BadRequest(f"{where} must be an object", param=where)
        if item.get("type") == "item_reference":
            item = _referenced(item.get("id"), where, recall)
        items.append((where, item))
    messages: list[Message] = []
    for is_answer, neighbours in itertools.groupby(items, key=_is_of_the_assistant):
        if is_answer:
            messages.append(_answer(neighbours, recall))
        else:
            messages += [_message(item, where) for where, item in neighbours]
    return messages


def _check_new(raw_input: object, earlier: Earlier, recall: Recall) -> None:
    """Raise BadRequest for an item of an answer that the conversation has: it would be there twice."""
    conversation = earlier.conversation(with_instructions=True)
    places: dict[str, int] = {}  # each name once, as a body may repeat one many times
    for place, item in enumerate(raw_input if isinstance(raw_input, list) else ()):
        if isinstance(item, Mapping) and not str(item.get("type")).endswith("_output"):
            places.setdefault(str(item.get("call_id")), place)
            places.setdefault(_answer_id(item.get("id")), place)
    for name, place in places.items():
        repeated = recall(name)
        if repeated and any(repeated.answer is message for message in conversation):
            raise BadRequest(
                f"input[{place}] is an item of an answer that previous_response_id has; send what "
                "follows it, or all items without previous_response_id",
                param=f"input[{place}]",
            )


def _answer_id(name: object) -> str:
    """Return the id of the answer to which the id of an item belongs: KIND_EPISODE_NUMBER[_PLACE]."""
    return "_".join(str(name).split("_")[1:3])


def _referenced(name: object, where: str, recall: Recall) -> Mapping[str, Any]:
    """Return the item of an answer that has this id. Raises BadRequest."""
    kind, answer = str(name).partition("_")[0], _answer_id(name)
    remedy = "send the items themselves (store: false)"
    if kind in ("rs", "msg", "fc"):
        earlier = recalled(f"resp_{answer}", "resp", recall, field=where, remedy=remedy)
        for item in _items(earlier.answer, answer, "completed"):
            if item["id"] == name:
                return item
    raise BadRequest(f"{where} {name!r} is no item of this episode; {remedy}", param=where)


def _is_of_the_assistant(located: _Item) -> bool:
    item = located[1]
    if item.get("type", "message") == "message":
        return item.get("role") == "assistant"
    kinds = ("reasoning", "function_call", tool_search.CALL, custom_tools.CALL)
    return item.get("type") in kinds


def _answer(items: Iterable[_Item], recall: Recall) -> Message:
    """Convert consecutive items of the assistant."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for where, item in items:
        if item.get("type") == "reasoning":
            thoughts.append(text_of(item.get("content"), where, THOUGHT_PARTS))
        elif item.get("type") == tool_search.CALL:
            calls.append(tool_search.call_of(item, where))
        elif item.get("type") == custom_tools.CALL:
            calls.append(custom_tools.call_of(item, where, recall))
        elif item.get("type") == "function_call":
            if not isinstance(item.get("name"), str):
                raise BadRequest(f"{where} must have a name", param=where)
            arguments = checked_arguments(item.get("arguments"), where)
            calls.append(ToolCall(str(item.get("call_id") or ""), item["name"], arguments))
        else:
            texts.append(text_of(item.get("content"), where, TEXT_PARTS))
    return Message("assistant", "".join(texts), "".join(thoughts), tuple(calls))


def _message(item: Mapping[str, object], where: str) -> Message:
    """Convert an item that is not the assistant's."""
    kind = item.get("type", "message")
    if kind in ("function_call_output", custom_tools.OUTPUT):
        call_id = str(item.get("call_id") or "")
        output = content_of(item.get("output"), where, TEXT_PARTS, image_kind=IMAGE_PART)
        return Message("tool", output.text, tool_call_id=call_id, images=output.images)
    if kind == tool_search.OUTPUT:
        call_id = str(item.get("call_id") or "")
        loaded, _ = _functions(item.get("tools") or [], f"{where}.tools")
        return Message("tool", tool_search.shown(loaded), tool_call_id=call_id)
    if kind != "message":
        raise BadRequest(
            f"{where} is of type {kind!r}, which is not supported; leave it out, or send a function_call "
            "and its function_call_output",
            param=where,
        )
    role = "system" if item.get("role") == "developer" else item.get("role")
    if role not in ("system", "user"):
        raise BadRequest(
            f"{where}.role {role!r} must be user, assistant, system or developer", param=where
        )
    image_kind = IMAGE_PART if role in WITH_IMAGES else None
    both = content_of(item.get("content"), where, TEXT_PARTS, image_kind=image_kind)
    return Message(role, both.text, images=both.images)


def _tools(
    body: Mapping[str, object],
) -> tuple[tuple[Tool, ...], dict[str, str], tuple[str, ...]]:
    """Return the functions, the namespaces of some by name, and the kinds that are left out.

    Codex sends functions in tools of type ``namespace``. Raises BadRequest.
    """
    raw_tools = body.get("tools") or []
    if not isinstance(raw_tools, list):
        raise BadRequest("tools must be a list", param="tools")
    dropped = request_fields.server_tools(raw_tools)
    return *_functions(raw_tools, "tools"), dropped


def _searches(raw_tools: object) -> bool:
    tools = raw_tools if isinstance(raw_tools, list) else ()
    return any(tool_search.is_run_by_client(tool) for tool in tools)


def _found_tools(
    body: Mapping[str, object],
    tools: Sequence[Tool],
    namespaces: Mapping[str, str],
    earlier: Earlier | None,
) -> tuple[tuple[Tool, ...], dict[str, str]]:
    """Return the tools that outputs of a search hold, and the namespaces of some by name.

    Those of ``earlier`` come first, without names that ``tools`` has. Raises BadRequest for two
    functions of one name that a call could not tell apart.
    """
    origins: dict[str, str | None] = {
        name: namespaces.get(name, "") for name in map(name_of, tools)
    }
    if _searches(body.get("tools")):
        origins[tool_search.NAME] = None
    all_found, all_namespaces = list[Tool](), dict[str, str]()

    def add(new_tools: Sequence[Tool], named: Mapping[str, str], where: str) -> None:
        for tool in new_tools:
            name = name_of(tool)
            origin = named.get(name, "")
            if (other := origins.setdefault(name, origin)) != origin:
                raise BadRequest(
                    f"{where} has a function {name!r} ({_described(origin)}), and another tool has "
                    f"this name ({_described(other)}); send one",
                    param=where,
                )
            all_found.append(tool)
            if origin:
                all_namespaces[name] = origin

    if earlier is not None:
        kept = [tool for tool in earlier.found_tools if name_of(tool) not in origins]
        add(kept, earlier.namespaces, "previous_response_id")
    raw_input = body.get("input")
    for place, item in enumerate(raw_input if isinstance(raw_input, list) else ()):
        if isinstance(item, Mapping) and item.get("type") == tool_search.OUTPUT:
            where = f"input[{place}].tools"
            if list(custom_tools.custom_names(item.get("tools"))):
                raise BadRequest(f"{where} has a custom tool; send it in tools", param=where)
            add(*_functions(item.get("tools") or [], where), where)
    return tuple(all_found), all_namespaces


def _described(origin: str | None) -> str:
    """Return where a function is from, for messages: a namespace, "", or None for the search."""
    if origin is None:
        return "the search"
    return f"in namespace {origin!r}" if origin else "in no namespace"


def _functions(raw_tools: object, field: str) -> tuple[tuple[Tool, ...], dict[str, str]]:
    """Return the functions of a list of tools, and the namespaces of some. Raises BadRequest."""
    if not isinstance(raw_tools, list):
        raise BadRequest(f"{field} must be a list", param=field)
    tools: list[Tool] = []
    namespaces: dict[str, str] = {}
    for place, tool in enumerate(raw_tools):
        where = f"{field}[{place}]"
        if request_fields.server_tool(tool) is not None:
            continue
        if tool_search.is_run_by_client(tool):
            tools.append(tool_search.search_function(tool))
        elif isinstance(tool, Mapping) and tool.get("type") == "namespace":
            inner = tool.get("tools") or []
            if not isinstance(inner, list):
                raise BadRequest(f"{where}.tools must be a list", param="tools")
            for number, each in enumerate(inner):
                function = _function(each, f"{where}.tools[{number}]")
                namespaces[name_of(function)] = str(tool.get("name"))
                tools.append(function)
        else:
            tools.append(_function(tool, where))
    names = Counter(map(name_of, tools))
    custom_tools.check_names(names.elements(), custom_tools.custom_names(raw_tools))
    for name in (*namespaces, tool_search.NAME):
        if names[name] > 1:
            kind = f"in namespace {namespaces[name]!r}" if name in namespaces else "a search"
            raise BadRequest(
                f"two tools have the name {name!r}, one of them {kind}; send one", param=field
            )
    return tuple(tools), namespaces


def _function(tool: object, where: str) -> Tool:
    """Convert a function or a custom tool. Raises BadRequest."""
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    kinds = ("function", custom_tools.KIND)
    name = tool.get("name") if isinstance(tool, Mapping) else None
    if not isinstance(tool, Mapping) or kind not in kinds or not (name and isinstance(name, str)):
        raise BadRequest(
            f"{where} is of type {kind!r}; send a function with a name in its place",
            param="tools",
        )
    if kind == custom_tools.KIND:
        return custom_tools.custom_function(tool)
    return function_tool(tool, tool.get("parameters"))
