"""Conversations in which agents failed at other endpoints, by the reports of their users.

Each is a small program that sends what the report shows. Every sampled token must be trained once,
after the tokens that its engine read, and a program that continues an answer continues its
trajectory.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from rlpost.extensions.agents.episode import OpenEpisode
from tests.unit.agents.chat_models import write_model
from tests.unit.agents.sampled import check
from tests.unit.agents.test_gateway import CALL, CHAT, MESSAGES, USER, Body, Setup, setup

RESPONSES = "/responses"
ANSWER = f"<think>\nHm.\n</think>\n\nLook:\n{CALL}"


def call_of(name: str, **arguments: str) -> str:
    """Return a call as Qwen writes it."""
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


NO_ARGUMENTS = call_of("now")
DONE = "It is sunny."
FUNCTIONS: list[Body] = [
    {"name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}},
    {"name": "now", "parameters": {"type": "object", "properties": {}}},
]


@dataclass
class Client:
    """A program with the key of an episode; ``messages`` are its conversation so far."""

    made: Setup
    episode: OpenEpisode
    messages: list[Body] = field(default_factory=lambda: [USER])

    async def send(self, path: str, body: Body) -> Any:
        """Return the JSON of a response, or the events of a stream."""
        key = {"x-api-key": self.episode.api_key}
        root = self.episode.anthropic_url if path == MESSAGES else self.episode.base_url
        if body.get("stream"):
            return [data for _, data in await self.made.events(root + path, key, body)]
        async with self.made.client.post(root + path, json=body, headers=key) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def refused(self, path: str, body: Body, match: str) -> None:
        """Send a request that must be refused before an engine gets it."""
        num_inputs = len(self.made.sampled.inputs)
        with pytest.raises(AssertionError, match=match):
            await self.send(path, body)
        assert len(self.made.sampled.inputs) == num_inputs

    def last_input(self) -> str:
        """Return the text of what an engine read last."""
        ids = np.frombuffer(self.made.sampled.inputs[-1], np.int32)
        return self.made.sampled.template.decode_all(ids.tolist())

    async def chat(self, **fields: Any) -> Body:
        """Return the message that answers the conversation."""
        tools = [{"type": "function", "function": each} for each in FUNCTIONS]
        body = await self.send(CHAT, {"messages": self.messages, "tools": tools} | fields)
        message: Body = body["choices"][0]["message"]
        return message

    def output(self, answer: Body, number: int = 0) -> Body:
        """Return the output of a call."""
        call = answer["tool_calls"][number]
        return {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}

    async def continue_with(self, *messages: Body) -> Body:
        """Add messages, and return the answer to them."""
        self.messages += messages
        return await self.chat()


Program = Callable[[Client], Awaitable[object]]


def name_of(program: Program) -> str:
    """Return the name of a function, or of an object with its values."""
    return getattr(program, "__name__", repr(program))


@dataclass(frozen=True)
class Report:
    """``program`` gets ``answers``, in ``trajectories`` trajectories."""

    url: str
    program: Program
    answers: Sequence[str] = (ANSWER, DONE)
    trajectories: int = 1


async def parts_as_messages(client: Client) -> None:
    """The agents SDK for JavaScript sends reasoning, text and calls as three messages."""
    answer = await client.chat()
    thought = {"role": "assistant", "content": None, "reasoning": answer["reasoning_content"]}
    text = {"role": "assistant", "content": [{"type": "text", "text": answer["content"]}]}
    calls = {"role": "assistant", "content": None, "tool_calls": answer["tool_calls"]}
    last = await client.continue_with(thought, text, calls, client.output(answer))
    assert "tool_calls" not in last, "a program would look for its first call"


async def text_and_calls_as_messages(client: Client) -> None:
    answer = await client.chat()
    text = {"role": "assistant", "content": answer["content"]}
    calls = {"role": "assistant", "content": "", "tool_calls": answer["tool_calls"]}
    await client.continue_with(text, calls, client.output(answer))


async def empty_lists_as_content(client: Client) -> None:
    client.messages = [{"role": "user", "content": [{"type": "text", "text": "How?"}]}]
    answer = await client.chat()
    await client.continue_with({**answer, "content": []}, client.output(answer))


async def a_call_without_arguments(client: Client) -> None:
    """The arguments of a call without any are an object, also when they come back as nothing."""
    for spelled in ("", None, "{}"):
        answer = await client.chat()
        (call,) = answer["tool_calls"]
        assert call["function"] == {"name": "now", "arguments": "{}"}
        changed = {**call, "function": {"name": "now", "arguments": spelled}}
        client.messages += [{**answer, "tool_calls": [changed]}, client.output(answer)]
    await client.chat()


async def a_streamed_call(client: Client) -> None:
    """Deltas have indices and ids, and no empty text comes before a call."""
    tools = [{"type": "function", "function": each} for each in FUNCTIONS]
    body = {"messages": client.messages, "tools": tools, "stream": True}
    *chunks, _ = await client.send(CHAT, body)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["index"] for call in calls] == [0, 1]
    assert all(call["id"] and call["function"]["name"] for call in calls)
    assert [delta["content"] for delta in deltas if "content" in delta] == [None]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    answer = {"role": "assistant", "content": None, "tool_calls": calls}
    await client.continue_with(answer, client.output(answer, 1), client.output(answer, 0))


async def an_empty_text_block(client: Client) -> None:
    """Between a thought and a call, in Anthropic's format."""
    tools = [{"name": each["name"], "input_schema": each["parameters"]} for each in FUNCTIONS]
    body: Body = {"messages": [USER], "max_tokens": 99, "tools": tools}
    answer = await client.send(MESSAGES, body)
    (use,) = (block for block in answer["content"] if block["type"] == "tool_use")
    blocks = [{"type": "text", "text": ""}, use]
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": []}
    body["messages"] += [
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": [result]},
    ]
    await client.send(MESSAGES, body)


