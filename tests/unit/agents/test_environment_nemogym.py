"""NeMo-Gym: a resources server of ours, and the real gateway for the policy."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from rlpost.errors import ConfigError, DataError, GradingLost
from rlpost.extensions.agents.environments.export import main as export
from rlpost.extensions.agents.environments.of_nemogym import MAX_OUTPUT, NemoGymHarness
from rlpost.extensions.agents.environments.protocol import Episode
from rlpost.types import Prompt
from tests.unit.agents.chat_models import write_model
from tests.unit.agents.sampled import check
from tests.unit.agents.test_gateway import CALL, setup

TOOL = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
ROW: dict[str, Any] = {
    "responses_create_params": {
        "input": [{"role": "user", "content": "How is the weather?"}],
        "tools": [TOOL],
        "parallel_tool_calls": False,  # as in 52 of the 475 example rows of nemo-gym 0.4.0
    },
    "wanted": "sunny",
}


class Resources:
    """A server whose tool and verifier need the session's cookie.

    ``verdict`` and ``output``, of the tool, replace its own.
    """

    def __init__(
        self,
        verdict: dict[str, Any] | web.Response | None = None,
        output: web.Response | None = None,
    ) -> None:
        self.verdict, self.output = verdict, output
        self.asked = list[tuple[str, Any]]()
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        path, body = request.path, await request.json()
        self.asked.append((path, body))
        if path == "/seed_session":
            answer = web.json_response({})
            answer.set_cookie("session", "s1")
            return answer
        if request.cookies.get("session") != "s1":
            return web.json_response({"detail": "no session"}, status=403)
        if path == "/weather" and self.output:
            return self.output
        if path == "/weather":
            return web.json_response({"weather": f"{body['city']} is sunny"})
        if isinstance(self.verdict, web.Response):
            return self.verdict
        if self.verdict:
            return web.json_response(self.verdict)
        texts = json.dumps(body["response"]["output"])
        return web.json_response({**body, "reward": float(body["wanted"] in texts)})

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Resources]:
        app = web.Application()
        app.router.add_post("/{path:.*}", self.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield self
        finally:
            await runner.cleanup()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("qwen"), "qwen")


def asked_of(opened: Any, row: dict[str, Any]) -> Episode:
    prompt = Prompt(0, "text", (1,), metadata=row)
    sampling = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 64}
    return Episode(opened.base_url, opened.api_key, "policy", prompt, 0, sampling, 4)


async def test_an_episode_calls_the_servers_tools_and_is_scored_by_its_verifier(
    folder: str,
) -> None:
    resources = Resources()
    async with (
        setup(folder, [f"Look:\n{CALL}", "It is fine."]) as made,
        resources.serving(),
        await made.open() as opened,
    ):
        outcome = await NemoGymHarness(resources.url).run(asked_of(opened, ROW))
        assert outcome.reward == 1.0
        check(opened.trajectories(), made.sampled)
        assert len(opened.trajectories()) == 1
    paths = [path for path, _ in resources.asked]
    assert paths == ["/seed_session", "/weather", "/verify"]
    assert resources.asked[1][1] == {"city": "Paris"}
    verified = resources.asked[2][1]
    assert verified["wanted"] == "sunny"
    kinds = [item["type"] for item in verified["response"]["output"]]
    assert kinds == ["message", "function_call", "function_call_output", "message"]


async def test_a_tool_that_the_row_does_not_have_is_not_asked(folder: str) -> None:
    """Else a policy could call /verify."""
    resources = Resources()
    verify = CALL.replace("weather", "verify")
    async with (
        setup(folder, [f"Look:\n{verify}", "Done."]) as made,
        resources.serving(),
        await made.open() as opened,
    ):
        outcome = await NemoGymHarness(resources.url).run(asked_of(opened, ROW))
        assert outcome.reward == 0.0
    assert [path for path, _ in resources.asked] == ["/seed_session", "/verify"]
    output = resources.asked[1][1]["response"]["output"]
    assert [item["output"] for item in output if item["type"] == "function_call_output"] == [
        '{"error": "there is no tool verify"}'
    ]


async def test_the_last_allowed_turn_is_verified(folder: str) -> None:
    resources = Resources()
    async with (
        setup(folder, [f"Look:\n{CALL}"]) as made,
        resources.serving(),
        await made.open() as opened,
    ):
        await NemoGymHarness(resources.url, max_turns=1).run(asked_of(opened, ROW))
    assert [path for path, _ in resources.asked] == ["/seed_session", "/verify"]


async def test_a_row_without_a_task_and_a_server_that_is_gone_are_errors(folder: str) -> None:
    async with setup(folder, []) as made, await made.open() as opened:
        harness = NemoGymHarness("http://127.0.0.1:9")
        with pytest.raises(DataError, match="has no responses_create_params"):
            await harness.run(asked_of(opened, {"wanted": "x"}))
        with pytest.raises(aiohttp.ClientError):
            await harness.run(asked_of(opened, ROW))


@pytest.mark.parametrize(
    ("verdict", "told"),
    [
        (
            {"reward": 0.0, "_ng_failure_class": "judge_failed", "_ng_failure_judge_error": "503"},
            "could not score the answer.*judge_failed.*503",
        ),
        ({"reward": 0.0, "_ng_no_persist": True}, "could not score the answer"),
        ({"reward": 0.0, "mask_sample": True}, "mask_sample"),
        ({"reward": 0.0, "instance_config": {"mask_sample": True}}, "mask_sample"),
        ({"scores": [1]}, "/verify returned no reward"),
        ({"reward": None}, "/verify returned no reward"),
        ({"reward": 1.0, "scores": "x" * MAX_OUTPUT}, "/verify answers with more than"),
    ],
)
async def test_a_verdict_that_is_no_score_of_the_answer_is_lost_and_never_zero(
    folder: str, verdict: dict[str, Any], told: str
) -> None:
    resources = Resources(verdict)
    async with (
        setup(folder, ["It is fine."]) as made,
        resources.serving(),
        await made.open() as opened,
    ):
        with pytest.raises(GradingLost, match=told):
            await NemoGymHarness(resources.url).run(asked_of(opened, ROW))


BOMB = {"Content-Encoding": "gzip", "Content-Type": "text/plain"}


@pytest.mark.parametrize(
    ("output", "seen"),
    [
        (web.Response(body=b"\xed\xa0\xbd \xff", content_type="text/plain"), "\ufffd \ufffd"),
        (web.Response(status=201, headers={"Location": "/reports/1"}, text="stored"), "stored"),
        (web.Response(status=307, headers={"Location": "/verify"}), "redirects to '/verify'"),
        (web.Response(body=gzip.compress(bytes(2 * MAX_OUTPUT)), headers=BOMB), "too long"),
    ],
)
async def test_an_output_of_a_tool_is_bounded_text_of_the_server_itself(
    folder: str, output: web.Response, seen: str
) -> None:
    """A policy may bring a tool to write anything, and a server name others of the driver's node."""
    resources = Resources(output=output)
    async with setup(folder, [CALL, "Done."]) as made, resources.serving():
        made.gateway.policy.longest_request = 10_000
        async with await made.open() as opened:
            error = ""
            try:
                await NemoGymHarness(resources.url).run(asked_of(opened, ROW))
            except (aiohttp.ClientError, GradingLost) as raised:
                error = str(raised)
            asked = [path for path, _ in resources.asked]
            assert (seen in error) == bool(error), error
            assert asked[:2] == ["/seed_session", "/weather"]
            assert asked[2:] == ([] if error else ["/verify"])
            assert (opened.limit_reached == "context") == (seen == "too long")
    if not error:
        outputs = [item.get("output") for item in resources.asked[2][1]["response"]["output"]]
        assert any(seen in str(each) for each in outputs)


