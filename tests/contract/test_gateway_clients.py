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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlpost.extensions.agents.gateway import OpenEpisode
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


@dataclass(frozen=True)
class Conversation:
    """What the policy answers to a program in each mode, and the number of trajectories."""

    answers: Sequence[str] = tuple(LOOP)
    modes: Sequence[str] = STREAMED
    num_trajectories: int = 1


CONVERSATIONS = {
    # smolagents writes calls and outputs into the text of messages, so each turn is a prompt.
    "smolagents": Conversation(SMOLAGENTS, num_trajectories=3),
    "mini_swe_agent": Conversation(COMMANDS, ("plain",)),
}
"""Those that differ from the default."""
OPENAI = ("openai_chat", "openai_responses")
ANTHROPIC = ("anthropic", "pydantic_ai", "pydantic_ai_anthropic")
CLIENT_PROCESSES = [
    pytest.param(sys.executable, OPENAI, id="openai 2"),
    pytest.param(CLIENTS, OPENAI, id="openai 3"),
    pytest.param(CLIENTS, ANTHROPIC, id="anthropic, pydantic-ai"),
    pytest.param(CLIENTS, ("litellm", "mini_swe_agent"), id="litellm, mini-swe-agent"),
    pytest.param(CLIENTS, ("langchain",), id="langchain-openai"),
    pytest.param(CLIENTS, ("openai_agents",), id="openai-agents"),
    pytest.param(CLIENTS, ("smolagents",), id="smolagents"),
]
"""Programs that import the same library share a process: imports take most of the time."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("qwen3"), "qwen", real_template("qwen3"))


async def talk(
    made: Setup, python: Path | str, conversations: Mapping[str, Conversation], home: Path
) -> list[tuple[Conversation, OpenEpisode]]:
    """Run programs with an episode for each mode; check what they printed."""
    episodes = {
        (program, mode): await made.open()
        for program, conversation in conversations.items()
        for mode in conversation.modes
    }
    given: dict[str, dict[str, dict[str, str]]] = {program: {} for program in conversations}
    for (program, mode), one in episodes.items():
        given[program][mode] = {
            "base_url": one.base_url,
            "anthropic_url": one.anthropic_url,
            "key": one.api_key,
        }
    environ = {"PATH": os.environ["PATH"], "HOME": str(home), "LITELLM_LOCAL_MODEL_COST_MAP": "1"}
    process = await asyncio.create_subprocess_exec(
        python,
        PROGRAMS,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environ,
        cwd=home,
    )
    output, errors = await process.communicate(json.dumps(given).encode())
    assert process.returncode == 0, errors.decode()[-3000:]
    assert json.loads(output.splitlines()[-1]) == {
        program: dict.fromkeys(conversation.modes, "It is sunny.")
        for program, conversation in conversations.items()
    }
    return [(conversations[program], one) for (program, _), one in episodes.items()]


@pytest.mark.parametrize(("python", "programs"), CLIENT_PROCESSES)
async def test_a_loop_of_calls_is_trained_token_for_token(
    folder: str, tmp_path: Path, python: Path | str, programs: tuple[str, ...]
) -> None:
    if not Path(python).exists():
        pytest.skip(f"no {CLIENTS}; tools/install_clients.sh installs it")
    conversations = {name: CONVERSATIONS.get(name, Conversation()) for name in programs}
    answers = [
        answer
        for conversation in conversations.values()
        for _ in conversation.modes
        for answer in conversation.answers
    ]
    async with asyncio.timeout(120):
        async with setup(folder, answers) as made:
            talks = await talk(made, python, conversations, tmp_path)
            found: list[Any] = [episode.trajectories() for _, episode in talks]
            check([each for trajectories in found for each in trajectories], made.sampled)
            causes = [[each.cause for each in trajectories] for trajectories in found]
            counts = [conversation.num_trajectories for conversation, _ in talks]
            assert [len(trajectories) for trajectories in found] == counts, causes
            turns = [sum(len(each.turns) for each in trajectories) for trajectories in found]
            assert turns == [3] * len(talks)