async def a_call_without_its_reasoning(client: Client) -> None:
    """OpenAI's own server refuses such an item of its Responses."""
    body: Body = {
        "input": [USER],
        "tools": [{"type": "function", "strict": False, **each} for each in FUNCTIONS],
    }
    answer = await client.send(RESPONSES, body)
    items = [item for item in answer["output"] if item["type"] != "reasoning"]
    output = {"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "sunny"}
    body["input"] += [*items, output]
    await client.send(RESPONSES, body)


async def token_ids_on_messages(client: Client) -> None:
    """Those that a program attaches are not believed."""
    answer = await client.chat()
    ids = {"prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [-0.5]}
    await client.continue_with({**answer, **ids, "token_ids": [3]}, client.output(answer))


async def other_tools_in_the_next_turn(client: Client) -> None:
    answer = await client.chat()
    client.messages += [answer, client.output(answer)]
    await client.chat(tools=[{"type": "function", "function": FUNCTIONS[0]}])


async def calls_that_are_cleared(client: Client) -> None:
    """The answer comes back without its calls, which is an edit."""
    answer = await client.chat()
    cleared = {"role": "assistant", "content": answer["content"], "tool_calls": []}
    await client.continue_with(cleared, {"role": "user", "content": "Go on."})


async def a_handoff_that_nobody_sampled(client: Client) -> None:
    """A supervisor adds a call and its output after the answer of an agent."""
    answer = await client.chat()
    call = {"id": "x", "type": "function", "function": {"name": "transfer", "arguments": "{}"}}
    handoff = {"role": "assistant", "content": "Back.", "tool_calls": [call], "name": "agent"}
    client.messages += [answer, client.output(answer)]
    client.messages += [{**await client.chat(), "name": "agent"}, handoff]
    await client.continue_with({"role": "tool", "tool_call_id": "x", "content": "transferred"})


async def a_call_that_was_interrupted(client: Client) -> None:
    """One of two calls has no output."""
    answer = await client.chat()
    user = {"role": "user", "content": "Stop that."}
    await client.continue_with(answer, client.output(answer, 1), user)


async def an_answer_with_nothing(client: Client) -> None:
    answer = await client.chat()
    assert answer["content"] == "" and "tool_calls" not in answer
    await client.continue_with(answer, {"role": "user", "content": "Say something."})


async def a_call_that_cannot_be_read(client: Client) -> None:
    """The program states it in a message of the user, after the answer or in its place."""
    answer = await client.chat()
    assert "tool_calls" not in answer and "<tool_call>" in answer["content"]
    told = {"role": "user", "content": "No call was found."}
    await client.continue_with(told)
    client.messages.remove(told)
    await client.continue_with(answer, told)


async def names_of_speakers(client: Client) -> None:
    client.messages = [
        {"role": "system", "content": "Be kind.", "name": "host"},
        {"role": "user", "content": "Hello.", "name": "Adam"},
        {"role": "user", "content": "Hello, too.", "name": "Sam"},
    ]
    answer = await client.chat()
    named = {**answer, "name": "weather_agent"}
    await client.continue_with(named, {**client.output(answer), "name": "weather"})


async def a_patch_as_text(client: Client) -> None:
    """Codex sends a tool whose input is a text, and reads and answers its calls in their form."""
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/s"}
    patch_tool = {"type": "custom", "name": "apply_patch", "description": "P.", "format": grammar}
    tools = [patch_tool, *({"type": "function", **each} for each in FUNCTIONS)]
    body: Body = {"input": [USER], "tools": tools, "stream": True}
    events = await client.send(RESPONSES, body)
    *_, delta, done, item_done, _ = events
    call = item_done["item"]
    assert (call["type"], call["name"]) == ("custom_tool_call", "apply_patch")
    assert call["input"] == done["input"] == delta["delta"] == PATCH
    assert done["type"] == "response.custom_tool_call_input.done"
    begun = next(event for event in events if event["type"] == "response.output_item.added")
    assert begun["item"] == {**call, "status": "in_progress", "input": ""}
    output = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "Done."}
    last = {"input": [*body["input"], call, output], "tools": tools}
    answer = await client.send(RESPONSES, last)
    by_id = {"previous_response_id": answer["id"], "input": "Thanks.", "tools": tools}
    await client.send(RESPONSES, by_id)


async def a_patch_without_its_argument(client: Client) -> None:
    """The policy names the argument otherwise: the program gets what it wrote, and refuses it."""
    tools = [{"type": "custom", "name": "apply_patch"}]
    answer = await client.send(RESPONSES, {"input": [USER], "tools": tools})
    (call,) = answer["output"]
    assert call["input"] == '{"patch": "x"}'
    refused = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "No."}
    by_id = {"previous_response_id": answer["id"], "input": [refused], "tools": tools}
    await client.send(RESPONSES, by_id)


