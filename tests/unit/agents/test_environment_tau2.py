"""tau2-bench environments: the real package if installed, else ``tests.fakes.tau2_bench``."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from rlpost.errors import ConfigError, DataError, GradingLost
from rlpost.extensions.agents.env_names import parse_env
from rlpost.extensions.agents.environments.export import tasks_of
from rlpost.extensions.agents.environments.of_tau2 import REPLAYED, Tau2Harness
from rlpost.extensions.agents.environments.protocol import Episode, Outcome
from rlpost.extensions.agents.environments.resumption import resumption_of
from rlpost.types import Prompt
from tests.fakes import tau2_bench
from tests.unit.agents.chat_server import ChatServer, serving

SOLO = {"agent": "llm_agent_solo", "evaluation": "env"}


@pytest.fixture(autouse=True)
def _package(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("tau2") is None:
        tau2_bench.install(monkeypatch)


def call(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"tool_calls": [{"id": f"call_{name}", "type": "function", "function": function}]}


def play(*replies: dict[str, Any], key: str = "k1", **metadata: Any) -> Any:
    """Play one task with the given replies of the policy."""
    left = list(replies)
    server = ChatServer({"k1"}, lambda body: left.pop(0))

    async def run() -> Any:
        async with serving(server):
            given = Prompt(0, "text", (1,), metadata=metadata)
            sampling = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 64}
            episode = Episode(server.base_url, key, "policy", given, 0, sampling, 4)
            return await asyncio.to_thread(Tau2Harness("mock", **SOLO).run, episode)

    return asyncio.run(run()), server


MEETING = {"user_id": "user_1", "title": "Important Meeting"}


def test_the_reward_is_that_of_the_domain_and_the_policy_answers_through_the_gateway() -> None:
    found, server = play(call("create_task", **MEETING), call("done"), task="create_task_1")
    assert isinstance(found, Outcome) and found.reward == 1.0
    assert found.info["task"] == "create_task_1" and found.info["stop"] == "agent_stop"
    (_, first), _ = server.asked
    assert (first["model"], first["temperature"], first["max_tokens"]) == ("policy", 0.7, 64)
    assert first["tool_choice"] == "auto", "the gateway refuses an answer under constraints"


def test_an_unsolved_task_has_a_reward_of_zero() -> None:
    other = {**MEETING, "title": "Lunch"}
    found, _ = play(call("create_task", **other), call("done"), task=0)
    assert found.reward == 0.0


def test_an_answer_without_a_call_is_the_policys_and_has_a_reward_of_zero() -> None:
    found, _ = play(call("create_task", **MEETING), {"content": "It is done."}, task=0)
    assert found.reward == 0.0 and "tool calls" in found.info["stop"]


def test_a_refused_key_raises() -> None:
    with pytest.raises(Exception) as caught:
        play(call("done"), key="other", task=0)
    assert not isinstance(caught.value, ConfigError | DataError)


def test_an_episode_not_ended_by_the_agent_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Tau2Harness("mock", **SOLO)
    ended = tau2_bench._run([], "user_error", 0.0)
    monkeypatch.setattr(harness, "_run", lambda *_, **__: ended)
    given = Episode("http://x/v1", "k", "policy", Prompt(0, "t", (1,)), 0, {}, 4)
    with pytest.raises(GradingLost, match="ended by user_error"):
        harness.run(given)


def test_a_task_that_was_not_evaluated_has_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    """tau2 rewards a task without criteria with 1, and an error of its evaluation with 0."""
    harness = Tau2Harness("mock", **SOLO)
    ended = tau2_bench._run([], "agent_stop", 0.0)
    ended.reward_info.info = {"error": "ValueError: replay differs"}
    monkeypatch.setattr(harness, "_run", lambda *_, **__: ended)
    given = Episode("http://x/v1", "k", "policy", Prompt(0, "t", (1,)), 0, {}, 4)
    with pytest.raises(GradingLost, match=r"evaluation of task .* failed: ValueError: replay"):
        harness.run(given)
    monkeypatch.setattr(harness, "tasks", [SimpleNamespace(id="free", evaluation_criteria=None)])
    named = replace(given, prompt=replace(given.prompt, metadata={"task": "free"}))
    with pytest.raises(DataError, match=r"task free of tau2:mock .* has no evaluation criteria"):
        harness.run(named)


def errors_of_others() -> dict[str, ValueError]:
    with pytest.raises(ValidationError) as of_pydantic:
        TypeAdapter(int).validate_python({})
    return {
        "json": json.JSONDecodeError("Expecting value", "", 0),
        "pydantic": of_pydantic.value,
        "unicode": UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        "a library": ValueError("the model's answer has no choices"),
    }


@pytest.mark.parametrize("name", errors_of_others())
def test_an_error_of_the_agents_turn_is_no_reward_but_for_an_answer_without_a_call(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Each is a ValueError, as tau2's own; a damaged HTTP answer is not the policy's fault."""
    error = errors_of_others()[name]

    def fail(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(solo_agent(), "generate_next_message", fail)
    with pytest.raises(type(error)) as caught:
        play(call("done"), task=0)
    assert caught.value is error


def solo_agent() -> Any:
    return importlib.import_module("tau2.agent.llm_agent").LLMSoloAgent


def test_tasks_that_the_agent_without_a_user_refuses_are_neither_exported_nor_played(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def is_valid(task: Any) -> bool:
        return bool(task.id == "update_task_1")

    monkeypatch.setattr(solo_agent(), "check_valid_task", is_valid)
    rows = list(tasks_of(parse_env("tau2:mock"), SOLO))
    harness = Tau2Harness("mock", **SOLO)
    assert [harness.tasks[row["task"]].id for row in rows] == ["update_task_1"]
    assert (
        "skipped create_task_1: tau2's agent llm_agent_solo refuses it" in capsys.readouterr().err
    )
    episode = Episode("http://x/v1", "k", "policy", Prompt(0, "t", (1,)), 0, {}, 4)
    assert harness.task_of(episode).id == "update_task_1"
    monkeypatch.setattr(solo_agent(), "check_valid_task", lambda task: False)
    with pytest.raises(ConfigError, match=r"none of its \d+ tasks can be played"):
        Tau2Harness("mock", **SOLO)


def test_missing_settings_are_reported_before_the_run() -> None:
    with pytest.raises(ConfigError, match=r"who plays the user\? .*\"user_llm\""):
        Tau2Harness("mock")
    with pytest.raises(ConfigError, match="--env tau2:no_domain: "):
        Tau2Harness("no_domain", **SOLO)
    with pytest.raises(DataError, match="'task' in its metadata is 'no task'"):
        play(call("done"), task="no task")


def test_the_same_answers_of_the_policy_replay_a_simulation_without_a_user() -> None:
    assert resumption_of(Tau2Harness("mock", **SOLO)) == "replayed"
    answers = [call("create_task", **MEETING), call("done")]
    rounds = [play(*answers, task="create_task_1") for _ in range(2)]
    first, again = ([body["messages"] for _, body in server.asked] for _, server in rounds)
    assert first == again and len(first) == 2
    assert rounds[0][0] == rounds[1][0]


def test_a_simulation_with_a_user_or_random_ids_begins_again() -> None:
    assert resumption_of(Tau2Harness("mock", user_llm="openai/user")) == "begun again"
    assert "telecom" not in REPLAYED  # a tool draws the id of a new bill
