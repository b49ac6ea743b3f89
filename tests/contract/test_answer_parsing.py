"""rlpost's parsers of tool calls and reasoning, compared with SGLang's on the same answers."""

from __future__ import annotations

import json
import random

import pytest

from rlpost.agents.answer_parsing import parse_answer, split_reasoning
from tests.unit.agents.harness import TOOLS, Writer


@pytest.fixture(scope="module")
def parsers():
    from rlpost.rollout.server import use_stand_ins

    use_stand_ins()
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.glm4_moe_detector import Glm4MoeDetector
    from sglang.srt.function_call.qwen25_detector import Qwen25Detector
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    tools = [Tool.model_validate(tool) for tool in TOOLS]
    detectors = {"qwen": Qwen25Detector(), "glm": Glm4MoeDetector()}

    def theirs(kind, text):
        model_type = {"qwen": "qwen3", "glm": "glm45"}[kind]
        reasoner = ReasoningParser(model_type, stream_reasoning=False)
        # Given the line break before the mark, as GLM-4.5 writes it, SGLang's parser returns the
        # mark itself as the reasoning of an empty thought.
        reasoning, content = reasoner.parse_non_stream(text.lstrip())
        found = detectors[kind].detect_and_parse(content or "", tools)
        calls = [(call.name, json.loads(call.parameters)) for call in found.calls]
        return (reasoning or "").strip(), found.normal_text.strip(), calls

    return theirs


@pytest.mark.parametrize("kind", ["qwen", "glm"])
def test_well_formed_answers_are_parsed_as_sglang_does(parsers, kind):
    writer = Writer(kind, random.Random(0), untidy=0.0)
    num_calls = 0
    for _ in range(300):
        text = writer()
        ours = parse_answer(text, kind, TOOLS)
        calls = [(call.name, json.loads(call.arguments)) for call in ours.calls]
        assert (ours.reasoning.strip(), ours.content.strip(), calls) == parsers(kind, text), text
        num_calls += len(calls)
    assert num_calls > 100


def test_an_unclosed_thought_is_reasoning(parsers):
    text = "<think>\nHm"
    assert split_reasoning(text) == ("Hm", "")
    assert parsers("qwen", text)[:2] == ("Hm", "")
