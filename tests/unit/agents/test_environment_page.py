"""The examples of docs/agents.md work unchanged."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest

from rlpost.algorithm.plugin import load_function
from rlpost.columns import IntColumn
from rlpost.config.load import load
from rlpost.extensions.agents.checks import agent_problems
from rlpost.extensions.agents.env_names import parse_envs
from rlpost.extensions.agents.environments.episodes import EnvironmentSet, Episodes
from rlpost.extensions.agents.environments.export import main as export
from rlpost.extensions.agents.environments.harbor.check import main as check_tasks
from rlpost.extensions.agents.environments.harbor.tasks import read_task
from rlpost.extensions.agents.environments.harness import HarnessRunner
from rlpost.extensions.agents.environments.make import make_environments
from rlpost.extensions.agents.environments.protocol import Step, Turn
from rlpost.extensions.agents.sandbox.protocol import Pool, Sandbox
from rlpost.rollout.response_builder import ResponseBuilder
from rlpost.tasks.tokenizer import PromptTokenizer
from rlpost.types import Prompt, Sample
from tests.unit.agents.chat_models import write_model
from tests.unit.agents.harbor_tasks import write_task
from tests.unit.agents.test_environment_episodes import CODEC, Script, play
from tests.unit.agents.test_gateway import SAMPLING as GATEWAY_SAMPLING
from tests.unit.agents.test_gateway import setup

PAGE = Path(__file__).parents[3] / "docs/agents.md"


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    environments, _, _ = PAGE.read_text().partition("\n## Sandboxes")
    blocks = re.findall(r"```python\n(.*?)```", environments, re.DOTALL)
    assert len(blocks) == 3
    path = tmp_path / "my_env.py"
    path.write_text("\n\n".join(blocks))
    return path


def test_the_environment_in_the_documentation_plays_an_episode(examples: Path) -> None:
    word = f"{examples}:Countdown"
    config = load([], {"env": {"env": [word], "env_args": {"Countdown": {"price": 0.25}}}}).config
    assert agent_problems(config) == []
    environments, _ = make_environments(config)
    given = Prompt(5, "q", CODEC.encode("q"), label="12")
    engine = Script("4!", "8!")
    (sample,), _, (record,) = asyncio.run(
        play(engine, environments._runners["Countdown"].make, given=given, env_reward="turn")
    )
    assert engine.asked == ["q 12:", "q 12:4! 8:"]
    assert sample.extra["reward"] == 0.75
    assert [turn[2] for turn in sample.extra["turn_rewards"]] == [-0.25, 1.0]
    assert record["turns"][0]["tool"] == "countdown"


def test_the_desktop_in_the_documentation_returns_screenshots(examples: Path) -> None:
    """With a sandbox that has the methods of the real ones; contract/test_sandbox_images has one."""
    sandbox = create_autospec(Sandbox, instance=True)
    sandbox.read.return_value = b"a screenshot"
    desktop = load_function(f"{examples}:Desktop", key="--env")()
    desktop.sandboxes = create_autospec(Pool, instance=True)
    desktop.sandboxes.acquire.return_value = sandbox

    async def played() -> Step:
        assert await desktop.reset(Prompt(0, "", ())) == [b"a screenshot", "Your move: "]
        step = await desktop.step(Turn(0, "click 1", IntColumn(()), "stop", None))
        await desktop.close()
        return step

    step = asyncio.run(played())
    assert step.text == [b"a screenshot", "Your move: "] and step.tool == "mouse" and not step.done
    assert [call.args[0] for call in sandbox.run.await_args_list][1] == "xdotool click 1"
    sandbox.close.assert_awaited_once()


def test_the_harness_in_the_documentation_plays_an_episode_with_openais_client(
    examples: Path, tmp_path: Path
) -> None:
    """End to end: --env, client, gateway and engine; the sample has the sampled tokens."""
    word, folder = f"{examples}:Quiz", write_model(tmp_path / "model", "qwen")
    config = load([], {"env": {"env": [word]}}).config
    assert agent_problems(config) == []
    make_harness = load_function(word, key="--env")
    question = Prompt(0, "How many legs has a spider?", (), label="eight")

    async def played(answer: str) -> tuple[Sample, list[Any]]:
        async with setup(folder, [answer]) as made:
            runner = HarnessRunner(word, make_harness(), made.gateway, 4)
            every = EnvironmentSet(parse_envs([word]), {"Quiz": runner}, config.env)
            codec = PromptTokenizer(folder, apply_chat_template=False, template_kwargs={})
            builder = ResponseBuilder(made.connection, question, GATEWAY_SAMPLING, codec=codec)
            (sample,) = await Episodes(every, seed=1)(builder, question, GATEWAY_SAMPLING)
            tokens = [made.sampled.tokens[one].token_id for one in sample.rollout_logprobs]
            return sample, tokens

    for answer, reward in (("it has eight legs", 1.0), ("it has six legs", 0.0)):
        sample, tokens = asyncio.run(asyncio.wait_for(played(answer), 60))
        assert sample.extra["reward"] == reward and sample.text == answer
        assert tokens == list(sample.response_ids)


def test_the_commands_for_tasks_of_harbor_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    section = PAGE.read_text().partition("\n## Harbor tasks")[2].partition("\n## Sandboxes")[0]
    images = tmp_path / "images"
    section = section.replace("/shared/images", str(images))
    blocks = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    check, write_prompts, submit = map(shlex.split, blocks)
    monkeypatch.chdir(tmp_path)
    write_task(tmp_path / "tasks")
    images.mkdir()
    (images / f"{read_task(tmp_path / 'tasks', 'count', {}).root.image}.sqsh").touch()
    assert check[:3] == ["python", "-m", check_tasks.__module__]
    assert check_tasks(check[3:]) == 0
    assert capsys.readouterr().out == "1 of 1 tasks run\n"
    assert write_prompts[:3] == ["python", "-m", export.__module__]
    assert export(write_prompts[3:]) == 0
    given = dict(zip(submit[3::2], submit[4::2], strict=True))
    (row,) = map(json.loads, (tmp_path / given["--prompt-data"]).read_text().splitlines())
    arguments = json.loads(given["--env-args"])
    assert row["env"] in arguments and given["--input-key"] in row
    config = load([], {"env": {"env": [given["--env"]], "env_args": arguments}}).config
    assert agent_problems(config) == []
    environments, _ = make_environments(config, tmp_path)
    assert environments.labels == (row["env"],)
