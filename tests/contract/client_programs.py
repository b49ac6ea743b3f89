"""Programs that talk to the gateway with a client library: python client_programs.py.

They run in the environment of the clients (``tools/install_clients.sh``), which has no rlpost.
Input: on standard input, for each program to run and each mode (plain, stream) the address and key
of an episode. Output: on standard output, the last text of each. A conversation has three turns: a
call of the tool ``weather``, two calls at once, and a text.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

QUESTION = "How is the weather in Paris, and in Röm 天 and Oslo?"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}


def weather(city: str) -> str:
    """Return the weather of a city.

    Args:
        city: its name
    """
    return f"{city}: sunny"


def outputs(calls: Any) -> list[Any]:
    """Answer calls in OpenAI's format, the last one first, as tasks that end in any order do."""
    return [
        {
            "role": "tool",
            "tool_call_id": call["id"],
            "content": weather(**json.loads(call["function"]["arguments"])),
        }
        for call in reversed(calls)
    ]


def openai_chat(episode: dict[str, str], stream: bool) -> str:
    from openai import OpenAI

    client = OpenAI(base_url=episode["base_url"], api_key=episode["key"], max_retries=0)
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    while True:
        asked: Any = {"model": "policy", "messages": messages, "tools": [TOOL]}
        if stream:
            with client.chat.completions.stream(**asked) as events:
                message = events.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(**asked).choices[0].message
        calls = [call.model_dump() for call in message.tool_calls or []]
        if not calls:
            return message.content or ""
        messages += [message.model_dump(exclude_none=True), *outputs(calls)]


def openai_responses(episode: dict[str, str], stream: bool) -> str:
    from openai import OpenAI

    client = OpenAI(base_url=episode["base_url"], api_key=episode["key"], max_retries=0)
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    tool = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}
    while True:
        asked: Any = {"model": "policy", "input": items, "tools": [tool]}
        if stream:
            with client.responses.stream(**asked) as events:
                response = events.get_final_response()
        else:
            response = client.responses.create(**asked)
        items += [item.to_dict() for item in response.output]
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        for call in reversed(calls):
            text = weather(**json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": text})


def anthropic(episode: dict[str, str], stream: bool) -> str:
    from anthropic import Anthropic

    client = Anthropic(base_url=episode["anthropic_url"], api_key=episode["key"], max_retries=0)
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    tools = [{"name": "weather", "input_schema": SCHEMA}]
    while True:
        asked: Any = {"model": "x", "max_tokens": 500, "messages": messages, "tools": tools}
        if stream:
            with client.messages.stream(**asked) as events:
                message = events.get_final_message()
        else:
            message = client.messages.create(**asked)
        calls = [block for block in message.content if block.type == "tool_use"]
        if not calls:
            return message.content[-1].text
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": weather(**call.input)}
            for call in reversed(calls)
        ]
        messages += [
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": results},
        ]


def litellm(episode: dict[str, str], stream: bool) -> str:
    import litellm as library

    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    while True:
        asked: Any = {"model": "openai/policy", "messages": messages, "tools": [TOOL]}
        asked |= {"api_base": episode["base_url"], "api_key": episode["key"], "num_retries": 0}
        answer = library.completion(**asked, stream=stream)
        if stream:
            answer = library.stream_chunk_builder(list(answer), messages=messages)
        message = answer.choices[0].message
        calls = [call.model_dump() for call in message.tool_calls or []]
        if not calls:
            return message.content
        messages += [message.model_dump(exclude_none=True), *outputs(calls)]


def langchain(episode: dict[str, str], stream: bool) -> str:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    model = ChatOpenAI(
        model="policy",
        base_url=episode["base_url"],
        api_key=episode["key"],
        streaming=stream,
        max_retries=0,
    )
    agent = create_react_agent(model, [tool(weather)])
    return agent.invoke({"messages": [("user", QUESTION)]})["messages"][-1].content


async def _pydantic_ai(model: Any, stream: bool) -> str:
    from pydantic_ai import Agent

    agent = Agent(model, tools=[weather])

    async def read(_: Any, events: Any) -> None:
        async for _ in events:
            pass

    # With a handler of events each request is streamed.
    return (await agent.run(QUESTION, event_stream_handler=read if stream else None)).output


def pydantic_ai(episode: dict[str, str], stream: bool) -> str:
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=episode["base_url"], api_key=episode["key"])
    return asyncio.run(_pydantic_ai(OpenAIChatModel("policy", provider=provider), stream))


def pydantic_ai_anthropic(episode: dict[str, str], stream: bool) -> str:
    from anthropic import AsyncAnthropic
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    client = AsyncAnthropic(base_url=episode["anthropic_url"], api_key=episode["key"])
    provider = AnthropicProvider(anthropic_client=client)
    return asyncio.run(_pydantic_ai(AnthropicModel("policy", provider=provider), stream))


def openai_agents(episode: dict[str, str], stream: bool) -> str:
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)

    async def run() -> str:
        client = AsyncOpenAI(base_url=episode["base_url"], api_key=episode["key"], max_retries=0)
        model = OpenAIChatCompletionsModel(model="policy", openai_client=client)
        agent = Agent(name="agent", model=model, tools=[function_tool(weather)])
        if not stream:
            return (await Runner.run(agent, QUESTION)).final_output
        result = Runner.run_streamed(agent, QUESTION)
        async for _ in result.stream_events():
            pass
        return result.final_output

    return asyncio.run(run())


def smolagents(episode: dict[str, str], stream: bool) -> str:
    from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool

    model = OpenAIModel(
        "policy", api_base=episode["base_url"], api_key=episode["key"], tool_choice="auto"
    )
    agent = ToolCallingAgent(
        [tool(weather)], model, stream_outputs=stream, verbosity_level=LogLevel.OFF, max_steps=3
    )
    return str(agent.run(QUESTION))


def mini_swe_agent(episode: dict[str, str], stream: bool) -> str:
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    options = {"api_base": episode["base_url"], "api_key": episode["key"]}
    model = LitellmModel(
        model_name="openai/policy", model_kwargs=options, cost_tracking="ignore_errors"
    )
    templates = {"system_template": "You run commands.", "instance_template": "{{ task }}"}
    agent = DefaultAgent(model, LocalEnvironment(), **templates)
    return agent.run(QUESTION)["submission"].strip()


def main() -> None:
    """Run each program for each mode."""
    texts: dict[str, dict[str, str]] = {}
    for name, episodes in json.load(sys.stdin).items():
        program = globals()[name]
        texts[name] = {mode: program(one, mode == "stream") for mode, one in episodes.items()}
    print("\n" + json.dumps(texts))  # after what libraries print


if __name__ == "__main__":
    main()