async def a_patch_with_other_arguments_as_items(client: Client) -> None:
    """A client that keeps items, as Codex does, sends the text alone: the policy reads its call."""
    tools = [{"type": "custom", "name": "apply_patch"}]
    items: list[Body] = [USER]
    for text in ('{"patch": "x"}', "x"):
        answer = await client.send(RESPONSES, {"input": items, "tools": tools})
        (call,) = answer["output"]
        assert call["input"] == text
        sent = {key: value for key, value in call.items() if key not in ("id", "status")}
        output = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "No."}
        items += [sent, output]
    await client.send(RESPONSES, {"input": items, "tools": tools})


async def tools_by_reference(client: Client) -> None:
    """Claude Code answers a search for tools with their names."""
    tools = [{"name": each["name"], "input_schema": each["parameters"]} for each in FUNCTIONS]
    body: Body = {"messages": [USER], "max_tokens": 99, "tools": tools}
    answer = await client.send(MESSAGES, body)
    (use,) = (block for block in answer["content"] if block["type"] == "tool_use")
    found = [{"type": "tool_reference", "tool_name": "weather"}]
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": found}
    body["messages"] += [
        {"role": "assistant", "content": answer["content"]},
        {"role": "user", "content": [result, {"type": "text", "text": "Go on."}]},
    ]
    await client.send(MESSAGES, body)


