"""A teacher on a server, tested with an HTTP server that answers as SGLang does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
from aiohttp import web

from rlpost.config.engine_groups import generate_url, teacher_url_group
from rlpost.engines import group_client
from rlpost.engines.group_client import GroupClient
from rlpost.errors import ConfigError, RolloutError
from rlpost.rollout import teacher as module
from rlpost.rollout.teacher import PROBES, TeacherServer
from rlpost.types import Sample, ScoredSample

PROMPT, RESPONSE = (5, 6, 7), (8, 9)


def encode(text: str) -> list[int]:
    return list(text.encode())


class Server:
    """Answers /generate and records its requests; a token's log-prob is -(its id) / 10."""

    def __init__(
        self,
        *,
        shift: int = 0,
        statuses: tuple[int, ...] = (),
        drops: int = 0,
        misses: int = 0,
        lacks: str = "",
    ) -> None:
        self.lacks = lacks
        self.shift, self.statuses = shift, list(statuses)
        self.drops, self.misses = drops, misses
        self.requests: list[dict[str, Any]] = []

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        if self.statuses and (status := self.statuses.pop(0)) != 200:
            return web.Response(status=status, text="not now")
        shift = 1 if self.lacks and self.lacks in body.get("text", "") else self.shift
        ids = body.get("input_ids") or [each + shift for each in encode(body["text"])]
        kept = ids[body["logprob_start_len"] :]
        entries = [[None, kept[0], None]] + [[-each / 10, each, None] for each in kept[1:]]
        entries = entries[: len(entries) - self.drops]
        meta: dict[str, Any] = {"input_token_logprobs": entries}
        if count := body.get("top_logprobs_num"):  # the top tokens are id, id + 1, ...
            meta["input_top_logprobs"] = [None] + [
                [[-each / 20 - place, each + place, None] for place in range(count - self.misses)]
                for each in kept[1:]
            ]
        return web.json_response({"text": "", "meta_info": meta})


def with_server(
    server: Server,
    act: Callable[[TeacherServer], Awaitable[Any]],
    *,
    timeout_s: float = 20.0,
    top_k: int | None = None,
) -> Any:
    async def run() -> Any:
        app = web.Application()
        app.router.add_post("/generate", server.generate)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        client = GroupClient(teacher_url_group(f"http://127.0.0.1:{port}", timeout_s))
        teacher = TeacherServer(client, top_k=top_k)
        try:
            return await act(teacher)
        finally:
            await client.close()
            await runner.cleanup()

    return asyncio.run(run())


def scored(*, index: int = 0) -> ScoredSample:
    return ScoredSample(Sample(3, index, PROMPT, RESPONSE, (-1.0, -1.0), "", "stop", 0), 1.0)


def test_a_response_gets_the_log_prob_of_each_of_its_tokens():
    server = Server()
    (found,) = with_server(server, lambda teacher: teacher.scored([scored()]))
    assert list(found.sample.teacher_logprobs) == pytest.approx([-0.8, -0.9])
    assert found.reward == 1.0
    (request,) = server.requests
    assert request["input_ids"] == [*PROMPT, *RESPONSE] and request["return_logprob"] is True
    assert request["logprob_start_len"] == len(PROMPT) - 1
    assert request["sampling_params"] == {"temperature": 1.0, "max_new_tokens": 0}


def test_the_most_likely_tokens_at_each_token_of_a_response_are_requested_and_kept():
    server = Server()
    (found,) = with_server(server, lambda teacher: teacher.scored([scored()]), top_k=3)
    assert server.requests[0]["top_logprobs_num"] == 3
    assert found.sample.teacher_top_ids == (8, 9, 10, 9, 10, 11)
    expected = [-0.4, -1.4, -2.4, -0.45, -1.45, -2.45]
    assert list(found.sample.teacher_top_logprobs) == pytest.approx(expected)
    assert list(found.sample.teacher_logprobs) == pytest.approx([-0.8, -0.9])
    with pytest.raises(RolloutError, match="returned 4 most likely tokens for 2 tokens"):
        with_server(Server(misses=1), lambda teacher: teacher.scored([scored()]), top_k=3)


@pytest.mark.parametrize("top_k", [None, 3])
def test_an_empty_response_gets_no_log_probs(top_k):
    empty = Sample(3, 0, PROMPT, (), (), "", "stop", 0)
    found = with_server(Server(), lambda teacher: teacher.score(empty), top_k=top_k)
    assert list(found.teacher_logprobs) == []


def test_requests_to_a_busy_server_are_retried(monkeypatch):
    monkeypatch.setattr(group_client, "FIRST_PAUSE_S", 0.01)
    server = Server(statuses=(503, 429))
    (found,) = with_server(server, lambda teacher: teacher.scored([scored()]))
    assert len(server.requests) == 3 and found.sample.teacher_logprobs is not None


def test_an_unscored_response_is_left_out_and_many_in_a_row_are_an_error(monkeypatch):
    monkeypatch.setattr(module, "MAX_LOST_IN_A_ROW", 2)

    async def act(teacher: TeacherServer) -> None:
        assert await teacher.scored([scored()]) == ()
        with pytest.raises(RolloutError, match=r"2 consecutive answers were not scored.*is it up"):
            await teacher.scored([scored()])

    with_server(Server(statuses=(503,) * 100), act, timeout_s=0.05)


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (Server(statuses=(400,)), "answered 400: not now"),
        (Server(drops=1), "log-probs that are not those of the 2 tokens"),
    ],
)
def test_a_refusal_or_a_mismatched_answer_is_an_error(server, message):
    with pytest.raises(RolloutError, match=message):
        with_server(server, lambda teacher: teacher.scored([scored()]))


def test_the_tokenizer_of_the_server_is_compared_before_the_first_answer():
    server = Server()
    with_server(server, lambda teacher: teacher.check_tokenizer(encode))
    assert [request["text"] for request in server.requests] == list(PROBES)
    act = partial(TeacherServer.check_tokenizer, encode=encode, special=("<think>", "<|end|>"))
    server = Server()
    with_server(server, act)
    texts = [request["text"] for request in server.requests]
    assert texts == [*PROBES, "<think>", "<|end|>"]
    server = Server(lacks="<think>")
    with pytest.raises(ConfigError, match="not that of --hf-checkpoint: '<think>' is"):
        with_server(server, act)
    with pytest.raises(ConfigError, match="the teacher's tokenizer is not that of --hf-checkpoint"):
        with_server(Server(shift=1), lambda teacher: teacher.check_tokenizer(encode))


def test_generate_is_appended_to_a_url_without_a_path():
    assert generate_url("http://host:1") == "http://host:1/generate"
    assert generate_url("http://host:1/") == "http://host:1/generate"
    assert generate_url("http://host:1/v2/generate") == "http://host:1/v2/generate"
