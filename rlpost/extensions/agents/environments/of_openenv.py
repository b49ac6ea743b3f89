"""The adapter for environments of OpenEnv (openenv-core 0.3), which are servers.

    --env openenv:http://HOST:PORT      a running server
    --env openenv:OWNER/NAME            the Hugging Face space of that name

One session of the server is one episode. A turn of the model becomes an action, a JSON object; an
observation becomes text, as the arguments (--env-args) of ``OpenEnvEnvironment`` specify. A reward
that a server computes from files that the model may write can be manipulated by the model (OpenEnv
#1199).

A session is state of the server, and its interface (reset, step, state, close) cannot load one: an
interrupted episode begins again. A server that always answers the same seed and actions alike can
be declared so, ``deterministic`` in --env-args; then its episodes are replayed in a new session.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlpost.errors import ConfigError, GradingLost
from rlpost.extensions.agents.environments.protocol import Step, Turn
from rlpost.types import Prompt

INSTALL = "pip install 'rlpost[openenv]'"
MAX_MESSAGE_MB = 16.0
"""Of one answer of a server, decompressed: it is bounded before it is decoded. The library's 100 MB
of brackets are gigabytes of Python's objects. Text of this size exceeds each context."""
_INVALID = ("VALIDATION_ERROR", "INVALID_JSON")
"""Codes of a server for an action that it cannot read: the model's mistake."""
_TOO_BIG = 1009
"""Status of a connection that is closed because a message exceeds MAX_MESSAGE_MB (RFC 6455, 7.4.1)."""


class OpenEnvEnvironment:
    """One session."""

    def __init__(
        self,
        target: str,
        *,
        action: str | None = "message",
        observation: str | None = None,
        before: str = "\n",
        after: str = "\n",
        reset: Mapping[str, object] | None = None,
        stop: Sequence[str] = (),
        timeout_s: float = 60.0,
        deterministic: bool = False,
    ) -> None:
        """
        Args:
            action: the field of an action that takes the text of a turn. None: the turn has a JSON
                object, which is the action.
            observation: the field of an observation to show; None for all of it as JSON.
            before, after: text around an observation, such as the marks of a chat template's turns.
            reset: arguments of the server's ``reset``, besides those in a prompt's metadata under
                ``reset``. ``seed`` is the prompt's id unless given, so that the answers of a group
                begin alike.
            stop: strings that end a turn.
            timeout_s: of one answer of the server.
            deterministic: the server's answers depend on the arguments of ``reset`` and on the
                actions alone.

        Raises ConfigError if openenv-core is not installed.
        """
        try:
            from openenv.core import GenericEnvClient
        except ImportError as error:
            raise ConfigError(f"--env openenv:{target}: {error}; {INSTALL}") from error
        self._client_class, self._url = GenericEnvClient, url_of(target)
        self._action, self._observation = action, observation
        self._before, self._after = before, after
        self._reset, self._timeout_s = dict(reset or {}), timeout_s
        self.stop, self.deterministic = tuple(stop), deterministic
        self._client: Any = None

    async def reset(self, prompt: Prompt) -> str:
        """Open a session; return its first observation. Raises ConnectionError."""
        self._client = self._client_class(
            base_url=self._url,
            connect_timeout_s=self._timeout_s,
            message_timeout_s=self._timeout_s,
            max_message_size_mb=MAX_MESSAGE_MB,
            mode="simulation",
        )
        await self._client.connect()
        given = {"seed": prompt.prompt_id} | self._reset
        own = prompt.metadata.get("reset")
        result = await self._client.reset(**given, **(own if isinstance(own, Mapping) else {}))
        return self._shown(result.observation)

    async def step(self, turn: Turn) -> Step:
        """Send an action.

        Raises RuntimeError for an error of the environment, ConnectionError, GradingLost if the
        server could not score the episode: without a reward, and with an error.
        """
        action = self._action_of(turn.answer)
        if action is None:
            return Step(self._around("The action is no JSON object."), tool="action")
        try:
            result = await self._client.step(action)
        except RuntimeError as error:  # the client raises it for any error that a server sends
            if not any(code in str(error) for code in _INVALID):
                raise
            return Step(self._around(f"The action is not valid: {error}"), tool="action")
        except Exception as error:
            close_frame = getattr(error, "sent", None)  # of websockets' ConnectionClosed
            if getattr(close_frame, "code", None) != _TOO_BIG:
                raise
            # A policy can cause it, by what it lets its code print, so the episode is scored.
            return Step(self._around("The output is too long."), done=True, tool="action")
        seen = result.observation
        failure = seen.get("error") if isinstance(seen, Mapping) else None
        if result.done and result.reward is None and failure:
            raise GradingLost(f"openenv: the server ended the episode without a reward: {failure}")
        return Step(
            self._shown(result.observation),
            reward=result.reward or 0.0,  # checked as that of any environment
            done=bool(result.done),
            tool="action",
        )

    async def close(self) -> None:
        """End the session."""
        if self._client is not None:
            await self._client.close()

    def _action_of(self, text: str) -> dict[str, object] | None:
        if self._action is not None:
            return {self._action: text.strip()}
        # A regular expression would search for the end once for each brace that a policy repeats.
        start, end = text.find("{"), text.rfind("}")
        try:
            action = json.loads(text[start : end + 1]) if 0 <= start < end else None
        except (ValueError, RecursionError):
            return None
        return action if isinstance(action, dict) else None

    def _shown(self, observation: object) -> str:
        if self._observation is not None and isinstance(observation, Mapping):
            observation = observation.get(self._observation, "")
        text = observation if isinstance(observation, str) else json.dumps(observation)
        return self._around(text)

    def _around(self, text: str) -> str:
        return f"{self._before}{text}{self._after}"


def url_of(target: str) -> str:
    """Return the address of a server or of a space.

    >>> url_of("openenv/echo_env")
    'https://openenv-echo-env.hf.space'
    """
    if "://" in target:
        return target.rstrip("/")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", target):
        raise ConfigError(
            f"--env openenv:{target}: neither an address nor a space; write openenv:http://HOST:PORT or "
            "openenv:OWNER/NAME"
        )
    return f"https://{re.sub(r'[/_.]', '-', target).lower()}.hf.space"
