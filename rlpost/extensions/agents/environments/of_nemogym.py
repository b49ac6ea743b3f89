"""The adapter for resources servers of NeMo-Gym, which hold tools and the verifier of tasks.

    --env nemogym:http://HOST:PORT      a running resources server

An episode does what NeMo-Gym's ``simple_agent`` does: POST /seed_session, answers of the policy in
OpenAI's Responses format, POST /TOOL for each call, POST /verify with all items, whose ``reward`` is
that of the episode. NeMo-Gym's own model and agent servers are not needed. Source:
NeMo-Gym 07d6b0d, responses_api_agents/simple_agent/app.py.

The row of a prompt is its metadata: ``responses_create_params`` and whatever the server's verifier
reads. ``rlpost.extensions.agents.environments.export`` adds to the rows of a file what a prompt file needs. A
session is state of the server, so an interrupted episode begins again.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp

from rlpost.errors import ConfigError, DataError, GradingLost
from rlpost.extensions.agents.chat_messages import BadRequest
from rlpost.extensions.agents.environments.protocol import Episode, Outcome
from rlpost.extensions.agents.responses_format import responses_request

PARAMETERS = "responses_create_params"
TIMEOUT_S = 120.0
MAX_OUTPUT = 16 << 20
"""Bytes of an answer of the server. A policy may bring a tool to write any number of them; an output
of this size exceeds each context, so the episode is scored with --env-limit-reward.
"""
_COPIED = ("instructions", "tools", "tool_choice", "text")
"""What a request takes from the row; --rollout-temperature and its like hold for the rest.

``parallel_tool_calls`` is left out: how many calls an answer has is the policy's choice.
"""
_RECORDED = ("reward_components", "failure_kind", "failure_reason")
"""Of a verdict. A failure that has no ``mask_sample`` is a valid score."""


class NemoGymHarness:
    """All episodes with one resources server."""

    deterministic = False

    def __init__(
        self,
        target: str,
        *,
        max_turns: int = 16,
        timeout_s: float = TIMEOUT_S,
        data: str | None = None,
    ) -> None:
        """
        Args:
            target: address of the server.
            max_turns: answers of the policy.
            timeout_s: of one answer of the server.
            data: file with the tasks, for ``rows_of`` alone.

        Raises ConfigError.
        """
        del data
        self._url = url_of(target)
        self._max_turns = max_turns
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def run(self, episode: Episode) -> Outcome:
        """Run a task.

        Raises:
            DataError: the prompt has no ``responses_create_params``.
            GradingLost: the server could not score the answer, and says so beside a reward of 0.
            aiohttp.ClientError: a server refuses a request, with its reason, or is gone.
        """
        row = dict(episode.prompt.metadata)
        parameters = row.get(PARAMETERS)
        if not isinstance(parameters, Mapping) or "input" not in parameters:
            raise DataError(
                f"prompt {episode.prompt.prompt_id}: its metadata has no {PARAMETERS} with an input; a row of "
                "NeMo-Gym has (python -m rlpost.extensions.agents.environments.export writes prompts)"
            )
        # A session of the server is a cookie; those of hosts that are addresses count as well.
        jar = aiohttp.CookieJar(unsafe=True)
        async with (
            aiohttp.ClientSession(cookie_jar=jar, raise_for_status=raise_refusal) as resources,
            aiohttp.ClientSession(raise_for_status=raise_refusal) as policy,
        ):
            await self._post(resources, "seed_session", row)
            response = await self._converse(episode, parameters, resources, policy)
            verdict = await self._post(resources, "verify", row | {"response": response})
        refuse_failure(verdict)
        info = {key: verdict[key] for key in _RECORDED if verdict.get(key) is not None}
        reward = verdict.get("reward")
        if not isinstance(reward, int | float):
            raise GradingLost(f"nemogym: {self._url}/verify returned no reward: {verdict!r:.1000}")
        return Outcome(reward, info=info)

    async def _converse(
        self,
        episode: Episode,
        parameters: Mapping[str, Any],
        resources: aiohttp.ClientSession,
        policy: aiohttp.ClientSession,
    ) -> dict[str, Any]:
        """Let the policy answer and call tools; return its last response with all items."""
        new = list[dict[str, Any]]()
        request = request_of(parameters)
        items = request["input"]
        request |= {"model": episode.model, **sampling_of(episode.sampling)}
        names = {str(tool.get("name")) for tool in parameters.get("tools") or ()}
        headers = {"Authorization": f"Bearer {episode.api_key}"}
        for number in range(1, self._max_turns + 1):
            body = request | {"input": items + new}
            url = f"{episode.base_url}/responses"
            async with policy.post(url, json=body, headers=headers) as answer:
                response: dict[str, Any] = await answer.json()
            new += response["output"]
            calls = [item for item in response["output"] if item["type"] == "function_call"]
            if not calls or response.get("incomplete_details") or number == self._max_turns:
                return response | {"output": new}
            for call in calls:
                output = await self._call(resources, call, names)
                item = {"type": "function_call_output", "call_id": call["call_id"]}
                new.append(item | {"output": output})
        raise AssertionError("the last turn returns")

    async def _call(
        self, resources: aiohttp.ClientSession, call: Mapping[str, Any], names: set[str]
    ) -> str:
        """Return the output of a tool; an error that the policy caused is text for it."""
        if call["name"] not in names:
            return json.dumps({"error": f"there is no tool {call['name']}"})
        try:
            arguments = json.loads(call["arguments"] or "{}")
        except (ValueError, RecursionError) as error:
            return json.dumps({"error": f"the arguments are not JSON: {error}"})
        output = await self._content(resources, call["name"], arguments, raise_for_status=False)
        return output[:MAX_OUTPUT].decode(errors="replace")

    async def _post(
        self, session: aiohttp.ClientSession, path: str, body: Mapping[str, Any]
    ) -> dict[str, Any]:
        content = await self._content(session, path, body, raise_for_status=raise_refusal)
        if len(content) > MAX_OUTPUT:
            raise GradingLost(
                f"nemogym: {self._url}/{path} answers with more than {MAX_OUTPUT} bytes"
            )
        result: dict[str, Any] = json.loads(content)
        return result

    async def _content(
        self,
        session: aiohttp.ClientSession,
        path: str,
        body: object,
        *,
        raise_for_status: bool | Callable[[aiohttp.ClientResponse], Awaitable[None]],
    ) -> bytes:
        """Return the body of an answer, or more than MAX_OUTPUT bytes of its beginning.

        Raises GradingLost for a redirection, which may lead to services of the driver's node.
        """
        url = f"{self._url}/{path}"
        async with session.post(
            url,
            json=body,
            timeout=self._timeout,
            allow_redirects=False,
            raise_for_status=raise_for_status,
        ) as answer:
            if 300 <= answer.status < 400:  # 201 has a Location, too
                target = answer.headers.get("Location", "")
                raise GradingLost(
                    f"nemogym: {url} redirects to {target[:200]!r}; write the server's own address in --env"
                )
            return await _bounded(answer)


async def _bounded(answer: aiohttp.ClientResponse) -> bytes:
    """Return the body of an answer, or more than MAX_OUTPUT bytes of its beginning."""
    content = bytearray()
    async for part in answer.content.iter_chunked(1 << 16):
        content += part
        if len(content) > MAX_OUTPUT:
            break
    return bytes(content)


def refuse_failure(verdict: Mapping[str, Any]) -> None:
    """Raise GradingLost for a verdict that is no score of the answer, although it has a reward.

    A server whose judge failed answers with reward 0 and ``_ng_failure_class`` (NeMo-Gym 07d6b0d,
    nemo_gym/judge.py); one whose simulation failed, with ``mask_sample``.
    """
    failure = {key: verdict[key] for key in verdict if key.startswith("_ng_failure")}
    if failure or verdict.get("_ng_no_persist"):
        raise GradingLost(f"nemogym: the server could not score the answer: {failure!r:.2000}")
    instance = verdict.get("instance_config")
    places = (verdict, instance if isinstance(instance, Mapping) else {})
    if any(place.get("mask_sample") for place in places):
        raise GradingLost("nemogym: the server asks to leave the episode out (mask_sample)")


def url_of(target: str) -> str:
    """Return the address of a server. Raises ConfigError."""
    if not target.startswith(("http://", "https://")):
        raise ConfigError(f"--env nemogym:{target}: not an address; write nemogym:http://HOST:PORT")
    return target.rstrip("/")


def input_items(given: object) -> list[Any]:
    """Return the items of an input, which may be a text."""
    return [{"role": "user", "content": given}] if isinstance(given, str) else list(given)  # type: ignore[call-overload]


def request_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first request of a row to the gateway."""
    request = {name: parameters[name] for name in _COPIED if name in parameters}
    return request | {"input": input_items(parameters["input"])}


