"""No answer affects the event loop or the grading of other answers."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from aiohttp import web

from common.files import text_or_empty
from rlpost.columns import RouteColumn
from rlpost.config.load import load
from rlpost.config.tree import Config
from rlpost.engines import group_client
from rlpost.errors import ConfigError, DataError, RolloutError
from rlpost.tasks.reward import grader as module
from rlpost.tasks.reward import pool
from rlpost.tasks.reward.grader import ERRORS, LOST, TIMEOUTS, Grader, make_grader
from rlpost.types import Prompt, Sample

USER = Path(__file__).with_name("user_rewards.py")
GROUP = "tests.unit.tasks.reward.user_rewards.ranks"


def settings(**given: Any) -> Config:
    return Config.model_validate({"rollout": {"reward_workers": 2, **given}})


def prompt(label: str | None = None, **metadata: Any) -> Prompt:
    return Prompt(7, "question", (1,), label=label, metadata=metadata)


def samples(*texts: str) -> list[Sample]:
    return [Sample(7, i, (1,), (2,), (0.0,), text, "stop", 0) for i, text in enumerate(texts)]


def using(config: Config, work: Callable[[Grader], Coroutine[Any, Any, Any]]) -> Any:
    """Run ``work`` with a grader, then close the grader."""

    async def run() -> Any:
        made = make_grader(config)
        try:
            return await work(made)
        finally:
            await made.close()

    return asyncio.run(run())


@pytest.mark.slow
def test_hostile_mathematics_gets_no_reward_and_delays_no_other_answer() -> None:
    """A power tower reaches the time limit; the event loop and other gradings continue."""
    given = [
        rf"</think>\boxed{{{text}}}"
        for text in ("9**9**9", r"\frac{1}{2}", "(" * 60 + "2" + ")" * 60, "0.5", "9" * 9999)
    ]

    async def work(made: Grader) -> tuple[list[float], float]:
        longest, last, scoring = (
            0.0,
            time.monotonic(),
            asyncio.ensure_future(made.grade(prompt("1/2"), samples(*given))),
        )
        while not scoring.done():
            await asyncio.sleep(0.01)
            now = time.monotonic()
            longest, last = max(longest, now - last), now
        assert made.counters() == {TIMEOUTS: 1, ERRORS: 0, LOST: 0}
        assert made.counters() == {TIMEOUTS: 0, ERRORS: 0, LOST: 0}
        return await scoring, longest

    rewards, longest = using(settings(rm_type="deepscaler", reward_timeout_s=1), work)
    assert rewards == [0, 1, 0, 1, 0]
    assert longest < 1  # evaluating the power tower would take minutes


@pytest.mark.slow
def test_every_failure_is_a_reward_of_0_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "GRACE_S", 0.2)
    texts = ("fine", "crash", "raise", "nan", "nothing", "spin", "hang", "fine")

    async def work(made: Grader) -> tuple[list[float], Any]:
        return await made.grade(prompt(), samples(*texts)), made.counters()

    config = settings(custom_rm_path=f"{USER}:hostile", reward_timeout_s=2.0)
    assert using(config, work) == ([1, 0, 0, 0, 0, 0, 0, 1], {TIMEOUTS: 2, ERRORS: 4, LOST: 0})


def test_a_lost_grading_gives_no_reward() -> None:
    """A killed process, an unavailable server or sandbox: the reward is unknown, not 0."""
    texts = ("fine", "killed", "refused", "lost", "pipe", "fine")

    async def work(made: Grader) -> tuple[Any, Any]:
        return await made.grade(prompt(), samples(*texts)), made.counters()

    found = using(settings(custom_rm_path=f"{USER}:needy"), work)
    assert found == ([1, None, None, None, 0, 1], {TIMEOUTS: 0, ERRORS: 1, LOST: 3})


def test_a_process_that_is_killed_while_idle_loses_no_grading() -> None:
    async def work(made: Any) -> Any:
        await made.grade(prompt(), samples("fine"))
        (worker,) = made._pool._all
        worker._process.kill()
        worker._process.wait()
        return await made.grade(prompt(), samples("fine")), made.counters()[LOST]

    assert using(settings(custom_rm_path=f"{USER}:needy", reward_workers=1), work) == ([1], 0)


def test_a_group_whose_grading_is_lost_has_no_reward() -> None:
    config = settings(
        custom_rm_path="tests.unit.tasks.reward.user_rewards.ranks_or_killed", group_rm=True
    )
    assert using(config, lambda made: made.grade(prompt(), samples("a", "killed"))) == [None, None]


def test_processes_that_a_grading_started_end_with_it(tmp_path: Path) -> None:
    for limit_s in (0.5, 5.0, 50.0):  # until the grading starts its process in time
        config = settings(custom_rm_path=f"{USER}:starts", reward_timeout_s=limit_s)
        file = tmp_path / f"pid-{limit_s}"
        answers = samples(str(file))
        assert using(config, lambda made, sent=answers: made.grade(prompt(), sent)) == [0]
        if pid := text_or_empty(file):
            break
    started, deadline = int(pid), time.monotonic() + 20
    while psutil.pid_exists(started) and psutil.Process(started).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "still there"
        time.sleep(0.01)


def test_a_reward_that_fails_on_every_answer_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FAILURES_IN_A_ROW", 5)
    config = settings(custom_rm_path=f"{USER}:always_wrong", reward_workers=1)
    with pytest.raises(
        RolloutError, match=r"5 consecutive gradings failed.*ZeroDivisionError: a bug"
    ):
        using(config, lambda made: made.grade(prompt(), samples(*"abcdefgh")))


def test_close_ends_hanging_gradings() -> None:
    """The answer is no longer awaited, as in a preemption."""

    async def work(made: Any) -> list[int]:
        scoring = asyncio.ensure_future(made.grade(prompt(), samples("fine", "spin")))
        while len(made._pool._all) < 2:
            await asyncio.sleep(0.01)
        workers = list(made._pool._all)
        scoring.cancel()
        await asyncio.gather(scoring, return_exceptions=True)
        await made.close()
        return [worker._process.returncode for worker in workers]

    started = time.monotonic()
    codes = using(settings(custom_rm_path=f"{USER}:hostile", reward_timeout_s=300), work)
    assert len(codes) == 2
    assert None not in codes
    assert time.monotonic() - started < 100


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"custom_rm_path": f"{USER}:length"}, [2, 4]),
        ({"custom_rm_path": f"{USER}:slow_length"}, [1, 3]),
        ({"custom_rm_path": GROUP, "group_rm": True}, [0, 1]),
    ],
)
def test_a_users_function_scores_one_answer_or_a_group(
    given: dict[str, Any], wanted: list[float]
) -> None:
    config = settings(**given, reward_workers=1)
    found = using(config, lambda made: made.grade(prompt("bonus"), samples("a", "abc")))
    assert found == wanted


def test_a_custom_reward_takes_precedence_over_any_name_in_a_prompt() -> None:
    config = settings(custom_rm_path=f"{USER}:length", reward_workers=1)
    named = prompt(rm_type="known_to_slime_alone")
    assert using(config, lambda made: made.grade(named, samples("a", "abc"))) == [1, 3]


def test_a_missing_custom_function_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.py:f: no such file"):
        make_grader(settings(custom_rm_path="/nowhere.py:f"))
    with pytest.raises(
        ConfigError, match=r"cannot be loaded.*has no function missing; it has .*slow_length"
    ):
        using(
            settings(custom_rm_path=f"{USER}:missing"),
            lambda made: made.grade(prompt(), samples("a")),
        )


@pytest.mark.slow
def test_a_prompt_may_name_its_own_reward() -> None:
    async def work(made: Grader) -> list[list[float]]:
        given = [prompt("42"), prompt("42", rm_type="gsm8k"), prompt("42", rm_type="boxed_math")]
        return [await made.grade(each, samples("42", r"so \boxed{42}")) for each in given]

    config = settings(rm_type="exact_match", reward_workers=1)
    assert using(config, work) == [[1, 0], [1, 1], [0, 1]]
    with pytest.raises(
        DataError, match=r"prompt 7: 'rm_type' .*no such reward; did you mean 'gsm8k'"
    ):
        using(settings(), lambda made: made.grade(prompt(rm_type="gsm8"), samples("")))
    with pytest.raises(DataError, match=r"needs .*--rm-url"):
        using(settings(), lambda made: made.grade(prompt(rm_type="remote_rm"), samples("")))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"rm_type": "exactmatch"}, "did you mean 'exact_match'"),
        ({"rm_type": "remote_rm"}, "needs .*--rm-url"),
        ({"rm_url": "localhost:1"}, "http://"),
        ({"group_rm": True}, "needs --custom-rm-path"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    given: dict[str, Any], wanted: str
) -> None:
    with pytest.raises(ConfigError, match=wanted):
        make_grader(settings(**given))


def test_the_file_of_a_reward_is_relative_to_the_working_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(USER.parent)
    config = load([], {"rollout": {"custom_rm_path": "user_rewards.py:length"}}).config
    assert config.rollout.custom_rm_path == f"{USER}:length"


class Server:
    """A reward model that returns ``answers`` in order and then repeats the last one."""

    def __init__(self, *answers: tuple[int, str | bytes], slow_s: float = 0.0) -> None:
        self.answers, self.bodies, self.slow_s = list(answers), [], slow_s

    async def __aenter__(self) -> str:
        application = web.Application()
        application.router.add_post("/score", self._score)
        self._runner = web.AppRunner(application)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}/score"

    async def __aexit__(self, *details: object) -> None:
        await self._runner.cleanup()

    async def _score(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        await asyncio.sleep(self.slow_s)
        status, text = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        body = text if isinstance(text, bytes) else text.encode()
        return web.Response(status=status, body=body, content_type="text/plain", charset="utf-8")


def ask(server: Server, answers: Sequence[str] = ("answer",), *, timeout_s: float = 20) -> Any:
    async def run() -> Any:
        async with server as url:
            made = make_grader(
                settings(rm_type="remote_rm", rm_url=url, rm_url_timeout_s=timeout_s)
            )
            try:
                return await made.grade(
                    prompt("L", page=3, day=date(2026, 1, 2)), samples(*answers)
                )
            finally:
                await made.close()

    return asyncio.run(run())


@pytest.mark.parametrize("text", ["0.25", '{"reward": 0.25}', '{"score": 0.25, "why": "so"}'])
def test_a_reward_model_is_called_over_http(text: str) -> None:
    server = Server((200, text))
    assert ask(server) == [0.25]
    metadata = {"page": 3, "day": "2026-01-02"}
    assert server.bodies == [
        {"prompt": "question", "response": "answer", "label": "L", "metadata": metadata}
    ]


def test_an_answer_that_is_not_text_is_refused() -> None:
    with pytest.raises(RolloutError, match=r"answered .*it must return a number"):
        ask(Server((200, b"\xff")))


def test_requests_to_a_busy_reward_model_are_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_client, "FIRST_PAUSE_S", 0.001)
    server = Server((503, ""), (429, ""), (200, "1"))
    assert ask(server) == [1]
    assert len(server.bodies) == 3


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        ((404, "no such page"), "answered 404: no such page"),
        ((200, "good"), "'good'; it must return a number"),
    ],
)
def test_a_permanent_error_is_raised_without_a_retry(answer: tuple[int, str], wanted: str) -> None:
    server = Server(answer)
    with pytest.raises(RolloutError, match=wanted):
        ask(server)
    assert len(server.bodies) == 1


@pytest.mark.parametrize("server", ["answers 500", "is not there"])
def test_an_unavailable_reward_model_gives_no_reward_and_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, server: str
) -> None:
    monkeypatch.setattr(group_client, "FIRST_PAUSE_S", 0.001)
    if server == "answers 500":
        assert ask(Server((500, "")), "ab", timeout_s=3.0) == [None, None]
        assert "/score answered 500, for 3 s (--rm-url-timeout-s)" in caplog.text
    else:
        config = settings(rm_type="remote_rm", rm_url="http://127.0.0.1:9", rm_url_timeout_s=0.3)
        assert using(config, lambda made: made.grade(prompt(), samples("a", "b"))) == [None, None]
        assert "does not answer" in caplog.text


def test_a_permanently_unavailable_reward_model_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group_client, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(module, "MAX_FAILURES_IN_A_ROW", 4)
    with pytest.raises(
        RolloutError, match=r"4 consecutive gradings failed.*is unavailable.*/score answered 503"
    ):
        ask(Server((503, "")), "abcde", timeout_s=3.0)


def test_routes_stay_with_the_driver() -> None:
    """Routes are most of an answer's bytes, so they are not sent to grading processes."""
    routes = RouteColumn(np.zeros((1, 3, 2), dtype=np.uint8))
    (given,) = samples("a")
    given = replace(given, routes=routes)
    config = settings(custom_rm_path=f"{USER}:sees_routes")
    assert using(config, lambda made: made.grade(prompt(), [given])) == [0.0]
    assert given.routes == routes
