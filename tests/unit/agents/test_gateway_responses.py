"""OpenAI's Responses API at the gateway with OpenAI's client: one conversation, one trajectory."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import AsyncOpenAI
from openai.resources.responses import AsyncResponses  # takes seconds, so not within a test

from rlpost.extensions.agents import custom_tools
from rlpost.extensions.agents.chat_messages import BadRequest, Message, ToolCall
from rlpost.extensions.agents.openai_format import chat_request
from rlpost.extensions.agents.requests import ChatRequest, Earlier
from rlpost.extensions.agents.responses_format import responses_request
from tests.unit.agents.chat_models import write_model
from tests.unit.agents.sampled import check
from tests.unit.agents.test_gateway import CALL, setup

TOOL: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
SEARCH: Any = {
    "type": "tool_search",
    "execution": "client",
    "description": "Find tools.",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
}
QUESTION: Any = {"role": "user", "content": [{"type": "input_text", "text": "How is the weather?"}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("qwen"), "qwen")


async def test_a_loop_of_calls_with_openais_client_is_one_trajectory(folder: str) -> None:
    """Items are returned unchanged; the second answer is streamed, the third truncated."""
    answer = f"<think>\nHm.\n</think>\n\nLook:\n{CALL}"
    async with (
        setup(folder, [answer, "It is sunny.", "Take a walk."]) as made,
        await made.open() as episode,
    ):
        client = AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key, max_retries=0)
        responses = AsyncResponses(client)
        given: Any = {"model": "any", "instructions": "Be kind.", "tools": [TOOL]}
        items: list[Any] = [QUESTION]
        first = await responses.create(**given, input=items, temperature=0.1)
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
        assert (first.status, first.output_text) == ("completed", "Look:")
        call: Any = first.output[2]
        assert (call.name, call.arguments) == ("weather", '{"city": "Paris"}')
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        items += [*(item.to_dict() for item in first.output), result]
        kinds, texts = [], []
        async for event in await responses.create(**given, input=items, stream=True):
            kinds.append(event.type)
            if event.type == "response.output_text.delta":
                texts.append(event.delta)
            if event.type == "response.completed":
                second = event.response
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == "response.completed" and texts == ["It is sunny."]
        assert second.usage.input_tokens > first.usage.input_tokens
        items += [
            *(item.to_dict() for item in second.output),
            {"role": "user", "content": "So?"},
        ]
        third = await responses.create(**given, input=items, max_output_tokens=2)
        assert third.status == "incomplete"
        assert third.incomplete_details.reason == "max_output_tokens"
        first_two, *_ = episode.trajectories()
        assert [turn.request for turn in first_two.turns[:2]] == [0, 1]
        check(episode.trajectories(), made.sampled)
        await client.close()


def test_the_items_of_codex_for_a_known_model_are_refused_with_the_setting() -> None:
    items = [{"type": "additional_tools", "tools": []}, {"role": "user", "content": "Hi"}]
    with pytest.raises(BadRequest, match='set model = "policy"') as caught:
        responses_request({"model": "gpt-5", "input": items, "parallel_tool_calls": False})
    assert caught.value.param == "input[0]"


def test_items_become_messages_and_assistant_items_become_one_message() -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": "Two cities?"},
        {
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
        },
        {"role": "assistant", "content": [{"type": "output_text", "text": "Both:"}]},
        {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"},
        {"type": "function_call", "call_id": "b", "name": "weather", "arguments": ""},
        {"type": "function_call_output", "call_id": "a", "output": "sun"},
        {
            "type": "function_call_output",
            "call_id": "b",
            "output": [{"type": "input_text", "text": "rain"}],
        },
    ]
    calls = (ToolCall("a", "weather", "{}"), ToolCall("b", "weather", "{}"))
    assert responses_request({"input": items}).messages == (
        Message("system", "Be brief."),
        Message("user", "Two cities?"),
        Message("assistant", "Both:", "Hm.", calls),
        Message("tool", "sun", tool_call_id="a"),
        Message("tool", "rain", tool_call_id="b"),
    )
    assert responses_request({"input": "Hi", "instructions": "Go."}).messages == (
        Message("system", "Go."),
        Message("user", "Hi"),
    )


SEARCHES = (
    '<tool_call>\n{"name": "tool_search", "arguments": {"query": "weather"}}\n</tool_call>',
    CALL,
    "It is sunny.",
)
CUSTOM: Any = {"type": "custom", "name": "patch"}
FOUND: Any = [{"type": "namespace", "name": "mcp__sky", "description": "", "tools": [TOOL]}]


@pytest.mark.parametrize("by_id", [False, True])
async def test_a_search_for_tools_that_the_client_runs_is_one_trajectory(
    folder: str, by_id: bool
) -> None:
    """What it finds is read as the output of its call, and calls of it name their namespace."""
    async with setup(folder, SEARCHES) as made, await made.open() as episode:
        url, key = f"{episode.base_url}/responses", {"x-api-key": episode.api_key}
        items: list[Any] = [QUESTION]
        body: Any = {"tools": [SEARCH], "parallel_tool_calls": True}
        for kind in ("tool_search_call", "function_call", "message"):
            is_stream = kind == "tool_search_call"
            send = {**body, "input": items, "stream": is_stream}
            async with made.client.post(url, json=send, headers=key) as response:
                text = await response.text()
                assert response.status == 200, text
            answer = response_of(text) if is_stream else json.loads(text)
            (item,) = answer["output"]
            assert item["type"] == kind
            result: Any = {"call_id": item.get("call_id")}
            if kind == "tool_search_call":
                assert (item["arguments"], item["execution"]) == ({"query": "weather"}, "client")
                result |= {"type": "tool_search_output", "execution": "client", "tools": FOUND}
            elif kind == "function_call":
                assert (item["name"], item["namespace"]) == ("weather", "mcp__sky")
                result |= {"type": "function_call_output", "output": "sunny"}
            items = [result] if by_id else [*items, item, result]
            body["previous_response_id"] = answer["id"] if by_id else None
        (trajectory,) = episode.trajectories()
        assert [turn.text for turn in trajectory.turns] == list(SEARCHES)
        check([trajectory], made.sampled)


def found_by_search(tools: list[Any]) -> list[Any]:
    """The items of a search that found ``tools``."""
    call: Any = {"call_id": "c", "execution": "client", "arguments": {"query": "weather"}}
    return [
        QUESTION,
        {"type": "tool_search_call", **call},
        {"type": "tool_search_output", "call_id": "c", "execution": "client", "tools": tools},
    ]


def after(first: ChatRequest) -> Any:
    """What recalls the answer of a request."""
    return lambda _: Earlier(
        first.messages,
        first.tools,
        first.has_instructions,
        Message("assistant", "x"),
        first.found_tools,
        first.namespaces,
    )


def test_a_later_request_knows_the_found_tools_of_the_earlier_one_and_no_namespace_beside() -> None:
    """A plain function must not get the namespace that one of its name had before."""
    later: Any = {"input": "y", "previous_response_id": "resp_1"}
    first = responses_request({"input": "x", "tools": FOUND})
    second = responses_request({**later, "tools": [TOOL]}, after(first))
    assert first.namespaces == {"weather": "mcp__sky"} and second.namespaces == {}
    searched = responses_request({"input": found_by_search(FOUND), "tools": [SEARCH]})
    none = responses_request({**later, "tools": [SEARCH], "tool_choice": "none"}, after(searched))
    third = responses_request({**later, "tools": [SEARCH]}, after(none))
    for each in (searched, none, third):
        assert each.namespaces == {"weather": "mcp__sky"} and len(each.found_tools) == 1
    assert not none.allows_calls and not none.tools and third.allows_calls
    replaced = responses_request({**later, "tools": [SEARCH, TOOL]}, after(searched))
    assert replaced.namespaces == {} and replaced.found_tools == ()


def test_a_tool_that_is_found_again_is_no_conflict() -> None:
    items = [*found_by_search(FOUND), *found_by_search(FOUND)]
    assert responses_request({"input": items, "tools": [SEARCH]}).namespaces


async def test_no_call_of_a_found_tool_is_read_where_calls_are_not_allowed(folder: str) -> None:
    async with setup(folder, (CALL,)) as made, await made.open() as episode:
        url, key = f"{episode.base_url}/responses", {"x-api-key": episode.api_key}
        body = {"input": found_by_search(FOUND), "tools": [SEARCH], "tool_choice": "none"}
        async with made.client.post(url, json=body, headers=key) as response:
            assert response.status == 200, await response.text()
            (item,) = (await response.json())["output"]
        assert item["type"] == "message" and item["content"][0]["text"] == CALL


def response_of(stream: str) -> Any:
    """Return the response in the last event of a stream."""
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    return events[-1]["response"]


async def test_an_answer_that_a_client_splits_by_its_calls_is_recognised(folder: str) -> None:
    """LiteLLM sends a message of the assistant for each call; outputs may be in any order."""
    both = CALL.replace("Paris", "Rome") + "\n" + CALL
    async with setup(folder, [both, "Sun."]) as made, await made.open() as episode:
        url, key = f"{episode.base_url}/chat/completions", {"x-api-key": episode.api_key}
        body: Any = {
            "messages": [{"role": "user", "content": "How is the weather?"}],
            "tools": [{"type": "function", "function": TOOL}],
        }
        async with made.client.post(url, json=body, headers=key) as response:
            answer = (await response.json())["choices"][0]["message"]
        calls = answer["tool_calls"]
        assert len(calls) == 2
        body["messages"] += [
            *({"role": "assistant", "content": None, "tool_calls": [call]} for call in calls),
            *(
                {"role": "tool", "tool_call_id": call["id"], "content": "sun"}
                for call in reversed(calls)
            ),
        ]
        async with made.client.post(url, json=body, headers=key) as response:
            assert response.status == 200, await response.text()
        (trajectory,) = episode.trajectories()
        assert [turn.text for turn in trajectory.turns] == [both, "Sun."]
        check([trajectory], made.sampled)


@pytest.mark.parametrize("before", [[], [{"role": "user", "content": "x"}]])
def test_an_output_without_a_call_before_it_is_refused(before: list[Any]) -> None:
    """Also as the first message, which is left where a program cut off its history."""
    output = {"role": "tool", "tool_call_id": "gone", "content": "x"}
    with pytest.raises(BadRequest, match="'gone' follows no message with this call"):
        chat_request({"messages": [*before, output]})


def test_arguments_may_be_an_object() -> None:
    """As LiteLLM sends them in items of earlier answers."""
    items: list[Any] = [
        QUESTION,
        {"type": "function_call", "call_id": "a", "name": "weather", "arguments": {"city": "Ö"}},
        {"type": "function_call_output", "call_id": "a", "output": "sun"},
    ]
    (call,) = responses_request({"input": items}).messages[1].tool_calls
    assert call.arguments == '{"city": "Ö"}'


def test_a_function_that_is_named_as_a_search_is_none() -> None:
    plain = responses_request({"input": "x", "tools": [{**TOOL, "name": "tool_search"}]})
    search = responses_request({"input": "x", "tools": [SEARCH]})
    assert (plain.searches_tools, search.searches_tools) == (False, True)
    assert search.tools[0]["function"]["name"] == "tool_search" and not search.dropped_tools


def test_the_call_of_a_custom_tool_in_a_namespace_names_it() -> None:
    call = {"id": "fc_1", "status": "completed", "call_id": "c", "name": "patch"}
    item = {"type": "function_call", **call, "namespace": "mcp", "arguments": '{"input": "x"}'}
    expected = {"type": "custom_tool_call", **call, "namespace": "mcp", "input": "x"}
    assert custom_tools.call_items([item], frozenset({"patch"})) == [expected]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools"),
        ({"input": "x", "tools": [{"type": "tool_search"}]}, "tools"),
        ({"input": "x", "tools": [SEARCH, {**TOOL, "name": "tool_search"}]}, "tools"),
        ({"input": found_by_search(FOUND), "tools": [SEARCH, TOOL]}, "input[2].tools"),
        (
            {"input": found_by_search([{**TOOL, "name": "tool_search"}]), "tools": [SEARCH]},
            "input[2].tools",
        ),
        ({"input": [*found_by_search([TOOL]), *found_by_search(FOUND)]}, "input[5].tools"),
        ({"input": found_by_search([CUSTOM]), "tools": [SEARCH]}, "input[2].tools"),
        ({"input": "x", "tools": [CUSTOM, {**TOOL, "name": "patch"}]}, "tools"),
        ({"input": "x", "tools": [{**CUSTOM, "name": ""}]}, "tools"),
        ({"input": "x", "tools": [{**CUSTOM, "description": 3}]}, "tools"),
        ({"input": found_by_search([{**CUSTOM, "name": ""}]), "tools": [SEARCH]}, "tools"),
        ({"input": [{"type": "custom_tool_call", "name": "patch"}]}, "input[0]"),
        ({"input": [{"type": "tool_search_call", "execution": "server"}]}, "input[0]"),
        ({"input": [{"type": "tool_search_output", "tools": 3}]}, "input[0].tools"),
        ({"input": "x", "tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "arguments": "{}"}]}, "input[0]"),
        ({"input": [{"type": "reasoning", "content": [1]}]}, "input[0]"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_requests_that_cannot_be_answered_exactly_are_refused(body: Any, param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        responses_request(body)
    assert caught.value.param == param
