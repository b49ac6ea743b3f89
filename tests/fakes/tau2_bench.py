"""The part of tau2-bench 1.0.1 that the adapter uses, for machines without the package.

One domain with one tool and a solo agent, which has to call ``create_task`` and then ``done``.
Requests are those that litellm makes for ``openai/MODEL`` with ``api_base`` and ``api_key``.
"""

from __future__ import annotations

import enum
import json
import sys
import urllib.request
from types import ModuleType, SimpleNamespace
from typing import Any

TASKS = [SimpleNamespace(id="create_task_1"), SimpleNamespace(id="update_task_1")]


class EvaluationType(enum.Enum):
    ENV = "env"
    ALL = "all"


def get_tasks(task_set_name: str, task_split_name: str | None = None) -> list[Any]:
    if task_set_name != "mock":
        raise KeyError(f"Task Set {task_set_name} not found in registry")
    return list(TASKS)


def build_environment(domain: str, *, solo_mode: bool = False) -> Any:
    return SimpleNamespace(domain=domain, solo_mode=solo_mode)


def build_agent(agent_name: str, environment: Any, *, llm: str, llm_args: Any, **more: Any) -> Any:
    assert agent_name == "llm_agent_solo" and more["solo_mode"] and environment.solo_mode
    return LLMSoloAgent(llm, llm_args)


class LLMSoloAgent:
    """As in tau2-bench 1.0.1: it asks for a call, and raises for an answer without one."""

    def __init__(self, llm: str, llm_args: Any) -> None:
        self.llm, self.llm_args = llm, llm_args

    @classmethod
    def check_valid_task(cls, task: Any) -> bool:
        return getattr(task, "ticket", "") is not None

    def generate_next_message(self, message: Any, state: Any) -> tuple[dict[str, Any], Any]:
        reply = _complete(self, state or [{"role": "user", "content": "the ticket"}])
        if not reply.get("tool_calls"):
            raise ValueError("LLMSoloAgent only supports tool calls.")
        return reply, [*state, reply]


class DummyUser:
    pass


class Orchestrator:
    def __init__(
        self, domain: str, agent: Any, user: Any, environment: Any, task: Any, **more: Any
    ) -> None:
        self.agent, self.task, self.max_steps = agent, task, more["max_steps"]


class TextRunConfig:
    """Configuration of conversations with a user's model, which are not faked."""


def build_text_orchestrator(config: TextRunConfig, task: Any, *, seed: int) -> Any:
    raise NotImplementedError("a user's model is not faked")


def run_simulation(orchestrator: Any, *, evaluation_type: EvaluationType) -> Any:
    agent, messages, made = orchestrator.agent, [], []
    for _ in range(orchestrator.max_steps):
        reply, messages = agent.generate_next_message(None, messages)
        calls = [each["function"] for each in reply["tool_calls"]]
        if calls[0]["name"] == "done":
            right = [{"user_id": "user_1", "title": "Important Meeting"}]
            return _run(messages, "agent_stop", float(made == right))
        made.append(json.loads(calls[0]["arguments"]))
    return _run(messages, "max_steps", 0.0)


def _run(messages: list[Any], reason: str, reward: float) -> Any:
    return SimpleNamespace(
        messages=messages, termination_reason=reason, reward_info=SimpleNamespace(reward=reward)
    )


def _complete(agent: Any, messages: list[Any]) -> dict[str, Any]:
    args = dict(agent.llm_args)
    base, key = args.pop("api_base"), args.pop("api_key")
    args.pop("num_retries")
    body = {"model": agent.llm.removeprefix("openai/"), "messages": messages}
    body |= {"tool_choice": "required", **args.pop("extra_body", {}), **args}
    request = urllib.request.Request(
        f"{base}/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]


def install(monkeypatch: Any) -> None:
    """Make ``tau2``, and the submodules that the adapter imports, resolve to this module."""
    this = sys.modules[__name__]
    parents = ("agent", "data_model", "evaluator", "orchestrator", "user")
    for name in ("tau2", *(f"tau2.{each}" for each in parents)):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name in (
        "tau2.agent.llm_agent",
        "tau2.data_model.simulation",
        "tau2.evaluator.evaluator",
        "tau2.orchestrator.orchestrator",
        "tau2.runner",
        "tau2.user.user_simulator",
    ):
        monkeypatch.setitem(sys.modules, name, this)