async def a_developer_after_a_user(client: Client) -> None:
    """Codex sends its context in this place after it has shortened a conversation."""
    developer = {"role": "developer", "content": "You work in /app."}
    body: Body = {"input": [USER, developer], "tools": [], "tool_choice": "auto"}
    answer = await client.send(RESPONSES, body)
    body["input"] += [*answer["output"], {"role": "user", "content": "And now?"}]
    await client.send(RESPONSES, body)


async def half_of_an_emoji(client: Client) -> None:
    """A program in JavaScript may cut an output of a tool, or the arguments of its call, within a
    character of two UTF-16 units.
    """
    answer = await client.chat()
    own = {"name": "now", "arguments": '{"cut": "\\ud83d"}'}
    call = {"id": "own", "type": "function", "function": own}
    client.messages += [answer, {**client.output(answer), "content": "cut \ud83d"}]
    client.messages.append({"role": "assistant", "content": "\udc00", "tool_calls": [call]})
    await client.continue_with({"role": "tool", "tool_call_id": "own", "content": "noon"})
    assert "cut \ufffd" in client.last_input() and '{"cut": "\ufffd"}' in client.last_input()


async def marks_of_a_cache(client: Client) -> None:
    """They are on the last tool or message, and are no part of what the policy reads."""
    mark = {"cache_control": {"type": "ephemeral"}}
    tools = [{"type": "function", "function": each} for each in FUNCTIONS]
    answer = await client.chat(tools=[tools[0], {**tools[1], **mark}])
    client.messages += [answer, client.output(answer)]
    strict = [{**each, "function": {**each["function"], "strict": False}} for each in tools]
    await client.chat(tools=strict)
    assert "cache_control" not in client.last_input()


async def a_note_before_an_output(client: Client) -> None:
    """Codex writes a message of the developer between a call and its output."""
    tools = [{"type": "function", **each} for each in FUNCTIONS]
    answer = await client.send(RESPONSES, {"input": [USER], "tools": tools})
    calls = [item for item in answer["output"] if item["type"] == "function_call"]
    outputs = [
        {"type": "function_call_output", "call_id": each["call_id"], "output": each["name"]}
        for each in calls
    ]
    notes = [{"role": "developer", "content": "A note."}, {"role": "user", "content": "And?"}]
    between = [outputs[0], notes[0], outputs[1], notes[1]]
    await client.send(RESPONSES, {"input": [USER, *answer["output"], *between], "tools": tools})
    read = client.last_input()
    places = [read.index(word) for word in ("\nweather\n", "\nnow\n", "A note.", "And?")]
    assert places == sorted(places)


async def an_output_after_a_later_answer(client: Client) -> None:
    """It is refused: that answer was given without it."""
    answer = await client.chat()
    client.messages += [answer, {"role": "user", "content": "Go on without."}]
    client.messages += [await client.chat(), client.output(answer)]
    await client.refused(CHAT, {"messages": client.messages}, "follows no message with this call")


@dataclass(frozen=True)
class CustomInChat:
    """A tool of chat completions whose input is a text; the policy may write other arguments."""

    stream: bool

    async def __call__(self, client: Client) -> None:
        grammar = {"syntax": "lark", "definition": "start: /.+/s"}
        custom = {"name": "apply_patch", "format": {"type": "grammar", "grammar": grammar}}
        body: Body = {"messages": client.messages, "tools": [{"type": "custom", "custom": custom}]}
        for text in (PATCH, '{"patch": "x"}'):
            if self.stream:
                *chunks, _ = await client.send(CHAT, {**body, "stream": True})
                deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
                (call,) = (each for delta in deltas for each in delta.get("tool_calls", ()))
                assert call.pop("index") == 0
            else:
                answer = await client.send(CHAT, body)
                (call,) = answer["choices"][0]["message"]["tool_calls"]
            assert call["type"] == "custom"
            assert call["custom"] == {"name": "apply_patch", "input": text}
            output = {"role": "tool", "tool_call_id": call["id"], "content": "Done."}
            body["messages"] += [{"role": "assistant", "tool_calls": [call]}, output]
        await client.send(CHAT, body)
        assert "start: /.+/s" in client.last_input()