async def test_a_refusal_of_a_server_is_read_up_to_a_bound(folder: str) -> None:
    size = 16 * MAX_OUTPUT
    resources = Resources(web.Response(status=500, body=gzip.compress(b"x" * size), headers=BOMB))
    async with (
        setup(folder, ["Done."]) as made,
        resources.serving(),
        await made.open() as opened,
    ):
        tracemalloc.start()
        try:
            with pytest.raises(aiohttp.ClientResponseError, match="Internal Server Error: xxxx"):
                await NemoGymHarness(resources.url).run(asked_of(opened, ROW))
            assert tracemalloc.get_traced_memory()[1] < size
        finally:
            tracemalloc.stop()


FORCED = {"responses_create_params": {**ROW["responses_create_params"], "tool_choice": "required"}}


async def test_the_reason_of_a_refusal_is_that_of_the_failed_episode(folder: str) -> None:
    resources = Resources()
    async with setup(folder) as made, resources.serving(), await made.open() as opened:
        with pytest.raises(aiohttp.ClientResponseError, match="'required' would constrain"):
            await NemoGymHarness(resources.url).run(asked_of(opened, FORCED))


def test_an_address_is_wanted() -> None:
    with pytest.raises(ConfigError, match="not an address"):
        NemoGymHarness("example")


def test_export_makes_a_prompt_file_of_a_file_of_nemo_gym(tmp_path: Any, capsys: Any) -> None:
    data, out = tmp_path / "data.jsonl", tmp_path / "prompts.jsonl"
    data.write_text(json.dumps(ROW) + "\n")
    arguments = json.dumps({"gym": {"data": str(data)}})
    word = "gym=nemogym:http://n1:8000"
    assert export([word, "--out", str(out), "--env-args", arguments]) == 0
    assert json.loads(out.read_text()) == {**ROW, "prompt": "How is the weather?", "env": "gym"}
    assert export([word, "--out", str(out)]) == 2
    assert '{"gym": {"data": "FILE.jsonl"}}' in capsys.readouterr().err
    output = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"}
    history = [*ROW["responses_create_params"]["input"], call, output]
    params = {**ROW["responses_create_params"], "input": history}
    data.write_text(json.dumps({**ROW, "responses_create_params": params}) + "\n")
    assert export([word, "--out", str(out), "--env-args", arguments]) == 0
    assert json.loads(out.read_text())["prompt"] == "How is the weather?"
    capsys.readouterr()
    data.write_text(json.dumps(FORCED) + "\n")
    assert export([word, "--out", str(out), "--env-args", arguments]) == 2
    assert "line 1: the gateway refuses" in capsys.readouterr().err
    for text in ("{}", "[" * 100_000):
        data.write_text(f"{text}\n")
        assert export([word, "--out", str(out), "--env-args", arguments]) == 2
        assert "line 1: no task of NeMo-Gym" in capsys.readouterr().err
