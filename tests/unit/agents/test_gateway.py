"""The gateway over HTTP: formats, keys, limits, streams and halts.

The connection is real, the engines are fakes.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rlpost.config.checks.context_length import UNREAD_TOKENS
from rlpost.engines.connection import Connection, RunEngines
from rlpost.errors import ConfigError, RolloutError
from rlpost.extensions.agents import http_server, request_fields
from rlpost.extensions.agents.chat_messages import BadRequest
from rlpost.extensions.agents.chat_template import ChatTemplate
from rlpost.extensions.agents.gateway import (
    EpisodeLimits,
    Gateway,
    OpenEpisode,
    longest_request_of,
)
from rlpost.rollout.sampling import SamplingParams
from rlpost.types import Prompt
from tests.unit.agents.chat_models import write_model
from tests.unit.agents.harness import TOOLS
from tests.unit.agents.sampled import SampledTokens, check
from tests.unit.rollout.fake_engine import KEY, FakeEngine, serving

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
CHAT, MESSAGES = "/chat/completions", "/v1/messages"
USER = {"role": "user", "content": "How is the weather?"}
PROMPT = Prompt(7, "", ())
SAMPLING = SamplingParams(max_new_tokens=200, temperature=0.7, top_p=0.9)
Body = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("qwen"), "qwen")


class Setup:
    """A gateway, a connection and an engine with prepared answers."""

    def __init__(self, folder: str, answers: Sequence[str], abort_share: float) -> None:
        texts = iter(answers)
        template = ChatTemplate(folder)
        self.sampled = SampledTokens(
            template,
            lambda: next(texts),
            ["<|im_end|>"],
            random.Random(0),
            abort_share=abort_share,
        )
        self.engine = FakeEngine(answer=self._answer)
        self.gateway: Gateway
        self.connection: Connection
        self.client: aiohttp.ClientSession

    def _answer(self, body: Body) -> Body:
        asked = self.sampled.generate("", body["input_ids"], body["sampling_params"])
        try:
            asked.send(None)
        except StopIteration as done:
            answer = done.value
        pairs = zip(answer.logprobs, answer.token_ids, strict=True)
        versions = []
        start = 0
        for version, count in answer.version_spans:
            versions.append({"version": str(version), "start": start, "end": start + count})
            start += count
        return {
            "text": answer.text,
            "output_ids": list(answer.token_ids),
            "meta_info": {
                "finish_reason": answer.finish_reason,
                "weight_versions": versions,
                "weight_version": "1",
                "output_token_logprobs": [[logprob, token, None] for logprob, token in pairs],
            },
        }

    async def open(self, **options: Any) -> OpenEpisode:
        return await self.gateway.open(PROMPT, SAMPLING, connection=self.connection, **options)

    async def post(self, episode: OpenEpisode, body: Body, **headers: str) -> tuple[int, Any]:
        """Post a chat completion request; return status and body."""
        key = {"Authorization": f"Bearer {episode.api_key}"}
        async with self.client.post(
            episode.base_url + CHAT, json=body, headers=key | headers
        ) as response:
            return response.status, await response.json()

    async def events(self, url: str, key: Body, body: Body) -> list[tuple[str, Any]]:
        """Post a streaming request; return (name, data) of its events."""
        async with self.client.post(url, json=body, headers=key) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            text = await response.text()
        found = []
        for block in text.split("\n\n"):
            lines = dict(line.split(": ", 1) for line in block.splitlines() if line[:1] != ":")
            if "data" in lines:
                data = lines["data"]
                found.append((lines.get("event", ""), data if data[0] == "[" else json.loads(data)))
        return found


@asynccontextmanager
async def setup(
    folder: str, answers: Sequence[str] = (), *, abort_share: float = 0.0
) -> AsyncIterator[Setup]:
    made = Setup(folder, answers, abort_share)
    async with serving(made.engine) as (url,):
        address = RunEngines.of([url], KEY, capacity=8)
        async with (
            Gateway(folder) as made.gateway,
            Connection(address) as made.connection,
            aiohttp.ClientSession() as made.client,
        ):
            yield made


@pytest.mark.parametrize("abort_share", [0.0, 1.0])
async def test_a_conversation_with_tools_is_one_trajectory(folder: str, abort_share: float) -> None:
    """This also holds when every answer is aborted once for new weights."""
    async with (
        setup(folder, [CALL, "It is sunny."], abort_share=abort_share) as made,
        await made.open() as episode,
    ):
        status, first = await made.post(episode, {"messages": [USER], "tools": TOOLS})
        assert status == 200
        choice = first["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        message = choice["message"]
        call = message["tool_calls"][0]
        assert call["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
        output = {"role": "tool", "content": "sunny", "tool_call_id": call["id"]}
        messages = [USER, message, output]
        status, second = await made.post(episode, {"messages": messages, "tools": TOOLS})
        assert status == 200
        assert second["choices"][0]["message"]["content"] == "It is sunny."
        assert second["choices"][0]["finish_reason"] == "stop"
        assert second["usage"]["total_tokens"] > second["usage"]["prompt_tokens"] > 0
        (trajectory,) = episode.trajectories()
        check([trajectory], made.sampled)
        assert len(trajectory.turns) == 2
        versions = {version for version, _ in trajectory.versions.runs}
        assert (len(versions) > 2) == (abort_share > 0)


async def test_a_key_reaches_only_its_open_episode(folder: str) -> None:
    async with setup(folder, ["Fine."]) as made:
        first, second = await made.open(), await made.open(index=1)
        assert first.api_key != second.api_key
        await made.post(first, {"messages": [USER]})
        assert len(first.trajectories()) == 1
        assert second.trajectories() == ()

        class Forged:
            base_url, api_key = first.base_url, first.api_key[:-1] + "x"

        other = first.api_key.rpartition("-")[0] + "-" + second.api_key.rpartition("-")[2]
        await second.close()
        keys = ["", "sk-other", Forged.api_key, other, second.api_key, "ü" * 20]
        for key in keys:
            async with made.client.get(
                f"{first.base_url}/models", headers={"Authorization": f"Bearer {key}"}
            ) as response:
                assert response.status == 401
                error = (await response.json())["error"]
                assert error["code"] == "invalid_api_key"
        async with made.client.get(
            f"{first.base_url}/models", headers={"x-api-key": first.api_key}
        ) as response:
            assert [one["id"] for one in (await response.json())["data"]] == ["policy"]
        await first.close()


async def test_the_policy_samples_with_the_parameters_of_the_run(folder: str) -> None:
    async with setup(folder, ["Fine."]) as made, await made.open() as episode:
        body = {"messages": [USER], "temperature": 0, "top_p": 0.1, "max_tokens": 5}
        url, key = episode.base_url + CHAT, {"Authorization": f"Bearer {episode.api_key}"}
        async with made.client.post(url, json=body, headers=key) as response:
            assert response.status == 200
            assert response.headers[http_server.OVERRIDDEN_HEADER] == "temperature, top_p"
        params = made.engine.bodies[-1]["sampling_params"]
        assert (params["temperature"], params["top_p"]) == (0.7, 0.9)
        assert params["max_new_tokens"] == 5


def test_fields_of_the_apis_and_of_engines_are_known() -> None:
    """No field of OpenAI's client is ignored: it is read, without effect in the header, or refused."""
    from openai.types.chat.completion_create_params import CompletionCreateParamsBase
    from openai.types.responses.response_create_params import ResponseCreateParamsBase

    refused = set()
    for fields, params in (
        (request_fields.CHAT, CompletionCreateParamsBase),
        (request_fields.RESPONSES, ResponseCreateParamsBase),
    ):
        for name in params.__annotations__:
            try:
                fields.check({name: object()})
            except BadRequest:
                refused.add(name)
    assert refused == {
        *("audio", "function_call", "functions", "logit_bias", "modalities", "parallel_tool_calls"),
        *("web_search_options", "background", "conversation", "include"),
        *("max_tool_calls", "prompt", "truncation"),
    }
    assert request_fields.CHAT.check({"logit_bias": {}, "functions": [], "provider": {}}) == ()
    fields = {"best_of": 1, "parallel_tool_calls": True, "user": "x", "reasoning_effort": "low"}
    assert request_fields.CHAT.check(fields) == ("reasoning_effort",)