async def items_of_an_answer_sent_again(client: Client) -> None:
    """Beside the id of the answer; OpenAI refuses them, too. The call would be there twice."""
    tools = [{"type": "function", **each} for each in FUNCTIONS]
    first = await client.send(RESPONSES, {"input": [USER], "tools": tools})
    *_, call = first["output"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    body: Body = {"previous_response_id": first["id"], "tools": tools}
    without_id = {key: value for key, value in call.items() if key != "id"}
    for items in ([call, output], [without_id, output], [*first["output"][:2], output]):
        await client.refused(RESPONSES, {**body, "input": items}, "previous_response_id has")
    second = await client.send(RESPONSES, {**body, "input": [output]})
    last = {"previous_response_id": second["id"], "input": [call, USER], "tools": tools}
    await client.refused(RESPONSES, last, "previous_response_id has")


async def constraints_in_every_api(client: Client) -> None:
    """One call at most, or JSON of a schema: each would change the distribution of the answer."""
    form = {"type": "json_schema", "schema": {"type": "object"}}
    tools = [{"name": each["name"], "input_schema": each["parameters"]} for each in FUNCTIONS]
    messages: Body = {"messages": [USER], "max_tokens": 99, "tools": tools}
    one = {"type": "auto", "disable_parallel_tool_use": True}
    for path, body in (
        (MESSAGES, {**messages, "tool_choice": one}),
        (MESSAGES, {**messages, "output_config": {"effort": "low", "format": form}}),
        (MESSAGES, {**messages, "output_format": form}),
        (CHAT, {"messages": [USER], "parallel_tool_calls": False}),
        (CHAT, {"messages": [USER], "response_format": form}),
        (RESPONSES, {"input": "x", "parallel_tool_calls": False}),
        (RESPONSES, {"input": "x", "text": {"format": form}}),
    ):
        await client.refused(path, body, "ask for the format in a message|leave it out or send")
    choice = {"type": "auto", "disable_parallel_tool_use": False}
    await client.send(MESSAGES, {**messages, "tool_choice": choice, "output_config": {}})


async def calls_as_they_were_before_tools(client: Client) -> None:
    """An answer of which nothing is left in the prompt would be an empty one."""
    old = {"name": "weather", "arguments": "{}"}
    answer = {"role": "assistant", "content": None, "function_call": old}
    await client.refused(CHAT, {"messages": [USER, answer, USER]}, "send tool_calls")
    await client.refused(CHAT, {"messages": [USER], "functions": FUNCTIONS}, "send tools")
    said = {"role": "assistant", "content": None, "refusal": "I cannot."}
    client.messages = [USER, said, USER]
    await client.chat(tool_choice={"type": "none"})
    assert "I cannot." in client.last_input()


async def an_error_without_words(client: Client) -> None:
    """Refused as by Anthropic's server: of the failure, the policy would read nothing."""
    tools = [{"name": each["name"], "input_schema": each["parameters"]} for each in FUNCTIONS]
    body: Body = {"messages": [USER], "max_tokens": 99, "tools": tools}
    answer = await client.send(MESSAGES, body)
    (use,) = (block for block in answer["content"] if block["type"] == "tool_use")
    body["messages"].append({"role": "assistant", "content": answer["content"]})
    failed = {"type": "tool_result", "tool_use_id": use["id"], "is_error": True}
    for nothing in ("", None, [], [{"type": "text", "text": ""}]):
        result = {"role": "user", "content": [{**failed, "content": nothing}]}
        sent = {**body, "messages": [*body["messages"], result]}
        await client.refused(MESSAGES, sent, "write the error into it")
    failed["content"] = "no such city"
    body["messages"].append({"role": "user", "content": [failed]})
    await client.send(MESSAGES, body)
    assert "no such city" in client.last_input()


async def outputs_in_separate_messages(client: Client) -> None:
    """Each of two results in a message of its own, in the order in which the calls ended."""
    tools = [{"name": each["name"], "input_schema": each["parameters"]} for each in FUNCTIONS]
    body: Body = {"messages": [USER], "max_tokens": 99, "tools": tools}
    answer = await client.send(MESSAGES, body)
    uses = [block for block in answer["content"] if block["type"] == "tool_use"]
    body["messages"].append({"role": "assistant", "content": answer["content"]})
    for use in reversed(uses):
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": f"of {use['name']}"}
        body["messages"].append({"role": "user", "content": [result]})
    await client.send(MESSAGES, body)
    assert client.last_input().index("of weather") < client.last_input().index("of now")


async def settings_as_a_message(client: Client) -> None:
    """A message of the system without text is no message; with a format it is refused."""
    settings = {"role": "system", "content": [], "output_config": {"effort": "low"}}
    body: Body = {"messages": [USER, settings], "max_tokens": 99}
    answer = await client.send(MESSAGES, body)
    assert "system" not in client.last_input()
    for empty in ("", [{"type": "text", "text": ""}]):
        await client.send(MESSAGES, {**body, "messages": [{**settings, "content": empty}, USER]})
        assert "system" not in client.last_input()
    form = {"format": {"type": "json_schema", "schema": {}}}
    wrong = [USER, {**settings, "output_config": form}]
    await client.refused(MESSAGES, {**body, "messages": wrong}, "ask for the format")
    for prompt in ({}, {"system": "Be brief."}):
        alone = {**body, **prompt, "messages": [settings]}
        await client.refused(MESSAGES, alone, "send a message of the user")
    said = {"role": "assistant", "content": answer["content"]}
    await client.send(MESSAGES, {**body, "messages": [USER, settings, said, USER]})


async def arguments_of_other_types(client: Client) -> None:
    """An object for a text is read, a number or a list is refused: templates walk a mapping."""
    answer = await client.chat()
    (call,) = answer["tool_calls"]
    for wrong in ('"Paris"', '["Paris"]', "7", ["Paris"], 7):
        changed = {**call, "function": {"name": "weather", "arguments": wrong}}
        sent = [USER, {**answer, "tool_calls": [changed]}, client.output(answer)]
        await client.refused(CHAT, {"messages": sent}, "must be a JSON object")
    changed = {**call, "function": {"name": "weather", "arguments": {"city": "Paris"}}}
    await client.continue_with({**answer, "tool_calls": [changed]}, client.output(answer))


async def limits_that_mean_none(client: Client) -> None:
    """-1 and -2 are Ollama's and LM Studio's, and refused; null is no limit."""
    for limit in (-1, -2, 0, True, "99"):
        await client.refused(CHAT, {"messages": [USER], "max_tokens": limit}, "an integer from 1")
    await client.chat(max_tokens=None, max_completion_tokens=None)


async def usage_of_a_stream(client: Client) -> None:
    """In a chunk without choices, for those that ask for it: others index each chunk."""
    for options, expected in (({}, 0), ({"stream_options": {"include_usage": True}}, 1)):
        body = {"messages": [USER], "stream": True, **options}
        *chunks, last = await client.send(CHAT, body)
        assert last == "[DONE]"
        assert sum(not chunk["choices"] for chunk in chunks) == expected
        assert sum(bool(chunk.get("usage")) for chunk in chunks) == expected


async def a_probe_without_a_key(client: Client) -> None:
    """Claude Code opens its connection with such a request; none is taken for an answer."""
    root = client.episode.anthropic_url
    for method, path in (("HEAD", "/api/hello"), ("HEAD", "/"), ("GET", "/"), ("OPTIONS", "/v1")):
        async with client.made.client.request(method, root + path) as response:
            assert response.status in (404, 405), await response.text()
    await client.chat()


async def outputs_with_control_characters(client: Client) -> None:
    """NUL, escapes of a terminal, a byte order mark: each reaches the policy as it is."""
    answer = await client.chat()
    text = "a\x00b\x1b[31mred\ufeff\u2028end"
    await client.continue_with(answer, {**client.output(answer), "content": text})
    assert text in client.last_input()


async def tools_that_come_again(client: Client) -> None:
    """Keys of a schema in another order are another text of the prompt: a new trajectory."""
    answer = await client.chat()
    client.messages += [answer, client.output(answer)]
    turned = [dict(reversed(each.items())) for each in FUNCTIONS]
    await client.chat(tools=[{"function": each, "type": "function"} for each in turned])


TWO_CALLS = CALL + "\n" + NO_ARGUMENTS
PATCH = '*** Begin Patch\n+"x"\n*** End Patch'
GITHUB = "https://github.com/"
REPORTS = [
    Report(GITHUB + "openai/openai-agents-js/issues/809", parts_as_messages),
    Report(GITHUB + "openai/openai-agents-js/issues/809", text_and_calls_as_messages),
    Report(GITHUB + "0xPlaygrounds/rig/issues/1362", empty_lists_as_content),
    Report(
        GITHUB + "vercel/ai/issues/6687",
        a_call_without_arguments,
        (NO_ARGUMENTS, NO_ARGUMENTS, NO_ARGUMENTS, DONE),
    ),
    Report(GITHUB + "pydantic/pydantic-ai/issues/2256", a_streamed_call, (TWO_CALLS, DONE)),
    Report(GITHUB + "vercel/ai/issues/5576", an_empty_text_block, (CALL, DONE)),
    Report(GITHUB + "mastra-ai/mastra/issues/8738", a_call_without_its_reasoning),
    Report(GITHUB + "NVIDIA-NeMo/Gym/issues/841", token_ids_on_messages),
    Report(
        GITHUB + "PrimeIntellect-ai/verifiers/pull/955",
        other_tools_in_the_next_turn,
        trajectories=2,
    ),
    Report(GITHUB + "verl-project/verl/issues/3960", calls_that_are_cleared, trajectories=2),
    Report(
        GITHUB + "langchain-ai/langgraph-supervisor-py/issues/203",
        a_handoff_that_nobody_sampled,
        (ANSWER, DONE, "Bye."),
    ),
    Report(
        GITHUB + "OpenHands/OpenHands/issues/11871",
        a_call_that_was_interrupted,
        (TWO_CALLS, DONE),
    ),
    Report(GITHUB + "OpenHands/OpenHands/issues/10869", an_answer_with_nothing, ("", DONE)),
    Report(
        GITHUB + "SWE-agent/mini-swe-agent/issues/737",
        a_call_that_cannot_be_read,
        ("<tool_call>\n{ls}\n</tool_call>", "Sorry.", DONE),
        trajectories=2,
    ),
    Report(GITHUB + "microsoft/autogen/issues/6034", names_of_speakers),
    Report(
        GITHUB + "antirez/ds4/issues/745",
        a_patch_as_text,
        (call_of("apply_patch", input=PATCH), DONE, "Bye."),
    ),
    Report(
        GITHUB + "router-for-me/CLIProxyAPI/issues/5753",
        a_patch_without_its_argument,
        (call_of("apply_patch", patch="x"), DONE),
    ),
    Report(
        GITHUB + "router-for-me/CLIProxyAPI/issues/5753",
        a_patch_with_other_arguments_as_items,
        (call_of("apply_patch", patch="x"), call_of("apply_patch", input="x", why="y"), DONE),
    ),
    Report(GITHUB + "anthropics/claude-code/issues/77928", tools_by_reference, (CALL, DONE)),
    Report(GITHUB + "anthropics/claude-code/issues/3277", half_of_an_emoji),
    Report(GITHUB + "pydantic/pydantic-ai/pull/5012", marks_of_a_cache),
    Report(
        GITHUB + "deepseek-ai/awesome-deepseek-integration/issues/740",
        a_note_before_an_output,
        (TWO_CALLS, DONE),
    ),
    Report(GITHUB + "livekit/agents/pull/1977", an_output_after_a_later_answer, (CALL, DONE)),
    Report(GITHUB + "MacPaw/OpenAI/issues/432", items_of_an_answer_sent_again),
    Report(GITHUB + "vercel/ai/issues/15652", constraints_in_every_api, (DONE,)),
    Report(
        GITHUB + "diegosouzapw/OmniRoute/issues/12692", calls_as_they_were_before_tools, (DONE,)
    ),
    *(
        Report(
            GITHUB + "microsoft/foundry-local/issues/1080",
            CustomInChat(stream),
            (call_of("apply_patch", input=PATCH), call_of("apply_patch", patch="x"), DONE),
        )
        for stream in (False, True)
    ),
    Report(GITHUB + "gty111/gLLM/pull/267", a_developer_after_a_user, ("Hi.", DONE)),
    Report(GITHUB + "anthropics/claude-agent-sdk-python/issues/248", an_error_without_words),
    Report(
        GITHUB + "router-for-me/CLIProxyAPI/issues/4656",
        outputs_in_separate_messages,
        (TWO_CALLS, DONE),
    ),
    Report(
        GITHUB + "LeenHawk/gproxy/issues/209",
        settings_as_a_message,
        ("Hi.", "Ho.", "Ha.", DONE),
        trajectories=3,
    ),
    Report(GITHUB + "sgl-project/sglang/pull/28035", arguments_of_other_types),
    Report(GITHUB + "goruck/home-generative-agent/issues/614", limits_that_mean_none, ("Hi.",)),
    Report(
        GITHUB + "Arthur-Ficial/apfel/issues/100",
        usage_of_a_stream,
        ("Hi.", DONE),
        trajectories=2,
    ),
    Report(GITHUB + "router-for-me/CLIProxyAPI/issues/5905", a_probe_without_a_key, ("Hi.",)),
    Report(GITHUB + "aebrer/dreb/issues/352", outputs_with_control_characters),
    Report(GITHUB + "QwenLM/qwen-code/issues/6338", tools_that_come_again, trajectories=2),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("qwen"), "qwen")


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: name_of(report.program))
async def test_what_failed_elsewhere_is_exact_here(folder: str, report: Report) -> None:
    async with setup(folder, report.answers) as made, await made.open() as episode:
        await report.program(Client(made, episode))
        trajectories = episode.trajectories()
        texts = sorted(turn.text for each in trajectories for turn in each.turns)
        assert texts == sorted(report.answers)
        check(trajectories, made.sampled)
        assert len(trajectories) == report.trajectories


@pytest.mark.parametrize(
    ("path", "limit", "ended"),
    [
        (CHAT, "max_completion_tokens", '"finish_reason":"length"'),
        (RESPONSES, "max_output_tokens", '"status":"incomplete"'),
        (MESSAGES, "max_tokens", '"stop_reason":"max_tokens"'),
    ],
)
async def test_an_answer_that_is_truncated_after_a_call_says_so(
    folder: str, path: str, limit: str, ended: str
) -> None:
    """vllm-project/vllm issue 58228: a program would take the calls for all that were meant."""
    tool = {"name": "weather", "parameters": {}, "input_schema": {}, "function": FUNCTIONS[0]}
    kind = {} if path == MESSAGES else {"type": "function"}
    words = call_of("weather", city="a city with a long name " * 9)
    async with setup(folder, [f"{CALL}\n{words}"]) as made, await made.open() as episode:
        body = {"messages": [USER], "input": "x", "tools": [tool | kind], limit: 60}
        del body["messages" if path == RESPONSES else "input"]
        answer = json.dumps(await Client(made, episode).send(path, body), separators=(",", ":"))
        assert ended in answer and answer.count("Paris") == 1
        check(episode.trajectories(), made.sampled)
