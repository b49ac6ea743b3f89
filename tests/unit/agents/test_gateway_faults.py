"""What the policy writes and what clients lose: no answer fails, none is trained that nobody read."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web

from rlpost.extensions.agents import aside, http_server, policy, written_answer
from rlpost.extensions.agents import episode as episode_module
from rlpost.extensions.agents.anthropic_format import messages_request
from rlpost.extensions.agents.chat_messages import BadRequest
from rlpost.extensions.agents.chat_template import ChatTemplate
from rlpost.extensions.agents.conversation import Conversation, MessageNode
from rlpost.extensions.agents.gateway import EpisodeLimits, OpenEpisode
from rlpost.extensions.agents.http_server import REPEATED_HEADER
from rlpost.extensions.agents.openai_format import chat_request
from rlpost.extensions.agents.requests import ChatRequest
from rlpost.extensions.agents.responses_format import responses_request
from rlpost.rollout.sampling import SamplingParams
from tests.unit.agents.chat_models import write_model
from tests.unit.agents.harness import TOOLS
from tests.unit.agents.sampled import check
from tests.unit.agents.test_gateway import CHAT, MESSAGES, PROMPT, SAMPLING, USER, Body, setup

RESPONSES = "/v1/responses"
SURROGATE = '{"name": "weather", "arguments": {"city": "\\ud83d"}}'
LARGE = '{"name": "weather", "arguments": {"n": 123456789012345678901234567890}}'
INFINITE = '{"name": "weather", "arguments": {"n": 1e999}}'
NO_NUMBER = '{"name": "weather", "arguments": {"n": NaN}}'
NESTED = '{"name": "weather", "arguments": {"city": ' + "[" * 3000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("qwen"), "qwen")


def requests_of(episode: OpenEpisode) -> list[tuple[str, Body]]:
    """The same request to the three APIs."""
    function = TOOLS[0]["function"]
    name, schema = function["name"], function["parameters"]
    tool = {"type": "function", "name": name, "parameters": schema}
    url = episode.anthropic_url
    return [
        (f"{url}/v1{CHAT}", {"messages": [USER], "tools": TOOLS}),
        (f"{url}{RESPONSES}", {"input": "How is the weather?", "tools": [tool]}),
        (
            f"{url}{MESSAGES}",
            {
                "messages": [USER],
                "max_tokens": 9999,
                "tools": [{"name": name, "input_schema": schema}],
            },
        ),
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("call", "is_call"),
    [(SURROGATE, True), (LARGE, True), (INFINITE, False), (NO_NUMBER, False), (NESTED, False)],
)
async def test_any_call_of_the_policy_is_an_answer_of_every_api(
    folder: str, call: str, is_call: bool, stream: bool
) -> None:
    async with (
        setup(folder, [f"<tool_call>\n{call}\n</tool_call>"] * 3) as made,
        await made.open() as episode,
    ):
        key = {"Authorization": f"Bearer {episode.api_key}"}
        for url, body in requests_of(episode):
            body["stream"] = stream
            async with made.client.post(url, json=body, headers=key) as response:
                text = await response.text()  # fails if the framing is broken
                assert response.status == 200, text
            has_call = any(word in text for word in ("call_", "tool_use"))
            assert has_call == is_call, text
        check(episode.trajectories(), made.sampled)
        assert episode.num_requests == 3


async def test_a_parser_that_fails_leaves_the_answer_as_text(
    folder: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RecursionError

    monkeypatch.setattr(written_answer, "parse_answer", fail)
    async with setup(folder, ["Fine."]) as made, await made.open() as episode:
        status, answer = await made.post(episode, {"messages": [USER], "tools": TOOLS})
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "Fine.")
        check(episode.trajectories(), made.sampled)
    assert "could not be parsed" in caplog.text


@pytest.mark.parametrize("late", [False, True])
async def test_an_answer_that_cannot_be_written_is_an_error_and_is_not_recorded(
    folder: str, monkeypatch: pytest.MonkeyPatch, late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Also inside a stream, where a second response would break the framing of the first."""

    def fail(_: object) -> bytes:
        raise TypeError("not JSON")

    monkeypatch.setattr(http_server._Api, "content", lambda *_: fail(None))
    if late:
        monkeypatch.setattr(http_server, "KEEP_ALIVE_S", 0.05)
    async with setup(folder, ["Fine."]) as made:
        if late:
            made.engine.holds = asyncio.Event()
        async with await made.open() as episode:
            url, key = episode.base_url + CHAT, {"Authorization": f"Bearer {episode.api_key}"}
            body = {"messages": [USER], "stream": True}
            async with made.client.post(url, json=body, headers=key) as response:
                assert response.status == (200 if late else 500)
                if late:
                    made.engine.holds.set()
                assert b"gateway_error" in await response.read()
            assert episode.trajectories() == ()
            assert (episode.num_requests, episode.num_tokens) == (0, 0)
    assert "not JSON" in caplog.text


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_cannot_be_delivered_is_not_trained(
    folder: str, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """The client leaves after the engine has answered; the next request has the same number."""
    lost = aiohttp.ClientConnectionResetError("Cannot write to closing transport")

    async def fail(*_: object) -> None:
        monkeypatch.undo()
        raise lost

    class LostResponse(web.Response):
        write_eof = fail

    if stream:
        monkeypatch.setattr(web.StreamResponse, "write", fail)
    else:
        monkeypatch.setattr(http_server, "_response", lambda *_: LostResponse())
    async with (
        setup(folder, ["Fine.", "Rain.", "Snow."]) as made,
        await made.open(limits=EpisodeLimits(max_requests=2)) as episode,
    ):
        body: Body = {"messages": [USER]}
        with pytest.raises((aiohttp.ClientError, asyncio.TimeoutError)):
            async with asyncio.timeout(5):
                await made.post(episode, {**body, "stream": stream})
        assert episode.trajectories() == ()
        status, answer = await made.post(episode, body)
        message = answer["choices"][0]["message"]
        assert (status, message["content"]) == (200, "Rain.")
        body["messages"] = [USER, message, USER]
        assert (await made.post(episode, body))[0] == 200
        (trajectory,) = episode.trajectories()
        assert [turn.text for turn in trajectory.turns] == ["Rain.", "Snow."]
        assert episode.num_requests == 2


async def test_a_repeated_request_gets_the_answer_that_its_client_lost(folder: str) -> None:
    """Clients of OpenAI and Anthropic count their repetitions in a header."""
    async with (
        setup(folder, ["Fine.", "Rain.", "Snow.", "Hail."]) as made,
        await made.open() as episode,
    ):
        repeated = {REPEATED_HEADER: "1"}
        body: Body = {"messages": [USER]}
        _, lost = await made.post(episode, body, **{REPEATED_HEADER: "0"})
        _, answer = await made.post(episode, body, **repeated)
        assert answer["choices"] == lost["choices"]
        _, other = await made.post(episode, {**body, "max_tokens": 9}, **repeated)
        assert other["choices"] != lost["choices"]  # another request
        messages = [USER, answer["choices"][0]["message"], USER]
        await made.post(episode, {"messages": messages})
        _, again = await made.post(episode, body, **repeated)
        assert again["choices"][0]["message"]["content"] == "Hail."  # the first was read
        check(episode.trajectories(), made.sampled)
        assert episode.num_requests == 4


@pytest.mark.parametrize("is_parallel", [False, True])
async def test_a_client_that_got_no_answer_gets_none_of_another_client(
    folder: str, is_parallel: bool
) -> None:
    """A harness that samples several answers to the same messages would have one of them twice."""
    async with setup(folder, ["Fine.", "Rain.", "Snow."]) as made, await made.open() as episode:
        body, repeated = {"messages": [USER]}, {REPEATED_HEADER: "1"}
        if not is_parallel:
            await made.post(episode, body)
        made.engine.holds = asyncio.Event()
        num_sent = len(made.engine.bodies) + 1 + is_parallel
        posts = [asyncio.ensure_future(made.post(episode, body)) for _ in range(1 + is_parallel)]
        while len(made.engine.bodies) < num_sent:
            await asyncio.sleep(0.01)
        posts[0].cancel()
        await asyncio.wait(posts[:1])
        while episode._num_in_flight > is_parallel:
            await asyncio.sleep(0.01)
        made.engine.holds.set()
        await asyncio.wait(posts)
        _, own = await made.post(episode, body, **repeated)
        _, again = await made.post(episode, body, **repeated)  # this answer was lost
        texts = [turn.text for each in episode.trajectories() for turn in each.turns]
        contents = [each["choices"][0]["message"]["content"] for each in (own, again)]
        assert len(set(texts)) == 2 and contents == [texts[-1]] * 2


@pytest.mark.parametrize("error", [RuntimeError, asyncio.CancelledError])
async def test_an_answer_that_fails_to_be_repeated_is_repeated_later(
    folder: str, error: type[BaseException]
) -> None:
    def fail(_: object) -> None:
        raise error

    async with setup(folder, ["Fine.", "Rain."]) as made, await made.open() as episode:
        request = chat_request({"messages": [USER]})
        recorded = await episode.answer(request)
        with pytest.raises(error):
            await episode.answer(request, before_recording=fail, is_repeated=True)
        assert await episode.answer(request, is_repeated=True) == recorded
        assert episode.num_requests == 1


async def test_requests_that_wait_for_a_place_are_not_sent_after_their_episode_is_closed(
    folder: str,
) -> None:
    async with setup(folder) as made:
        made.engine.holds = asyncio.Event()
        episode = await made.open(limits=EpisodeLimits(max_parallel=2))
        requests = [asyncio.ensure_future(made.post(episode, {"messages": [USER]})) for _ in "6666"]
        while len(made.engine.bodies) < 2:
            await asyncio.sleep(0.01)
        await episode.close()
        assert [status for status, _ in await asyncio.gather(*requests)] == [401] * 4
        assert len(made.engine.bodies) == 2


async def test_bodies_of_an_episode_are_bounded_together_and_in_their_values(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another episode is not held, and the room is given back."""
    monkeypatch.setattr(http_server, "MAX_BODY_BYTES", 4000)
    monkeypatch.setattr(http_server, "MAX_CONTAINERS", 50)
    arrived, finish = asyncio.Event(), asyncio.Event()

    async def slow() -> Any:
        yield b'{"messages": "' + b"a" * 2500
        arrived.set()
        await finish.wait()
        yield b'"}'

    async with (
        setup(folder, ["Fine."] * 9) as made,
        await made.open() as episode,
        await made.open() as other,
    ):
        key = {"Authorization": f"Bearer {episode.api_key}"}
        post = made.client.post(episode.base_url + CHAT, data=slow(), headers=key)
        first = asyncio.ensure_future(post.__aenter__())
        await arrived.wait()
        large: Body = {"messages": [{"role": "user", "content": "b" * 2000}]}
        status, body = await made.post(episode, large)
        while status == 200:  # the first part may not have been read yet
            status, body = await made.post(episode, large)
        assert status == 429 and "at a time" in body["error"]["message"]
        assert (await made.post(other, {"messages": [USER]}))[0] == 200
        finish.set()
        assert (await first).status == 400
        assert (await made.post(episode, {"messages": [USER]}))[0] == 200
        status, body = await made.post(episode, {"messages": [[]] * 60})
        assert status == 400 and "more than 50 arrays" in body["error"]["message"]


async def test_keys_are_read_as_http_spells_them(
    folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with setup(folder) as made, await made.open() as episode:
        url, key = f"{episode.base_url}/models", episode.api_key
        accepted = [
            {"Authorization": f"bearer {key}"},
            {"Authorization": "Bearer of-a-proxy", "x-api-key": key},
        ]
        refused = [{"Authorization": f"Basic {key}"}, {"Authorization": f"Bearer {key[:-1]}ü"}]
        for headers in accepted + refused:
            async with made.client.get(url, headers=headers) as response:
                assert response.status == (200 if headers in accepted else 401), headers
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


LONG = "a line of a log\n" * 20_000
COUNT = f"{MESSAGES}/count_tokens"
SCHEMA = {"type": "object", "properties": {}}


def chat_of(**texts: str) -> Body:
    """A chat with a call, its output and a tool; ``texts`` are its texts by field."""
    function = {"name": texts.get("name", "f"), "arguments": texts.get("arguments", "{}")}
    call = {"id": "1", "type": "function", "function": function}
    answer = {"role": "assistant", "content": texts.get("answer", ""), "tool_calls": [call]}
    tool = {"name": "f", "description": texts.get("description", ""), "parameters": SCHEMA}
    return {
        "messages": [
            {"role": "system", "content": texts.get("system", "")},
            {"role": "user", "content": texts.get("user", "?")},
            answer | {"reasoning_content": texts.get("reasoning", "")},
            {"role": "tool", "tool_call_id": "1", "content": texts.get("output", "")},
        ],
        "tools": [{"type": "function", "function": tool}],
    }


def items_of(**texts: str) -> Body:
    """The same as a request of the Responses API."""
    thought = {"type": "reasoning_text", "text": texts.get("reasoning", "")}
    call = {
        "call_id": "1",
        "name": texts.get("name", "f"),
        "arguments": texts.get("arguments", "{}"),
    }
    output = {"type": "function_call_output", "call_id": "1", "output": texts.get("output", "")}
    tool = {"type": "function", "name": "f", "description": texts.get("description", "")}
    return {
        "instructions": texts.get("system", ""),
        "input": [
            {"role": "user", "content": texts.get("user", "?")},
            {"type": "reasoning", "content": [thought]},
            {"role": "assistant", "content": texts.get("answer", "")},
            {"type": "function_call", **call},
            output,
        ],
        "tools": [{**tool, "parameters": SCHEMA}],
    }


def blocks_of(**texts: str) -> Body:
    """The same as a request of Anthropic's API."""
    arguments = json.loads(texts.get("arguments", "{}"))
    use = {"type": "tool_use", "id": "1", "name": texts.get("name", "f"), "input": arguments}
    answer = [{"type": "thinking", "thinking": texts.get("reasoning", "")}]
    answer += [{"type": "text", "text": texts.get("answer", "")}, use]
    result = {"type": "tool_result", "tool_use_id": "1", "content": texts.get("output", "")}
    tool = {"name": "f", "description": texts.get("description", ""), "input_schema": SCHEMA}
    return {
        "system": texts.get("system", ""),
        "messages": [
            {"role": "user", "content": texts.get("user", "?")},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": [result]},
        ],
        "tools": [tool],
    }


def many_parts(count: int) -> list[tuple[Callable[[Body], ChatRequest], Body]]:
    """Requests of ``count`` small parts: calls with outputs, answers, custom tools, a namespace."""
    calls = [{"id": f"{n}", "function": {"name": "f"}} for n in range(count)]
    outputs = [{"role": "tool", "tool_call_id": f"{n}", "content": ""} for n in range(count)]
    parts = [{"role": "assistant", "tool_calls": [call]} for call in calls]
    custom = [{"type": "custom", "name": f"{n}"} for n in range(count)]
    namespace = {"type": "namespace", "name": "m", "tools": custom}
    return [
        (chat_request, {"messages": [USER, parts[0] | {"tool_calls": calls}, USER, *outputs]}),
        (chat_request, {"messages": [USER, *parts, USER]}),
        (chat_request, {"messages": [USER], "tools": [each | {"custom": each} for each in custom]}),
        (responses_request, {"input": "x", "tools": custom}),
        (responses_request, {"input": "x", "tools": [namespace]}),
    ]


@pytest.mark.parametrize("number", range(5))
def test_many_small_parts_of_a_request_are_read_in_linear_time(number: int) -> None:
    """All conversations wait for the thread: a request of 4 MiB took half a minute of its time."""

    def seconds(count: int) -> float:
        read, body = many_parts(count)[number]
        began = time.thread_time()
        read(body)
        return time.thread_time() - began

    # linear: 4 times as long, quadratic: 16 times
    assert min(seconds(16_000) for _ in range(3)) < 9 * min(seconds(4_000) for _ in range(3))


@pytest.mark.parametrize("name", [None, "", 3])
def test_a_reference_to_a_tool_without_its_name_is_refused(name: object) -> None:
    body = {**blocks_of(), "max_tokens": 9}
    body["messages"][2]["content"][0]["content"] = [{"type": "tool_reference", "tool_name": name}]
    with pytest.raises(BadRequest, match="tool_reference without tool_name"):
        messages_request(body)


PLACES = ("system", "user", "answer", "reasoning", "name", "arguments", "output", "description")


class Watch:
    """Records how much is rendered and tokenised, and whether in the gateway's own thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokenised, self.rendered, self.in_loop = 0, 0, 0
        for name in ("encode", "render"):
            monkeypatch.setattr(ChatTemplate, name, self._watched(getattr(ChatTemplate, name)))

    def _watched(self, method: Any) -> Any:
        def watched(template: ChatTemplate, given: Any, *rest: Any) -> Any:
            if method.__name__ == "encode":
                self.tokenised += len(given)
            else:
                self.rendered += 1
            self.in_loop += threading.current_thread().name == "rlpost-gateway"
            return method(template, given, *rest)

        return watched


async def test_a_long_text_in_any_field_is_refused_before_it_is_rendered(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every API, and when tokens are counted. Nothing of it runs in the loop of the gateway."""
    apis = {CHAT: chat_of, RESPONSES: items_of, MESSAGES: blocks_of, COUNT: blocks_of}
    async with setup(folder, ["Fine."] * 4 * len(PLACES)) as made:
        made.gateway.policy.longest_request = 2000
        for (path, body_of), place in itertools.product(apis.items(), PLACES):
            text = json.dumps({"text": LONG}) if place == "arguments" else LONG
            async with await made.open() as episode:
                key = {"Authorization": f"Bearer {episode.api_key}"}
                url = (episode.base_url if path == CHAT else episode.anthropic_url) + path
                watch = Watch(monkeypatch)
                async with made.client.post(
                    url, json=body_of(**{place: text}), headers=key
                ) as reply:
                    assert (reply.status, "context" in await reply.text()) == (400, True), place
                assert watch.tokenised < 50_000, (path, place)
                assert watch.in_loop == 0, (path, place)
                # Templates may leave reasoning out, so its length is known once it is rendered.
                assert watch.rendered == (place == "reasoning"), (path, place)
                assert episode.limit_reached == "context"
                async with made.client.post(url, json=body_of(), headers=key) as reply:
                    assert reply.status == 200, await reply.text()
                monkeypatch.undo()


async def test_a_body_far_beyond_the_context_is_not_parsed(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the long text is in a field that has no effect."""
    monkeypatch.setattr(policy, "SMALLEST_BOUND", 1000)
    monkeypatch.setattr(http_server, "_parse", lambda _: pytest.fail("it was parsed"))
    async with setup(folder) as made:
        made.gateway.policy.longest_request = 100
        async with await made.open() as episode:
            body = {"messages": [USER], "metadata": {"log": "x" * 1600}}
            status, answer = await made.post(episode, body)
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


HEAVY = (
    (http_server, "_parse"),
    (http_server._Api, "content"),
    (Conversation, "plan"),
    (ChatTemplate, "render"),
    (ChatTemplate, "encode"),
    (ChatTemplate, "decode_all"),
    (ChatTemplate, "token_bytes"),
    (written_answer, "parse_answer"),
)


async def test_nothing_of_a_long_request_or_answer_is_computed_in_a_loop(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a short body that refers to a long conversation; a short one needs no thread."""
    calls = set[tuple[str, bool]]()

    def watch(name: str, work: Any) -> Any:
        def watched(*arguments: Any, **options: Any) -> Any:
            thread = threading.current_thread()
            in_loop = thread is threading.main_thread() or thread.name == "rlpost-gateway"
            if arguments[0] is not made.sampled.template:  # of the fake engine
                calls.add((name, in_loop))
            return work(*arguments, **options)

        return watched

    words = "word " * 1000
    sampling = SamplingParams(max_new_tokens=2 * len(words))
    async with (
        setup(folder, [words] * 4 + ["Fine."]) as made,
        await made.gateway.open(PROMPT, sampling, connection=made.connection) as episode,
        await made.open() as other,
    ):
        for owner, name in HEAVY:
            monkeypatch.setattr(owner, name, watch(name, getattr(owner, name)))
        message, key = {"role": "user", "content": words}, {"x-api-key": episode.api_key}
        for path, body in (
            (f"/v1{CHAT}", {"messages": [message], "logprobs": True, "stream": True}),
            (MESSAGES, {"messages": [message], "max_tokens": 9999}),
            (COUNT, {"messages": [message]}),
            (RESPONSES, {"input": words}),
            (RESPONSES, {"input": "On.", "previous_response_id": f"resp_{episode._name}_2"}),
        ):
            url = episode.anthropic_url + path
            async with made.client.post(url, json=body, headers=key) as reply:
                assert reply.status == 200, await reply.text()
                await reply.read()
        in_threads = {(name, False) for _, name in HEAVY}
        assert calls == in_threads | {("_parse", True)}  # of the body with the reference
        calls.clear()
        assert (await made.post(other, {"messages": [USER]}))[0] == 200
        assert all(in_loop for _, in_loop in calls)


async def test_requests_without_an_answer_leave_no_messages(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would fill the memory: refused ones are not bounded by any limit of the episode."""

    def texts(node: MessageNode) -> set[str]:
        known = [child for children in node.children.values() for child in children]
        return {each.message.content for each in known if each.message}.union(*map(texts, known))

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the engine has failed")

    async with (
        setup(folder, ["Fine."] * 4) as made,
        await made.gateway.open(
            PROMPT,
            replace(SAMPLING, max_context_len=300),
            connection=made.connection,
            limits=EpisodeLimits(max_requests=2),
        ) as episode,
    ):

        async def post(text: str, **options: Any) -> int:
            body = {"messages": [{"role": "user", "content": text}], **options}
            return (await made.post(episode, body))[0]

        assert await post("first") == 200
        assert await post("too many", n=2, tools=TOOLS) == 400
        assert await post("too long " * 60) == 400
        with monkeypatch.context() as failing:
            failing.setattr(episode_module, "read_answer", fail)
            assert await post("failed") == 500
        made.engine.holds = asyncio.Event()
        num_sent = len(made.engine.bodies)
        leaving = asyncio.ensure_future(post("left"))
        while len(made.engine.bodies) == num_sent:
            await asyncio.sleep(0.01)
        leaving.cancel()
        while episode._num_in_flight:
            await asyncio.sleep(0.01)
        made.engine.holds.set()
        assert await post("second") == 200
        (root,) = episode._conversation._roots.values()
        assert texts(root) == {"first", "second", "Fine."}


async def test_an_episode_counts_tokens_of_one_request_at_a_time(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many requests of an episode do not keep all threads from the others."""
    began, go_on, encode = threading.Semaphore(0), threading.Event(), ChatTemplate.encode
    first: list[str] = []

    def waiting(template: ChatTemplate, text: str) -> Any:
        if template is made.sampled.template or "other" in text:
            return encode(template, text)
        first.append(text)
        began.release()
        with aside.without_turn():
            assert go_on.wait(30)
        return encode(template, text)

    async with (
        setup(folder, ["Fine."]) as made,
        await made.open() as episode,
        await made.open() as other,
    ):
        monkeypatch.setattr(aside, "SMALL_BYTES", 10)
        monkeypatch.setattr(ChatTemplate, "encode", waiting)
        url, key = episode.anthropic_url + COUNT, {"x-api-key": episode.api_key}

        async def count() -> int:
            async with made.client.post(url, json={"messages": [USER]}, headers=key) as reply:
                return reply.status

        counting = [asyncio.ensure_future(count()) for _ in range(40)]
        assert await asyncio.to_thread(began.acquire, timeout=30)
        message = {"role": "user", "content": "other"}
        assert (await made.post(other, {"messages": [message]}))[0] == 200
        assert len(first) == 1
        go_on.set()
        assert set(await asyncio.gather(*counting)) == {200}


async def test_the_connections_of_an_episode_are_bounded(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 2)
    async with setup(folder) as made, await made.open() as episode, await made.open() as other:
        clients = [aiohttp.ClientSession() for _ in range(4)]  # each keeps a connection

        async def status_of(client: aiohttp.ClientSession, of: OpenEpisode) -> int:
            headers = {"x-api-key": of.api_key}
            async with client.get(f"{of.base_url}/models", headers=headers) as reply:
                await reply.read()
                return reply.status

        assert [await status_of(each, episode) for each in clients[:3]] == [200, 200, 429]
        assert await status_of(clients[3], other) == 200
        assert await status_of(clients[0], episode) == 200
        await clients[0].close()
        while await status_of(clients[2], episode) != 200:
            await asyncio.sleep(0.01)
        for each in clients:
            await each.close()


async def test_a_client_that_leaves_while_its_request_is_planned_leaves_the_episode_usable(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan runs in a thread; later requests of the episode wait until it has ended."""
    begun, go_on = threading.Event(), threading.Event()
    plan = Conversation.plan

    def waiting(conversation: Conversation, *arguments: Any) -> Any:
        if not begun.is_set():
            begun.set()
            assert go_on.wait(30)
        return plan(conversation, *arguments)

    monkeypatch.setattr(Conversation, "plan", waiting)
    monkeypatch.setattr(aside, "SMALL_BYTES", 10)
    async with setup(folder, ["Fine."]) as made, await made.open() as episode:
        leaving = asyncio.ensure_future(made.post(episode, {"messages": [USER]}))
        await asyncio.to_thread(begun.wait, 30)
        leaving.cancel()
        async with await made.open() as other:
            url, key = f"{other.base_url}/models", {"x-api-key": other.api_key}
            async with made.client.get(url, headers=key) as reply:  # the loop is free
                assert reply.status == 200
        go_on.set()
        status, _ = await made.post(episode, {"messages": [USER]})
        assert (status, len(episode.trajectories())) == (200, 1)


async def test_a_system_prompt_that_changes_with_every_request_is_logged_once_with_its_cause(
    folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with setup(folder, ["Fine."] * 3) as made, await made.open() as episode:
        for number in range(3):
            system = {"role": "system", "content": f"It is second {number}."}
            assert (await made.post(episode, {"messages": [system, USER]}))[0] == 200
        causes = [trajectory.cause for trajectory in episode.trajectories()]
        assert causes[1:] == ["message 0 (system) differs from that of an earlier request"] * 2
    assert caplog.text.count("begins another trajectory: message 0 (system) differs") == 1


async def test_the_header_of_claude_code_is_not_part_of_the_prompt(folder: str) -> None:
    async with setup(folder, ["Fine."] * 3) as made, await made.open() as episode:
        url, key = episode.anthropic_url + MESSAGES, {"x-api-key": episode.api_key}
        messages: list[Body] = [USER]
        for number in range(3):
            billing = f"x-anthropic-billing-header: cc_version=2.1.36; cch={number};"
            system = [{"type": "text", "text": text} for text in (billing, "Be kind.")]
            body = {"max_tokens": 100, "system": system, "messages": messages}
            async with made.client.post(url, json=body, headers=key) as response:
                answer = await response.json()
            messages += [{"role": "assistant", "content": answer["content"]}, USER]
        (trajectory,) = episode.trajectories()
        assert len(trajectory.turns) == 3


async def test_a_template_with_an_unknown_form_of_calls_refuses_tools(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    folder = write_model(tmp_path, "qwen", template)
    async with setup(folder, ["Fine."]) as made, await made.open() as episode:
        status, answer = await made.post(episode, {"messages": [USER], "tools": TOOLS})
        assert (status, answer["error"]["code"]) == (400, "tools_not_supported")
        assert (await made.post(episode, {"messages": [USER]}))[0] == 200


async def test_a_request_that_never_ends_does_not_outlive_its_episode(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection is aborted, that of another episode is not."""
    monkeypatch.setattr(http_server, "CLOSED_S", 0.05)
    async with setup(folder) as made, await made.open() as ended, await made.open() as other:
        address = urlsplit(made.gateway.url)
        pairs = []
        for episode in (ended, other):
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            head = (
                f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nx-api-key: {episode.api_key}\r\n"
            )
            writer.write(f"{head}Expect: 100-continue\r\nContent-Length: 50\r\n\r\n{{".encode())
            assert b"100 Continue" in await reader.readuntil(b"\r\n\r\n")
            pairs.append((reader, writer))
        await ended.close()
        async with asyncio.timeout(30):
            with contextlib.suppress(ConnectionError):
                assert await pairs[0][0].read() == b""
        assert not pairs[1][0].at_eof()
        for _, writer in pairs:
            writer.close()