async def test_a_stream_has_the_same_content_as_a_response(folder: str) -> None:
    answers = [f"<think>\nHm.\n</think>\n\nLook:\n{CALL}\n{CALL}"] * 2
    async with setup(folder, answers) as made, await made.open() as episode:
        body = {"messages": [USER], "tools": TOOLS, "logprobs": True}
        _, whole = await made.post(episode, body)
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        key = {"Authorization": f"Bearer {episode.api_key}"}
        events = await made.events(episode.base_url + CHAT, key, streamed)
        assert events[-1] == ("", "[DONE]")
        chunks = [data for _, data in events[:-1]]
        message: Body = {"tool_calls": []}
        for chunk in chunks[:-1]:
            delta = chunk["choices"][0]["delta"]
            message["tool_calls"] += delta.pop("tool_calls", [])
            for field, text in delta.items():
                message[field] = message.get(field, "") + text
        given = whole["choices"][0]["message"]
        for call in message["tool_calls"] + given["tool_calls"]:
            call.pop("index", None)
            call.pop("id")
        assert {**given, "refusal": None} == {**message, "refusal": None}
        assert given["reasoning_content"] == "Hm."
        assert given["content"] == "Look:"
        assert len(given["tool_calls"]) == 2
        assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"
        assert chunks[-1]["usage"] == pytest.approx(whole["usage"], abs=50)
        trajectory = episode.trajectories()[0]
        logprobs = [one["logprob"] for one in whole["choices"][0]["logprobs"]["content"]]
        turn = trajectory.turns[0]
        assert logprobs == list(trajectory.logprobs[turn.start : turn.end])


