"""verifiers environments: the real package if installed, else ``tests.fakes.verifiers_v1``."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlpost.errors import ConfigError, DataError, GradingLost
from rlpost.extensions.agents.env_names import parse_envs
from rlpost.extensions.agents.env_table import EnvConfig
from rlpost.extensions.agents.environments.episodes import EnvironmentSet, Episodes
from rlpost.extensions.agents.environments.export import main
from rlpost.extensions.agents.environments.harness import HarnessRunner
from rlpost.extensions.agents.environments.of_verifiers import (
    VerifiersHarness,
    outcome,
    refuse_untrained,
)
from rlpost.extensions.agents.environments.protocol import Episode, Outcome
from rlpost.extensions.agents.environments.resumption import resumption_of
from rlpost.rollout.response_builder import ResponseBuilder
from rlpost.tasks.tokenizer import PromptTokenizer
from rlpost.types import Prompt
from tests.fakes import verifiers_v1
from tests.unit.agents.chat_models import write_model
from tests.unit.agents.chat_server import ChatServer, serving
from tests.unit.agents.test_gateway import SAMPLING, setup

NAME = "vf_addition"


@pytest.fixture(autouse=True)
def _package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    if importlib.util.find_spec("verifiers") is None:
        verifiers_v1.install(monkeypatch)


def episode(server: ChatServer, key: str, prompt_id: int = 0, **metadata: Any) -> Episode:
    prompt = Prompt(prompt_id, "text", (1, 2), metadata=metadata)
    sampling = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 8}
    return Episode(server.base_url, key, "policy", prompt, 0, sampling, 4)


async def play(*given: Any, reply: str = "12", keys: tuple[str, ...] = ("k1",)) -> Any:
    """Play episodes concurrently; ``given`` are pairs of (key, arguments of ``episode``)."""
    server = ChatServer(set(keys), lambda body: {"content": reply})
    async with serving(server):
        harness = VerifiersHarness(NAME, max_turns=4)
        await harness.start()
        try:
            work = [harness.run(episode(server, key, **metadata)) for key, metadata in given]
            return await asyncio.gather(*work, return_exceptions=True), server
        finally:
            await harness.close()


def test_the_reward_of_an_environment_is_that_of_its_task() -> None:
    (right, wrong), server = asyncio.run(play(("k1", {"task": 0}), ("k1", {"task": 1})))
    assert isinstance(right, Outcome) and isinstance(wrong, Outcome)
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    assert right.info["rewards"] == {"is_right": 1.0}
    asked = [body["messages"][0]["content"] for _, body in server.asked]
    assert sorted(asked) == ["Q:01+01=", "Q:07+05="]
    body = server.asked[0][1]
    assert (body["model"], body["temperature"], body["top_p"]) == ("policy", 0.7, 0.9)


def test_each_episode_uses_its_own_key() -> None:
    _, server = asyncio.run(
        play(("k1", {"task": 0}), ("k2", {"task": 1}), reply="2", keys=("k1", "k2"))
    )
    by_key = {key: body["messages"][0]["content"] for key, body in server.asked}
    assert by_key == {"k1": "Q:07+05=", "k2": "Q:01+01="}


def test_an_episode_that_fails_is_lost_and_never_zero() -> None:
    (refused, broken), _ = asyncio.run(play(("other", {"task": 0}), ("k1", {"task": 2})))
    assert isinstance(refused, GradingLost), refused
    assert isinstance(broken, GradingLost) and "the grader broke" in str(broken)


def test_a_prompt_without_a_task_gets_one_by_its_id_and_a_wrong_task_is_reported() -> None:
    (by_id, wrong), server = asyncio.run(play(("k1", {"prompt_id": 4}), ("k1", {"task": 3})))
    assert isinstance(by_id, Outcome)
    assert server.asked[0][1]["messages"][0]["content"] == "Q:01+01="  # 4 modulo 3
    assert isinstance(wrong, DataError) and "the tasks 0 to 2" in str(wrong)


def test_a_model_may_not_run_commands_on_the_node_of_the_driver() -> None:
    bash = {"agent": {"harness": {"id": "bash"}}}
    with pytest.raises(ConfigError, match="lets the model run commands") as caught:
        VerifiersHarness(NAME, config=bash)
    assert '"agent": {"runtime": {"type": "apptainer"}}' in str(caught.value)
    VerifiersHarness(NAME, config=bash, allow_local_commands=True)


def test_an_environment_that_is_not_installed_is_reported_before_the_run() -> None:
    with pytest.raises(ConfigError, match="--env verifiers:not_there: ModuleNotFoundError"):
        VerifiersHarness("not_there")


def test_the_tasks_of_an_environment_become_a_prompt_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tasks.jsonl"
    assert main([f"add=verifiers:{NAME}", "--out", str(path)]) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["task"] for row in rows] == [0, 1, 2]
    assert rows[0] == {"prompt": "Q:07+05=", "env": "add", "task": 0}
    assert main(["rlpost.extensions.agents.examples.guess:Guess", "--out", str(path)]) == 2
    assert "it has no tasks to export" in capsys.readouterr().err


def test_an_episode_of_verifiers_trains_the_tokens_that_the_engine_sampled(tmp_path: Path) -> None:
    """End to end: taskset, harness, interception, relay, gateway and engine."""
    folder = write_model(tmp_path, "qwen")
    prompt = Prompt(0, "Q:07+05=", (), metadata={"task": 0})

    async def played() -> Any:
        async with setup(folder, ["12"]) as made:
            runner = HarnessRunner("verifiers:x", VerifiersHarness(NAME), made.gateway, 4)
            config = EnvConfig(env=("verifiers:x",))
            environments = EnvironmentSet(parse_envs(config.env), {"verifiers-x": runner}, config)
            codec = PromptTokenizer(folder, apply_chat_template=False, template_kwargs={})
            builder = ResponseBuilder(made.connection, prompt, SAMPLING, codec=codec)
            try:
                return await Episodes(environments, seed=1)(builder, prompt, SAMPLING), made.sampled
            finally:
                await environments.close()

    (sample,), sampled = asyncio.run(asyncio.wait_for(played(), 60))
    assert sample.extra == {"env": "verifiers-x", "reward": 1.0, "num_turns": 1}
    assert sample.text == "12"
    tokens = [sampled.tokens[logprob].token_id for logprob in sample.rollout_logprobs]
    assert tokens == list(sample.response_ids)


def test_a_judge_that_asks_the_policy_ends_the_run() -> None:
    """The judge's tokens would be trained as those of the policy."""
    judge = SimpleNamespace(id="t1", agent=SimpleNamespace(trainable=False, name="judge"))
    finished = SimpleNamespace(traces=[judge])
    refuse_untrained(NAME, finished, {"t2"})
    with pytest.raises(ConfigError, match=r'the agent judge is not trained.*"client"'):
        refuse_untrained(NAME, finished, {"t1"})


@pytest.mark.parametrize(
    ("rewards", "info", "told"),
    [
        ({"nemo_gym": 0.0}, {"nemo_gym": {"_ng_failure_class": "judge_failed"}}, "judge_failed"),
        ({"is_right": 1.0, "judge": None}, {}, "no reward was computed: judge"),
        ({}, {}, "no reward was computed: none exists"),
    ],
)
def test_a_reward_that_was_not_computed_is_lost_and_never_zero(
    rewards: dict[str, float | None], info: dict[str, Any], told: str
) -> None:
    values = {
        name: None if value is None else SimpleNamespace(value=value)
        for name, value in rewards.items()
    }
    agent = SimpleNamespace(trainable=True)
    trace = SimpleNamespace(agent=agent, info=info, rewards=values, reward=0.0)
    with pytest.raises(GradingLost, match=told):
        outcome(SimpleNamespace(ok=True, traces=[trace]))


def test_an_interrupted_episode_begins_again_since_the_library_cannot_continue_one() -> None:
    harness = VerifiersHarness(NAME, max_turns=4)
    assert resumption_of(harness) == "begun again"
    assert not [name for name in dir(harness._env) if "resume" in name or "restore" in name]
