"""The part of ``openenv.core`` 0.3.0 that the adapter uses, for machines without the package.

``GenericEnvClient`` has the arguments, results and errors of the package's; the server behind it is
an object of this process instead of a WebSocket.
"""

from __future__ import annotations

import inspect
import json
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

SERVERS: dict[str, tuple[Any, type[BaseModel]]] = {}
"""Classes of the environment and of its actions, by address."""


class Action(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Observation(BaseModel):
    model_config = ConfigDict(extra="forbid")
    done: bool = False
    reward: float | None = None


class Environment:
    pass


class State(BaseModel):
    pass


@dataclass
class StepResult:
    observation: dict[str, Any]
    reward: float | None
    done: bool


class ConnectionClosedError(Exception):
    """As that of websockets, which the package connects with: ``sent`` is a frame or None."""

    def __init__(self, sent: SimpleNamespace) -> None:
        super().__init__(f"sent {sent.code} ({sent.reason}); no close frame received")
        self.sent = sent


class GenericEnvClient:
    def __init__(
        self,
        base_url: str,
        connect_timeout_s: float = 10.0,
        message_timeout_s: float = 60.0,
        max_message_size_mb: float = 100.0,
        mode: str | None = None,
    ) -> None:
        self._url, self._env = base_url, None
        self._most_bytes = max_message_size_mb * 2**20

    async def connect(self) -> Any:
        if self._url not in SERVERS:
            raise ConnectionError(f"Failed to connect to {self._url}: refused")
        self._env = SERVERS[self._url][0]()
        return self

    async def reset(self, **kwargs: Any) -> StepResult:
        known = inspect.signature(self._env.reset).parameters
        return self._told(
            lambda: self._env.reset(**{key: kwargs[key] for key in kwargs if key in known})
        )

    async def step(self, action: dict[str, Any]) -> StepResult:
        return self._told(lambda: self._env.step(SERVERS[self._url][1](**action)))

    async def close(self) -> None:
        if self._env is not None:
            self._env.close()

    def _told(self, act: Any) -> StepResult:
        try:
            observation = act()
        except ValidationError as error:
            text = "Server error: Invalid message (code: VALIDATION_ERROR)"
            raise RuntimeError(text) from error
        except Exception as error:
            raise RuntimeError(f"Server error: {error} (code: EXECUTION_ERROR)") from error
        shown = observation.model_dump(exclude={"done", "reward"})
        if len(json.dumps(shown)) > self._most_bytes:  # websockets ends the connection
            raise ConnectionClosedError(SimpleNamespace(code=1009, reason="message too big"))
        return StepResult(shown, observation.reward, observation.done)


def install(monkeypatch: Any) -> None:
    """Make ``from openenv.core import GenericEnvClient`` import this module's."""
    package = ModuleType("openenv")
    package.core = sys.modules[__name__]
    monkeypatch.setitem(sys.modules, "openenv", package)
    monkeypatch.setitem(sys.modules, "openenv.core", sys.modules[__name__])
