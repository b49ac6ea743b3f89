"""The gateway with client libraries of agents: three turns with a tool, token for token.

The libraries pin versions that the training stack excludes, so they have an environment of their
own. The policy is scripted, in the chat template of Qwen3.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlpost.agents.gateway import OpenEpisode
from tests.unit.agents.chat_models import real_template, write_model
from tests.unit.agents.sampled import check
from tests.unit.agents.test_gateway import Setup, setup

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "tests/contract/client_programs.py"
CLIENTS = ROOT / ".venv-clients/bin/python"
THOUGHT = "<think>\nHm.\n</think>\n\n"


def calls(*cities: str, name: str = "weather", argument: str = "city") -> str:
    """Return an answer with calls; its spelling is not that of the template."""
    written = [json.dumps({"arguments": {argument: city}, "name": name}) for city in cities]
    return THOUGHT + "Look:\n" + "\n".join(f"<tool_call>{one}</tool_call>" for one in written)


LOOP = [calls("Paris"), calls("Röm 天", "Oslo"), THOUGHT + "It is sunny."]
SMOLAGENTS = [*LOOP[:2], calls("It is sunny.", name="final_answer", argument="answer")]
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo It is sunny."
COMMANDS = [
    calls(*commands, name="bash", argument="command")
    for commands in (("echo Paris",), ("echo 天", "echo Oslo"), (SUBMIT,))
]
STREAMED = ("plain", "stream")
"""Modes; mini-swe-agent does not stream."""

# smolagents writes calls and outputs into the text of messages, so each turn is a prompt.
PROGRAMS_OF_CLIENTS = [
    pytest.param(sys.executable, "openai_chat", LOOP, STREAMED, 1, id="openai 2, chat"),
    pytest.param(sys.executable, "openai_responses", LOOP, STREAMED, 1, id="openai 2, responses"),
    pytest.param(CLIENTS, "openai_chat", LOOP, STREAMED, 1, id="openai 3, chat"),
    pytest.param(CLIENTS, "openai_responses", LOOP, STREAMED, 1, id="openai 3, responses"),
    pytest.param(CLIENTS, "anthropic", LOOP, STREAMED, 1, id="anthropic"),
    pytest.param(CLIENTS, "litellm", LOOP, STREAMED, 1, id="litellm"),
    pytest.param(CLIENTS, "langchain", LOOP, STREAMED, 1, id="langchain-openai"),
    pytest.param(CLIENTS, "pydantic_ai", LOOP, STREAMED, 1, id="pydantic-ai"),
    pytest.param(CLIENTS, "pydantic_ai_anthropic", LOOP, STREAMED, 1, id="pydantic-ai, anthropic"),
    pytest.param(CLIENTS, "openai_agents", LOOP, STREAMED, 1, id="openai-agents"),
    pytest.param(CLIENTS, "smolagents", SMOLAGENTS, STREAMED, 3, id="smolagents"),
    pytest.param(CLIENTS, "mini_swe_agent", COMMANDS, ("plain",), 1, id="mini-swe-agent"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("qwen3"), "qwen", real_template("qwen3"))


async def talk(
    made: Setup, python: Path | str, program: str, modes: tuple[str, ...], home: Path
) -> list[OpenEpisode]:
    """Run a program with an episode for each mode; check what it printed."""
    episodes = {mode: await made.open() for mode in modes}
    given = {
        mode: {"base_url": one.base_url, "anthropic_url": one.anthropic_url, "key": one.api_key}
        for mode, one in episodes.items()
    }
    environ = {"PATH": os.environ["PATH"], "HOME": str(home), "LITELLM_LOCAL_MODEL_COST_MAP": "1"}
    process = await asyncio.create_subprocess_exec(
        python,
        PROGRAMS,
        program,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environ,
        cwd=home,
    )
    output, errors = await process.communicate(json.dumps(given).encode())
    assert process.returncode == 0, errors.decode()[-3000:]
    assert json.loads(output.splitlines()[-1]) == dict.fromkeys(modes, "It is sunny.")
    return list(episodes.values())


@pytest.mark.parametrize(("python", "program", "answers", "modes", "count"), PROGRAMS_OF_CLIENTS)
def test_a_loop_of_calls_is_trained_token_for_token(
    folder: str,
    tmp_path: Path,
    python: Path | str,
    program: str,
    answers: list[str],
    modes: tuple[str, ...],
    count: int,
) -> None:
    if not Path(python).exists():
        pytest.skip(f"no {CLIENTS}; tools/install_clients.sh installs it")

    async def running() -> None:
        async with setup(folder, answers * len(modes)) as made:
            episodes = await talk(made, python, program, modes, tmp_path)
            found: list[Any] = [episode.trajectories() for episode in episodes]
            check([each for trajectories in found for each in trajectories], made.sampled)
            causes = [[each.cause for each in trajectories] for trajectories in found]
            assert [len(trajectories) for trajectories in found] == [count] * len(modes), causes
            turns = [sum(len(each.turns) for each in trajectories) for trajectories in found]
            assert turns == [3] * len(modes)

    asyncio.run(asyncio.wait_for(running(), timeout=120))
