"""Answers of a policy in every format of calls: any text is parsed, and templates are recognised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpost.extensions.agents.answer_parsing import (
    PROBE_ANSWER,
    PROBE_TOOLS,
    Format,
    format_of,
    parse_answer,
)
from rlpost.extensions.agents.chat_messages import Message, ToolCall
from rlpost.extensions.agents.chat_template import ChatTemplate
from rlpost.extensions.agents.json_values import dumps
from tests.unit.agents.chat_models import real_template, write_model
from tests.unit.agents.harness import TOOLS

WEATHER = '{"name": "weather", "arguments": {"city": "Paris"}}'
PIECES = st.sampled_from(
    [
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>"),
        *("<arg_value>", "</arg_value>", "<function=weather>", "</function>", "weather", "city"),
        *("<parameter=city>", "</parameter>", "<parameter=days>", "\n", "null", "True", "1e999"),
        *(
            WEATHER,
            '{"name": "weather", "arguments": ',
            "[" * 2000,
            "\\ud83d",
            "NaN",
            "-0.0",
            "9" * 5000,
        ),
    ]
)
TEXTS = st.lists(PIECES | st.text(max_size=8), max_size=12).map("".join)
SCHEMAS = st.recursive(
    st.none() | st.booleans() | st.sampled_from(["string", "integer", "#", "#/properties/city"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "$ref", "anyOf", "allOf", "enum", "properties", "city", "days"]
            ),
            inner,
        )
    ),
    max_leaves=8,
)


def tools_of(parameters: Any) -> Any:
    return [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]


@settings(max_examples=300, deadline=None)
@given(text=TEXTS, parameters=SCHEMAS, opens=st.booleans())
def test_any_text_with_any_tools_is_parsed_into_what_every_client_reads(
    text: str, parameters: Any, opens: bool
) -> None:
    for form in ("qwen", "xml", "glm", "none"):
        parsed = parse_answer(text, form, tools_of(parameters), opens_thinking=opens)
        for call in parsed.calls:
            arguments = json.loads(call.arguments)
            assert isinstance(arguments, dict)
            dumps({"input": arguments})
            again = ToolCall("", call.name, json.dumps(arguments))
            assert again.key == ToolCall("", call.name, call.arguments).key


MARKS = ("<tool_call>", "<arg_key>", "<arg_key>k</arg_key>", "<parameter=a>", "<function=f>", " ")


@pytest.mark.parametrize("form", ["qwen", "xml", "glm"])
@pytest.mark.parametrize("end", ["", "</tool_call>"])
def test_a_mark_that_a_policy_repeats_does_not_hold_the_driver(form: Format, end: str) -> None:
    """A search for the end of each would take minutes, in which no thread runs."""
    for mark in MARKS:
        text = "<tool_call>weather" + mark * 30_000 + end
        assert len(parse_answer(text, form, TOOLS).calls) <= 1


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("qwen2_5", "qwen"),
        ("qwen3", "qwen"),
        ("qwen3_instruct_2507", "qwen"),
        ("qwen3_5_think", "xml"),
        ("qwen3_5_nothink", "xml"),
        ("qwen3_6", "xml"),
        ("qwen3_8", "xml"),
        ("nemotron_3_nano", "xml"),
        ("glm4moe", "glm"),
        ("deepseekv3", "none"),
        ("gptoss", "none"),
        ("llama3_1", "none"),
        ("gemma3", "none"),
    ],
)
def test_the_format_of_calls_is_found_by_reading_a_call_that_the_template_writes(
    name: str, form: str, tmp_path: Path
) -> None:
    template = ChatTemplate(write_model(tmp_path, "qwen", real_template(name)))
    written = template.written_for(PROBE_ANSWER, PROBE_TOOLS)
    assert format_of(written) == form
    if form == "none":
        return
    calls = [{"city": 'Röm "天"', "days": 3}, {"city": "Paris\nTexas"}]
    texts = [json.dumps(arguments) for arguments in calls]
    answer = Message(
        "assistant", "", tool_calls=tuple(ToolCall("a", "weather", one) for one in texts)
    )
    parsed = parse_answer(template.written_for(answer, TOOLS), form, TOOLS)
    assert [json.loads(call.arguments) for call in parsed.calls] == calls


@pytest.mark.parametrize("form", ["xml", "glm"])
@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "123"),  # pydantic's Optional[str]
        ({"type": ["string", "null"]}, "123"),
        ({"enum": ["123", "456"]}, "123"),
        ({"const": "123"}, "123"),
        ({"type": "integer"}, 123),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, 123),
        ({"enum": [123]}, 123),
        ({"type": "object", "properties": {"x": True}}, 123),
        ({"$ref": "#/$defs/Limit"}, 123),  # of MCP and pydantic, vllm-project/vllm pull 37652
        ({"$ref": "#/$defs/a~1b"}, "123"),
        ({"anyOf": [{"$ref": "#/$defs/Limit"}, {"type": "null"}]}, 123),
        ({"allOf": [{"$ref": "#/$defs/a~1b"}]}, "123"),
        ({"$ref": "#/$defs/Many"}, 123),
    ],
)
def test_a_value_without_quotes_is_text_if_its_schema_allows_a_string(
    form: Any, schema: Any, value: Any
) -> None:
    text = "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>123</arg_value>\n</tool_call>"
    if form == "xml":
        value_text = "<parameter=city>\n123\n</parameter>"
        text = f"<tool_call>\n<function=weather>\n{value_text}\n</function>\n</tool_call>"
    many = {"anyOf": [{"$ref": "#/$defs/Many"}] * 1000 + [{"type": "integer"}]}
    defs = {"Limit": {"type": "integer"}, "a/b": {"enum": ["123"]}, "Many": many}
    tools = tools_of({"type": "object", "$defs": defs, "properties": {"city": schema}})
    (call,) = parse_answer(text, form, tools).calls
    assert json.loads(call.arguments) == {"city": value}


def test_valid_calls_beside_an_invalid_one_are_calls() -> None:
    text = f"Both:\n<tool_call>{WEATHER}</tool_call><tool_call>{{bad</tool_call>"
    parsed = parse_answer(text, "qwen", TOOLS)
    assert parsed.content == "Both:\n<tool_call>{bad</tool_call>"
    assert [call.name for call in parsed.calls] == ["weather"]


def test_arguments_may_be_json_text_as_in_openais_messages() -> None:
    text = '<tool_call>{"name": "weather", "arguments": "{\\"city\\": 1}"}</tool_call>'
    (call,) = parse_answer(text, "qwen", TOOLS).calls
    assert call.arguments == '{"city": 1}'


def test_arguments_may_be_named_by_the_word_of_the_schema() -> None:
    text = '<tool_call>{"name": "weather", "parameters": {"city": "Paris"}}</tool_call>'
    (call,) = parse_answer(text, "qwen", TOOLS).calls  # localharness#104: the tool ran with none
    assert call.arguments == '{"city": "Paris"}'