async def test_streams_are_kept_open_and_report_late_errors(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "KEEP_ALIVE_S", 0.05)
    async with setup(folder) as made:
        made.engine.holds = asyncio.Event()
        async with await made.open() as episode:
            url, key = episode.base_url + CHAT, {"Authorization": f"Bearer {episode.api_key}"}
            body = {"messages": [USER], "stream": True}
            async with made.client.post(url, json=body, headers=key) as response:
                assert (await response.content.readline()).startswith(b": ")
                made.engine.refuses = "generate"
                made.engine.answer = lambda _: {"no": "answer"}
                made.engine.holds.set()
                assert b"engine_error" in await response.read()
            assert isinstance(episode.error, RolloutError)


async def test_a_stream_that_waits_sends_the_events_of_its_api(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs do not count comments; each event but those of the wait is sent once."""
    monkeypatch.setattr(http_server, "KEEP_ALIVE_S", 0.05)
    paths: dict[str, Body] = {MESSAGES: {"messages": [USER]}, "/v1/responses": {"input": "Hi"}}
    async with setup(folder, ["Fine."] * 2) as made, await made.open() as episode:
        for path, body in paths.items():
            made.engine.holds = asyncio.Event()
            key = {"x-api-key": episode.api_key}
            sent: Body = {**body, "max_tokens": 9} if path == MESSAGES else body
            url = episode.anthropic_url + path
            async with made.client.post(url, json=sent | {"stream": True}, headers=key) as response:
                lines = list[bytes]()
                while sum(line.startswith(b"data:") for line in lines) < 3:
                    lines.append(await response.content.readline())
                made.engine.holds.set()
                lines += (await response.read()).splitlines()
            events = [json.loads(line[5:]) for line in lines if line.startswith(b"data:")]
            kinds = [event["type"] for event in events]
            if path == MESSAGES:
                assert kinds[:3] == ["ping"] * 3
                assert kinds.count("message_start") == 1
                continue
            assert kinds[:3] == ["response.created"] + ["response.in_progress"] * 2
            assert kinds.count("response.created") == kinds.count("response.completed") == 1
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            responses = [event["response"] for event in events if "response" in event]
            assert len({(each["id"], each["created_at"]) for each in responses}) == 1


async def test_anthropic_messages_are_the_same_conversation(folder: str) -> None:
    tool = {
        "name": "weather",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
    answer = f"<think>\nHm.\n</think>\n\nLook:\n{CALL}"
    async with setup(folder, [answer, "It is sunny."]) as made, await made.open() as episode:
        url, key = episode.anthropic_url + MESSAGES, {"x-api-key": episode.api_key}
        body: Body = {"model": "any", "max_tokens": 100, "system": "Be kind.", "tools": [tool]}
        messages: list[Body] = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
        async with made.client.post(
            url, json={**body, "messages": messages}, headers=key
        ) as response:
            assert response.status == 200, await response.text()
            first = await response.json()
        kinds = [block["type"] for block in first["content"]]
        assert kinds == ["thinking", "text", "tool_use"]
        assert first["content"][2]["input"] == {"city": "Paris"}
        assert first["stop_reason"] == "tool_use"
        result = {"type": "tool_result", "tool_use_id": first["content"][2]["id"]}
        messages += [
            {"role": "assistant", "content": first["content"]},
            {"role": "user", "content": [{**result, "content": "sunny"}]},
        ]
        streamed = {**body, "messages": messages, "stream": True}
        events = await made.events(url, key, streamed)
        names = [name for name, _ in events]
        assert names == [
            *("message_start", "content_block_start", "content_block_delta"),
            *("content_block_stop", "message_delta", "message_stop"),
        ]
        assert events[2][1]["delta"] == {"type": "text_delta", "text": "It is sunny."}
        assert events[4][1]["delta"]["stop_reason"] == "end_turn"
        async with made.client.post(
            url + "/count_tokens", json={**body, "messages": messages}, headers=key
        ) as response:
            counted = (await response.json())["input_tokens"]
        assert counted > first["usage"]["input_tokens"]
        trajectories = episode.trajectories()
        assert len(trajectories) == 1
        check(trajectories, made.sampled)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0]"),
        ({"messages": [USER], "tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"messages": [USER], "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": [USER], "logit_bias": {"1": 5}}, "logit_bias"),
        ({"messages": [USER], "logprobs": True, "top_logprobs": 3}, "top_logprobs"),
        (
            {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}},
            "chat_template_kwargs",
        ),
        ({"messages": [USER], "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"messages": [USER], "regex": "a+"}, "regex"),
        ({"messages": [USER], "a_new_field": 1}, "a_new_field"),
        ({"messages": [USER], "stream": "false"}, "stream"),
        ({"messages": [USER, {"role": "assistant", "content": "A"}]}, "messages"),
        ({"messages": [USER, {"role": "tool", "content": "A", "tool_call_id": "x"}]}, "messages"),
        ({"messages": [USER], "tools": [{"function": {"name": "f", "parameters": "x"}}]}, "tools"),
        ({"messages": [USER], "n": 0}, "n"),
        ({"messages": [USER], "max_tokens": "5"}, "max_tokens"),
        ({"messages": [USER], "stop": [1]}, "stop"),
        ({"messages": [USER], "stop": "z" * 1001}, "stop"),
        ({"messages": [USER], "tools": [{"type": "function"}]}, "tools"),
    ],
)
async def test_requests_that_cannot_be_answered_exactly_are_refused_in_openais_format(
    folder: str, body: Body, param: str
) -> None:
    async with setup(folder) as made, await made.open() as episode:
        status, answer = await made.post(episode, body)
        assert status == 400
        assert answer["error"]["type"] == "invalid_request_error"
        assert answer["error"]["param"] == param
        assert made.engine.bodies == []


async def test_a_tool_that_anthropic_runs_is_refused_and_one_of_the_client_is_not(
    folder: str,
) -> None:
    async with setup(folder, ["Found."] * 2) as made, await made.open() as episode:
        url, key = episode.anthropic_url + MESSAGES, {"x-api-key": episode.api_key}
        schema = {"input_schema": {"type": "object"}}
        kinds: list[tuple[str, Body, int]] = [
            ("web_search_20250305", schema, 400),
            ("bash_20250124", {}, 400),  # its arguments are known to Anthropic's models alone
            ("bash_20250124", schema, 200),
            ("custom", {}, 200),
        ]
        for kind, more, status in kinds:
            tool = {"type": kind, "name": "search", **more}
            body = {"messages": [USER], "max_tokens": 8, "tools": [tool]}
            async with made.client.post(url, json=body, headers=key) as response:
                assert response.status == status, await response.text()


async def test_errors_of_http_are_in_the_format_of_the_api(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "MAX_BODY_BYTES", 1000)
    async with setup(folder) as made, await made.open() as episode:
        status, answer = await made.post(episode, {"messages": [USER], "user": "x" * 2000})
        assert (status, answer["error"]["type"]) == (413, "invalid_request_error")
        key = {"Authorization": f"Bearer {episode.api_key}"}
        url = episode.base_url
        async with made.client.post(url + CHAT, data=b"{", headers=key) as response:
            assert response.status == 400
            assert "JSON" in (await response.json())["error"]["message"]
        async with made.client.get(url + "/nothing", headers=key) as response:
            assert response.status == 404
            assert "error" in await response.json()
        async with made.client.post(episode.anthropic_url + MESSAGES, json={}) as response:
            assert response.status == 401
            assert (await response.json())["error"]["type"] == "authentication_error"


async def test_an_engine_that_fails_is_an_error_of_the_episode(folder: str) -> None:
    async with setup(folder) as made:
        made.engine.answer = lambda _: {"no": "answer"}
        async with await made.open() as episode:
            status, answer = await made.post(episode, {"messages": [USER]})
            assert (status, answer["error"]["code"]) == (500, "engine_error")
            assert isinstance(episode.error, RolloutError)
            assert episode.trajectories() == ()


async def test_a_halt_ends_requests_in_flight(folder: str) -> None:
    """As in a preemption, engines abort, the connection is halted, and harnesses get a 503."""
    async with setup(folder, ["It is fine today."]) as made:
        made.engine.holds = asyncio.Event()
        async with await made.open() as episode:
            request = asyncio.ensure_future(made.post(episode, {"messages": [USER]}))
            while not made.engine.under_way:
                await asyncio.sleep(0.01)
            made.connection.halted = True
            made.sampled.abort_share = 1.0
            made.engine.holds.set()
            status, answer = await request
            assert (status, answer["error"]["code"]) == (503, "rollout_halted")
            assert episode.halted
            assert episode.trajectories() == ()


@pytest.mark.parametrize("how", ["disconnect", "close"])
async def test_answers_that_no_harness_reads_are_cancelled_and_not_trained(
    folder: str, how: str
) -> None:
    async with setup(folder) as made:
        made.engine.holds = asyncio.Event()
        async with await made.open() as episode:
            request = asyncio.ensure_future(made.post(episode, {"messages": [USER]}))
            while not made.engine.under_way:
                await asyncio.sleep(0.01)
            if how == "disconnect":
                request.cancel()
            else:
                await episode.close()
                assert (await request)[0] == 401
            while made.engine.under_way:  # the engine sees the disconnect
                await asyncio.sleep(0.01)
            assert episode.trajectories() == ()
            assert episode.num_tokens == 0


async def test_no_more_answers_than_allowed_are_generated_at_once(folder: str) -> None:
    async with (
        setup(folder, ["A."] * 6) as made,
        await made.open(limits=EpisodeLimits(max_parallel=2)) as episode,
    ):
        status, answer = await made.post(episode, {"messages": [USER], "n": 6})
        assert status == 200
        assert len(answer["choices"]) == 6
        assert made.engine.most_under_way <= 2
        assert len(episode.trajectories()) == 6
        seeds = {body["sampling_params"]["sampling_seed"] for body in made.engine.bodies}
        assert len(seeds) == len(made.engine.bodies)


def test_a_folder_without_chat_template_is_refused(folder: str, tmp_path: Path) -> None:
    for file in Path(folder).iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ConfigError, match="no chat template"):
        Gateway(str(tmp_path))


async def test_an_address_that_cannot_be_bound_is_named(folder: str) -> None:
    with pytest.raises(RolloutError, match=r"192\.0\.2\.1"):
        async with Gateway(folder, host="192.0.2.1"):
            pass


def test_the_context_length_of_the_model_is_read_from_its_folder(tmp_path: Path) -> None:
    assert longest_request_of(str(tmp_path), {}) is None
    (tmp_path / "config.json").write_text('{"text_config": {"max_position_embeddings": 40960}}')
    assert longest_request_of(str(tmp_path), {}) == 40960 - UNREAD_TOKENS
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 512}')
    assert longest_request_of(str(tmp_path), {}) == 512 - UNREAD_TOKENS
    assert longest_request_of(str(tmp_path), {"context_length": 100}) == 100 - UNREAD_TOKENS
