"""OpenEnv environments: a real server if the package is installed, else a fake one.

The fake is ``tests.fakes.openenv_core``.
"""

from __future__ import annotations

import asyncio
import importlib.util
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rlpost.errors import ConfigError, GradingLost
from rlpost.extensions.agents.environments.of_openenv import OpenEnvEnvironment, url_of
from rlpost.extensions.agents.environments.protocol import Step, Turn
from rlpost.extensions.agents.environments.resumption import resumption_of
from rlpost.types import Prompt
from tests.fakes import openenv_core
from tests.ports import free_port

IS_INSTALLED = importlib.util.find_spec("openenv") is not None
CLOSED: list[int] = []
FLOOD = 17 << 20  # bytes of an answer, beyond what the adapter lets the library hold


def sums(core: Any) -> tuple[Any, Any, Any]:
    """Return an environment that adds up its actions until the seed is reached."""

    class Add(core.Action):
        message: str

    class Total(core.Observation):
        total: int = 0

    class Unscored(Total):
        error: str = "no verdict was written"

    class Sums(core.Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self._total = self._goal = 0

        def reset(self, seed=None, episode_id=None, start=0):
            self._total, self._goal = start, seed
            return Total(total=start)

        def step(self, action, timeout_s=None):
            if action.message == "crash":
                raise OSError("the disk is gone")
            if action.message == "flood":
                return Unscored(error="x" * FLOOD, reward=1.0)
            if action.message == "verify":
                return Unscored(reward=None, done=True)
            self._total += int(action.message)
            done = self._total >= self._goal
            return Total(total=self._total, reward=1.0 if done else -0.1, done=done)

        @property
        def state(self):
            return core.State()

        def close(self):
            CLOSED.append(1)

    return Sums, Add, Total


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    if not IS_INSTALLED:
        openenv_core.install(monkeypatch)
        environment, action, _ = sums(openenv_core)
        monkeypatch.setitem(openenv_core.SERVERS, address, (environment, action))
        yield address
        return
    import uvicorn
    from openenv.core import env_server

    environment, action, observation = sums(env_server)
    app = env_server.create_fastapi_app(environment, action, observation, max_concurrent_envs=4)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    yield address
    server.should_exit = True
    thread.join()


def prompt(prompt_id: int = 7, **metadata: Any) -> Prompt:
    return Prompt(prompt_id, "text", (1,), metadata=metadata)


def turn(text: str) -> Turn:
    return Turn(0, text, (), "stop", 1)


async def play(url: str, *texts: str, given: Prompt | None = None, **arguments: Any) -> list[Any]:
    environment = OpenEnvEnvironment(url, **arguments)
    try:
        said: list[Any] = [await environment.reset(given or prompt())]
        return said + [await environment.step(turn(text)) for text in texts]
    finally:
        await environment.close()


def test_turns_become_actions_and_observations_become_text(url: str) -> None:
    CLOSED.clear()
    first, second, last = asyncio.run(play(url, " 3 ", "4", observation="total"))
    assert first == "\n0\n"
    assert second == Step("\n3\n", reward=-0.1, done=False, tool="action")
    assert (last.text, last.reward, last.done) == ("\n7\n", 1.0, True)  # the seed: the prompt's id
    for _ in range(100):
        if CLOSED:
            break
        time.sleep(0.02)
    assert CLOSED, "the session has ended"


def test_actions_may_be_json_and_reset_may_have_arguments(url: str) -> None:
    given = prompt(reset={"start": 2})
    said = asyncio.run(
        play(url, 'I add <a>{"message": "9"}</a>', given=given, action=None, before="[", after="]")
    )
    assert said[0] == '[{"total": 2}]'
    assert said[1].text == '[{"total": 11}]' and said[1].done


def test_a_thought_is_no_part_of_an_action(url: str) -> None:
    thought = '<think>{"message": "9"} or "3"?'  # NeMo-Gym#2852: a reader that reads the thought
    given = thought + '</think>{"message": "3"}'
    _, none, right = asyncio.run(play(url, thought, given, action=None))
    assert "no JSON object" in none.text and '"total": 3' in right.text
    assert '"total": 3' in asyncio.run(play(url, "<think>4?</think>3"))[1].text


def test_an_invalid_action_is_reported_to_the_model_and_the_session_continues(
    url: str,
) -> None:
    braces = "{" * 400_000  # a regular expression searched for the end of each, for minutes
    _, none, many, wrong, right = asyncio.run(
        play(url, "no object", braces, '{"massage": "3"}', '{"message": "3"}', action=None)
    )
    assert "no JSON object" in none.text and many == none and "not valid" in wrong.text
    assert (none.reward, wrong.reward, wrong.done) == (0.0, 0.0, False)
    assert '"total": 3' in right.text


def test_a_failing_or_unreachable_environment_raises(url: str) -> None:
    with pytest.raises(RuntimeError, match="the disk is gone"):
        asyncio.run(play(url, "crash"))
    with pytest.raises(ConnectionError):
        asyncio.run(play(f"http://127.0.0.1:{free_port()}"))


def test_an_answer_is_bounded_before_it_is_decoded(url: str) -> None:
    """The library's bound is 100 MB, of which brackets become gigabytes in the driver.

    A policy can cause such an answer: its episode is scored, not masked.
    """
    *_, last = asyncio.run(play(url, "3", "flood"))
    assert (last.reward, last.done) == (0.0, True) and "too long" in last.text


def test_an_episode_that_the_server_could_not_score_is_lost_and_never_zero(url: str) -> None:
    with pytest.raises(GradingLost, match="without a reward: no verdict was written"):
        asyncio.run(play(url, "3", "verify"))


def test_a_session_that_broke_off_begins_again_unless_its_server_is_declared_deterministic(
    url: str,
) -> None:
    assert resumption_of(OpenEnvEnvironment(url)) == "begun again"
    assert resumption_of(OpenEnvEnvironment(url, deterministic=True)) == "replayed"
    first = asyncio.run(play(url, "3", "1"))
    assert asyncio.run(play(url, "3", "1")) == first, "this server is"


def test_a_client_of_the_library_cannot_load_the_state_of_a_session(url: str) -> None:
    """The reason for beginning again; it fails once the library can, and the adapter should."""
    client = OpenEnvEnvironment(url)._client_class
    names = [name for name in dir(client) if not name.startswith("_")]
    assert not [name for name in names if any(word in name for word in ("load", "restore", "set_"))]


def test_a_name_is_an_address_or_a_space() -> None:
    assert url_of("http://node7:8000/") == "http://node7:8000"
    assert url_of("openenv/echo_env") == "https://openenv-echo-env.hf.space"
    with pytest.raises(ConfigError, match="neither an address nor a space"):
        url_of("echo")
