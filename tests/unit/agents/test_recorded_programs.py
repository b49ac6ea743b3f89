"""Requests that real programs sent, three turns each: all are answered, as one trajectory.

A request for a title before them is beside the task.
``recorded.jsonl`` holds the bodies in their order, with long texts shortened, names of folders and
ids of sessions replaced, and ``_NAME_`` in the ids of the episode's calls (``python -m
tests.agent_programs --record FILE`` writes such lines).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlpost.extensions.agents import request_fields
from rlpost.extensions.agents.chat_messages import BadRequest
from rlpost.extensions.agents.requests import recall_nothing
from rlpost.extensions.agents.responses_format import responses_request
from rlpost.extensions.agents.trajectory import split_side_requests
from tests.unit.agents.chat_models import real_template, write_model
from tests.unit.agents.sampled import check
from tests.unit.agents.test_gateway import setup

RECORDED = [
    json.loads(line) for line in (Path(__file__).parent / "recorded.jsonl").read_text().splitlines()
]
PROGRAMS = sorted({each["program"] for each in RECORDED})
THOUGHT = "<think>\nx\n</think>\n\n"


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


WEATHER = (
    THOUGHT + call("weather", '{"city": "Paris", "n": 1.0}'),
    THOUGHT
    + "two "
    + call("weather", '{"city": "R\\u00f6m \u5929", "n": 12345678901234567890}')
    + "\n"
    + call("weather", '{"city": "b", "n": 1e3}'),
    THOUGHT + "fine",
)
COMMANDS = (
    THOUGHT + call("exec_command", '{"cmd": "ls"}'),
    THOUGHT + call("close_agent", '{"target": "x"}'),
    THOUGHT + "Done.",
)
SAID = "<think>\nHm.\n</think>\n\nIt is done."


def commands(tool: str, *, title: bool, **more: str) -> tuple[str, ...]:
    """Return a title, two calls with a command, and an answer."""
    calls = (
        f"<think>\nHm.\n</think>\n\nLook:\n{call(tool, json.dumps({**more, 'command': each}))}"
        for each in ("ls", "echo R\u00f6m \u5929; ls -a")
    )
    return (*[SAID] * title, *calls, SAID)


ANSWERS = {
    "codex": COMMANDS,
    "claude_code": commands("Bash", title=False),
    "opencode": commands("bash", title=True, description="a command"),
    "qwen_code": commands(
        "run_shell_command", title=False, description="a command", is_background="false"
    ),
}


ONE_SYSTEM = ("qwen3_5_think", "qwen3_6", "qwen3_8")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    made = {"qwen": write_model(tmp_path_factory.mktemp("qwen"), "qwen")}
    for name in ONE_SYSTEM:
        made[name] = write_model(tmp_path_factory.mktemp(name), "xml", real_template(name))
    return made


@pytest.fixture(scope="module")
def folder(folders: dict[str, str]) -> str:
    return folders["qwen"]


def as_xml(answer: str) -> str:
    """Return an answer as Qwen3.5 writes it, after a prompt that opens the thought."""

    def written(match: re.Match[str]) -> str:
        value = json.loads(match[1])
        parameters = "".join(
            f"<parameter={key}>\n{each}\n</parameter>\n" for key, each in value["arguments"].items()
        )
        function = f"<function={value['name']}>\n{parameters}</function>"
        return f"<tool_call>\n{function}\n</tool_call>"

    calls = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
    return calls.sub(written, answer.removeprefix("<think>\n"))


@pytest.mark.parametrize(
    ("template", "program"),
    [("qwen", program) for program in PROGRAMS]
    # All arguments in these are text, which is the same in both formats of calls.
    + [(name, program) for name in ONE_SYSTEM for program in ("claude_code", "codex", "opencode")],
)
async def test_the_requests_of_a_program_are_one_trajectory(
    folders: dict[str, str], template: str, program: str
) -> None:
    """Also where the template refuses all system messages but the first one.

    Claude Code asks for a title as JSON of a schema. It is refused, and the program goes on.
    """
    answers: Sequence[str] = ANSWERS.get(program, WEATHER)
    if template != "qwen":
        answers = [as_xml(answer) for answer in answers]
    folder = folders[template]
    async with setup(folder, answers) as made, await made.open() as episode:
        made.gateway.policy.longest_request = 100_000
        headers = {"x-api-key": episode.api_key}
        text = ""
        for each in RECORDED:
            if each["program"] != program:
                continue
            body = json.dumps(each["body"]).replace("_NAME_", f"_{episode._name}_")
            url = episode.anthropic_url + each["path"]
            async with made.client.post(url, data=body, headers=headers) as response:
                text = await response.text()
                wants_json = "format" in each["body"].get("output_config", {})
                assert response.status == (400 if wants_json else 200), text
                dropped = response.headers.get("x-rlpost-dropped-tools")
                assert dropped == ("web_search" if program == "codex" else None)
            calls_in_namespace = text.count('"namespace":"multi_agent_v1"') > 0
            assert calls_in_namespace == ('"name":"close_agent","arguments"' in text)
        (task,), side = split_side_requests(episode.trajectories())
        texts = [turn.text for each in (*side, task) for turn in each.turns]
        assert (texts, len(task.turns)) == (list(answers), 3)
        check((*side, task), made.sampled)


@pytest.mark.parametrize(
    ("fields", "given", "is_named"),
    [
        (request_fields.MESSAGES, {"edits": [{"type": "clear_tool_uses_20250919"}]}, True),
        (request_fields.MESSAGES, {"edits": [{"type": "compact_20260112", "keep": 3}]}, True),
        (request_fields.RESPONSES, [{"type": "compaction", "compact_threshold": 9}], True),
        (request_fields.MESSAGES, {"strategy": "truncation"}, True),
        (request_fields.MESSAGES, {"edits": [{"type": "clear_thinking", "keep": "all"}]}, False),
        (request_fields.RESPONSES, [], False),
    ],
)
def test_a_wish_to_shorten_the_conversation_is_named_as_without_effect(
    fields: request_fields.Fields, given: object, is_named: bool
) -> None:
    """LiteLLM's proxy for Claude Code dropped it without a word (Exgentic/exgentic#99)."""
    overridden = fields.check({"context_management": given})
    assert overridden == ("context_management",) * is_named


