"""rlpost's parsers of tool calls and reasoning, compared with SGLang's on the same answers."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from rlpost.extensions.agents.answer_parsing import parse_answer, split_reasoning
from tests.contract.forked.forked_sglang import ForkedSglang
from tests.unit.agents.harness import TOOLS, Writer

UNCLOSED = "<think>\nHm"
KINDS = ("qwen", "glm")
OTHER_SPELLINGS = {
    "qwen": [
        '<tool_call>\n{"name": "weather", "parameters": {"city": "Paris"}}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "parameters": {}, "arguments": {"city": "a"}}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "parameters": {"days": 1}, "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "weather"}\n</tool_call>',
    ],
    "glm": [],
}
"""Of calls, beside the one that chat templates show."""

Parsed = tuple[str, str, list[tuple[str, Any]]]
"""The reasoning, the content, and the name and arguments of each call."""


def well_formed(kind: str) -> list[str]:
    """Return 300 answers, and those with other spellings."""
    writer = Writer(kind, random.Random(0), untidy=0.0)
    return [*OTHER_SPELLINGS[kind], *(writer() for _ in range(300))]


def parsed_by_sglang(answers: dict[str, list[str]]) -> dict[str, list[Parsed]]:
    """Return what SGLang reads in the answers of each kind of model."""
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.glm4_moe_detector import Glm4MoeDetector
    from sglang.srt.function_call.qwen25_detector import Qwen25Detector
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    tools = [Tool.model_validate(tool) for tool in TOOLS]
    detectors = {"qwen": Qwen25Detector(), "glm": Glm4MoeDetector()}

    def parsed(kind: str, text: str) -> Parsed:
        model_type = {"qwen": "qwen3", "glm": "glm45"}[kind]
        reasoner = ReasoningParser(model_type, stream_reasoning=False)
        # Given the line break before the mark, as GLM-4.5 writes it, SGLang's parser returns the
        # mark itself as the reasoning of an empty thought.
        reasoning, content = reasoner.parse_non_stream(text.lstrip())
        found = detectors[kind].detect_and_parse(content or "", tools)
        calls = [(call.name, json.loads(call.parameters)) for call in found.calls]
        return (reasoning or "").strip(), found.normal_text.strip(), calls

    return {kind: [parsed(kind, text) for text in texts] for kind, texts in answers.items()}


@pytest.fixture(scope="module")
def theirs(forked: ForkedSglang) -> dict[str, list[Parsed]]:
    """What SGLang reads in the unclosed thought, and in the well-formed answers of each kind."""
    answers = {kind: [UNCLOSED, *well_formed(kind)] for kind in KINDS}
    return forked.call(parsed_by_sglang, answers)


@pytest.mark.parametrize("kind", KINDS)
def test_well_formed_answers_are_parsed_as_sglang_does(theirs, kind):
    num_calls = 0
    for text, expected in zip(well_formed(kind), theirs[kind][1:], strict=True):
        ours = parse_answer(text, kind, TOOLS)
        calls = [(call.name, json.loads(call.arguments)) for call in ours.calls]
        assert (ours.reasoning.strip(), ours.content.strip(), calls) == expected, text
        num_calls += len(calls)
    assert num_calls > 100


def test_an_unclosed_thought_is_reasoning(theirs):
    assert split_reasoning(UNCLOSED) == ("Hm", "")
    assert theirs["qwen"][0][:2] == ("Hm", "")
