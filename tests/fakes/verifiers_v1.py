"""The part of ``verifiers.v1`` 0.4.0 that the adapter uses, for machines without the package.

The names, their arguments and their order of calls are those of the package; its runtimes, traces
and retries are left out. ``tests/unit/agents/test_environment_verifiers.py`` runs against the
package where it is installed.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import json
import secrets
import sys
import uuid
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import aiohttp
from aiohttp import web
from pydantic import BaseModel

T, C = TypeVar("T"), TypeVar("C")


class Runtime(BaseModel):
    type: str = "prime"


class HarnessConfig(BaseModel):
    id: str = "bash"


class AgentConfig(BaseModel):
    harness: HarnessConfig | None = None
    runtime: Runtime = Runtime()
    max_turns: int | None = None


class TasksetConfig(BaseModel):
    id: str = ""
    task: Any = None


class SingleAgentEnvConfig(BaseModel):
    id: str = ""
    taskset: TasksetConfig = TasksetConfig()
    agent: AgentConfig = AgentConfig()


class SelectConfig(BaseModel):
    limit: int | None = None


class SamplingConfig(BaseModel):
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None


class EvalClientConfig(BaseModel):
    base_url: str
    api_key_var: str


class TaskData(BaseModel):
    idx: int | None = None
    prompt: Any = None

    @property
    def prompt_text(self) -> str:
        return str(self.prompt)


class Task(Generic[T]):
    def __init__(self, data: Any, config: Any = None) -> None:
        self.data, self.config = data, config

    async def score(self, trace: Any) -> None:
        for name in dir(self):
            method = getattr(self, name)
            if getattr(method, "reward", False):
                value = await method(trace=trace)
                trace.rewards[name] = SimpleNamespace(value=value)


def reward(function: Any) -> Any:
    function.reward = True
    return function


class Taskset(Generic[T, C]):
    bounded = True

    def __init__(self, config: TasksetConfig) -> None:
        self.config, self._limit = config, None

    def select(self, config: SelectConfig) -> Any:
        self._limit = config.limit
        return self

    def __iter__(self) -> Any:
        for number, task in enumerate(itertools.islice(self.load(), self._limit)):
            task.data.idx = number
            yield task


class Harness(Generic[T]):
    EXECUTES_CODE = True

    def __init__(self, config: HarnessConfig) -> None:
        self.config = config


class Bash(Harness[HarnessConfig]):
    pass


@dataclass
class ProgramResult:
    exit_code: int
    stdout: str
    stderr: str


@dataclass
class ModelContext:
    model: str
    client: EvalClientConfig
    sampling: SamplingConfig


@dataclass
class Trace:
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    info: dict[str, Any] = field(default_factory=dict)
    rewards: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    errors: list[Any] = field(default_factory=list)
    stop_condition: str | None = None
    agent: Any = field(default_factory=lambda: SimpleNamespace(trainable=True))

    @property
    def reward(self) -> float:
        return sum(each.value for each in self.rewards.values())


class Env:
    """The single-agent environment, with an interception server that relays to the client."""

    def __init__(self, config: SingleAgentEnvConfig) -> None:
        self.config = config
        self.taskset = _exported(config.taskset.id, Taskset)(config.taskset)
        self._sessions: dict[str, tuple[Trace, ModelContext]] = {}

    @contextlib.asynccontextmanager
    async def serving(self) -> Any:
        owner = asyncio.current_task()
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._relay)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self._endpoint = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        try:
            yield
        finally:
            await runner.cleanup()
            assert asyncio.current_task() is owner

    async def _relay(self, request: web.Request) -> web.Response:
        trace, context = self._sessions[request.headers["Authorization"].removeprefix("Bearer ")]
        body = await request.json() | {"model": context.model}
        body |= context.sampling.model_dump(exclude_none=True)
        headers = {"Authorization": "Bearer EMPTY", "X-Session-ID": trace.id}
        url = f"{context.client.base_url}/chat/completions"
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, json=body, headers=headers) as answer,
        ):
            return web.Response(
                status=answer.status, body=await answer.read(), content_type="application/json"
            )

    async def run_episode(self, task: Any, ctx: ModelContext, *, on_trace: Any = None) -> Any:
        trace, secret = Trace(), secrets.token_hex(8)
        self._sessions[secret] = (trace, ctx)
        on_trace(trace)
        harness = load_harness(
            self.config.agent.harness or default_agent_harness(self.taskset.config.id)
        )
        try:
            await harness.launch(ctx, trace, None, self._endpoint, secret, {}, task.data)
            await task.score(trace)
        except Exception as error:
            trace.errors.append(SimpleNamespace(type=type(error).__name__, message=str(error)))
        return SimpleNamespace(ok=not trace.errors, errors=[], traces=[trace])


def _exported(name: str, base: type) -> Any:
    module = importlib.import_module(name.replace("-", "_"))
    found = [getattr(module, each) for each in module.__all__]
    return next(each for each in found if issubclass(each, base))


def default_agent_harness(taskset_id: str) -> HarnessConfig:
    try:
        _exported(taskset_id, Harness)
    except StopIteration:
        return HarnessConfig(id="bash")
    return HarnessConfig(id=taskset_id)


def load_harness(config: HarnessConfig) -> Harness:
    return (Bash if config.id == "bash" else _exported(config.id, Harness))(config)


def env_config_type(taskset_id: str, env_id: str = "") -> type[SingleAgentEnvConfig]:
    _exported(taskset_id, Taskset)
    return SingleAgentEnvConfig


def resolve_env_config(data: Any) -> SingleAgentEnvConfig:
    return SingleAgentEnvConfig.model_validate(json.loads(json.dumps(data)))


def load_environment(config: SingleAgentEnvConfig) -> Env:
    return Env(config)


def install(monkeypatch: Any) -> None:
    """Make ``import verifiers.v1`` import this module."""
    package = ModuleType("verifiers")
    package.v1 = sys.modules[__name__]
    monkeypatch.setitem(sys.modules, "verifiers", package)
    monkeypatch.setitem(sys.modules, "verifiers.v1", sys.modules[__name__])