async def test_an_earlier_answer_is_continued_by_its_id_alone(folder: str) -> None:
    """Its conversation with the tools that the request sends, without its instructions."""
    async with setup(folder, ["Fine.", "Rain.", "Snow."]) as made, await made.open() as episode:
        url, key = f"{episode.base_url}/responses", {"x-api-key": episode.api_key}
        body: dict[str, Any] = {"input": "How is the weather?", "instructions": "Be kind."}
        for number in range(2):
            async with made.client.post(url, json=body, headers=key) as response:
                answer = await response.json()
                assert (response.status, answer["id"]) == (200, f"resp_{episode._name}_{number}"), (
                    answer
                )
            body = {**body, "input": "And now?", "previous_response_id": answer["id"]}
        (trajectory,) = episode.trajectories()
        assert [turn.text for turn in trajectory.turns] == ["Fine.", "Rain."]
        body["instructions"] = "Be brief."
        async with made.client.post(url, json=body, headers=key) as response:
            assert response.status == 200
        earlier = episode.recall(f"{episode._name}_2")
        assert earlier is not None
        roles = [message.role for message in earlier.messages]
        assert roles == ["system", *["user", "assistant"] * 2, "user"]
        assert earlier.messages[0].content == "Be brief."


@pytest.mark.parametrize(
    ("body", "remedy"),
    [
        ({"input": "x", "previous_response_id": "resp_7"}, "send the items"),
        ({"input": "x", "previous_response_id": "resp_" + "9" * 5000}, "send the items"),
        ({"input": [{"type": "item_reference", "id": "rs_7"}]}, "store: false"),
        ({"input": [{"type": "item_reference", "id": "fc"}]}, "store: false"),
        ({"input": [{"type": "item_reference", "id": "other_0"}]}, "store: false"),
    ],
)
def test_an_answer_of_no_episode_is_refused_with_the_remedy(
    body: dict[str, Any], remedy: str
) -> None:
    with pytest.raises(BadRequest, match=remedy) as caught:
        responses_request(body, recall_nothing)
    assert caught.value.status == 400