async def raise_refusal(response: aiohttp.ClientResponse) -> None:
    """Raise ClientResponseError with the server's reason, which aiohttp drops."""
    if response.status < 400:
        return
    text = (await _bounded(response)).decode(errors="replace")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = json.loads(text)["error"]["message"]
    raise aiohttp.ClientResponseError(
        response.request_info,
        response.history,
        status=response.status,
        message=f"{response.reason}: {text[:1000]}",
        headers=response.headers,
    )


def sampling_of(sampling: Mapping[str, object]) -> dict[str, object]:
    """Return the run's sampling parameters by their names in the Responses format."""
    names = {"temperature": "temperature", "top_p": "top_p", "max_tokens": "max_output_tokens"}
    return {name: sampling[key] for key, name in names.items() if key in sampling}


def rows_of(label: str, arguments: Mapping[str, object]) -> Iterator[dict[str, object]]:
    """Yield the rows of ``data``, a file of NeMo-Gym, as those of a prompt file.

    Raises ConfigError without ``data``, DataError for a line that is not a task.
    """
    path = arguments.get("data")
    if not isinstance(path, str):
        raise ConfigError(
            f'--env-args: write {{"{label}": {{"data": "FILE.jsonl"}}}}, a file of NeMo-Gym'
        )
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        try:
            row = json.loads(line)
            request = request_of(row[PARAMETERS])
            # a history may end in a tool's output, which has no content
            content = [item["content"] for item in request["input"] if "content" in item]
            responses_request(request)
        except BadRequest as error:
            raise DataError(
                f"{path}, line {number}: the gateway refuses its {PARAMETERS}: {error}"
            ) from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(f"{path}, line {number}: no task of NeMo-Gym: {error!r}") from error
        yield {**row, "prompt": str(content[-1]) if content else "", "env": label}
