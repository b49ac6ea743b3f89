"""The adapter for environments of ``verifiers`` 0.4 (its interface ``verifiers.v1``).

    --env verifiers:NAME        NAME: an installed taskset, as in ``eval NAME``

Its interception server relays the requests of a harness to the gateway, so tokens are those that the
engines sampled. Arguments (--env-args): ``config``, the environment's configuration as in its TOML
files; ``select``, which tasks; ``max_turns``.

A prompt names its task by ``task`` in the metadata, its position in the taskset
(``rlpost.extensions.agents.environments.export`` writes such prompts); without it, the prompt id modulo the
number of tasks. An episode that verifiers reports as failed has no reward: it is started again,
then left out.

An interrupted episode begins again: verifiers has no way to continue one, and the programs, tool
servers and models of a taskset may act differently the next time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from types import ModuleType
from typing import Any

import aiohttp
from aiohttp import web

from rlpost.errors import ConfigError, DataError, GradingLost
from rlpost.extensions.agents.environments.of_nemogym import refuse_failure
from rlpost.extensions.agents.environments.protocol import Episode, Outcome
from rlpost.extensions.agents.listener import admit, start_listener

NO_KEY = "RLPOST_NO_KEY"  # a variable that is not set: the relay knows the keys
INSTALL = "pip install 'rlpost[verifiers]'"


class VerifiersHarness:
    """All episodes of one environment."""

    deterministic = False

    def __init__(
        self,
        name: str,
        *,
        config: Mapping[str, object] | None = None,
        select: Mapping[str, object] | None = None,
        max_turns: int = 16,
        allow_local_commands: bool = False,
    ) -> None:
        """
        Args:
            allow_local_commands: let the model run commands on the driver's node.

        Raises:
            ConfigError: verifiers or the environment is not installed, or its configuration is
                wrong.
        """
        self._name = name
        try:
            import verifiers.v1 as vf
        except ImportError as error:
            raise ConfigError(f"--env verifiers:{name}: {error}; {INSTALL}") from error
        self._vf = vf
        logging.getLogger("verifiers").setLevel(logging.WARNING)  # two lines an episode
        try:
            kind = vf.env_config_type(name, str((config or {}).get("id", "")))
            self._env = vf.load_environment(
                vf.resolve_env_config(configuration(name, kind, config or {}, max_turns, vf))
            )
            tasks = self._env.taskset.select(vf.SelectConfig.model_validate(dict(select or {})))
            if not tasks.bounded:
                raise ConfigError(
                    f"--env verifiers:{name}: its taskset is infinite; bound it with --env-args, "
                    '"select": {"limit": 1000}'
                )
            self.tasks = list(tasks)
        except ConfigError:
            raise
        except Exception as error:  # an environment's code
            raise ConfigError(f"--env verifiers:{name}: {type(error).__name__}: {error}") from error
        if not allow_local_commands:
            self._refuse_local_commands(kind)
        self._relay = Relay()
        self._serving: asyncio.Task[None] | None = None
        self._end = asyncio.Event()

    def _refuse_local_commands(self, kind: object) -> None:
        for role, spec in roles(self._env.config, self._vf).items():
            harness_config = spec.harness or self._vf.default_agent_harness(self._name)
            harness = self._vf.load_harness(harness_config)
            if spec.runtime.type == "subprocess" and harness.EXECUTES_CODE:
                raise ConfigError(
                    f"--env verifiers:{self._name}: the harness {harness_config.id} lets the model run commands, "
                    f'here on the driver\'s node; choose another in --env-args, "config": {{"{role}": {{"runtime": '
                    f'{{"type": "apptainer"}}}}}} or {{"harness": {{"id": "null"}}}}, or "allow_local_commands": true'
                )

    async def start(self) -> None:
        """Start the servers that all episodes share: tool servers and the interception server."""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def serve() -> None:  # one task enters and leaves the contexts of verifiers
            try:
                async with self._relay, self._env.serving():
                    ready.set_result(None)
                    await self._end.wait()
            except Exception as error:
                if ready.done():
                    raise
                ready.set_exception(GradingLost(f"verifiers: {type(error).__name__}: {error}"))

        self._serving = asyncio.ensure_future(serve())
        await ready

    async def close(self) -> None:
        """End the servers."""
        self._end.set()
        if self._serving is not None:
            await self._serving

    async def run(self, episode: Episode) -> Outcome:
        """Run a task.

        Raises:
            DataError: the prompt names a task that does not exist.
            GradingLost: verifiers reports the episode as failed.
            ConfigError: an agent that is not trained asks the policy.
        """
        vf, traces, asked = self._vf, [], set()

        def minted(trace: Any) -> None:
            traces.append(trace.id)
            self._relay.open(trace.id, episode.base_url, episode.api_key)

        context = vf.ModelContext(
            model=episode.model,
            client=vf.EvalClientConfig(base_url=f"{self._relay.url}/v1", api_key_var=NO_KEY),
            sampling=vf.SamplingConfig.model_validate(dict(episode.sampling)),
        )
        try:
            finished = await self._env.run_episode(self.task_of(episode), context, on_trace=minted)
        finally:
            for trace in traces:
                if self._relay.close(trace):
                    asked.add(trace)
        refuse_untrained(self._name, finished, asked)
        return outcome(finished)

    def task_of(self, episode: Episode) -> object:
        """Return the task of an episode's prompt. Raises DataError."""
        prompt = episode.prompt
        number = prompt.metadata.get("task", prompt.prompt_id % len(self.tasks))
        if not isinstance(number, int) or not 0 <= number < len(self.tasks):
            raise DataError(
                f"prompt {prompt.prompt_id}: 'task' in its metadata is {number!r}; verifiers:{self._name} has the "
                f"tasks 0 to {len(self.tasks) - 1}"
            )
        return self.tasks[number]


def configuration(
    name: str, kind: object, given: Mapping[str, object], max_turns: int, vf: ModuleType
) -> dict[str, object]:
    """Return the configuration of an environment: our defaults, overridden by ``given``.

    ``kind`` is the class of the configuration. Unless a runtime is given, programs of agents run as
    processes of the node, and not in the hosted service that verifiers uses by default.
    """
    found: dict[str, object] = {"taskset": {"id": name}}
    for role in roles(kind, vf):
        found[role] = {"runtime": {"type": "subprocess"}, "max_turns": max_turns}
    return _merged(found, given)


def roles(config: Any, vf: ModuleType) -> dict[str, Any]:
    """Return the agents of a configuration, or of its class, by the name of their field."""
    is_class = isinstance(config, type)
    known: Mapping[str, Any] = (config if is_class else type(config)).model_fields
    fields = {
        name: info.default if is_class else getattr(config, name) for name, info in known.items()
    }
    return {name: value for name, value in fields.items() if isinstance(value, vf.AgentConfig)}


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, object]:
    found = dict(base)
    for key, value in over.items():
        old = found.get(key)
        if (
            isinstance(value, Mapping)
            and isinstance(old, Mapping)
            and value.get("type", old.get("type")) == old.get("type")
        ):
            found[key] = _merged(old, value)
        else:
            found[key] = value
    return found


def refuse_untrained(name: str, finished: Any, asked: Collection[str]) -> None:
    """Raise ConfigError if an agent that is not trained, such as a judge, asked the policy.

    Its tokens would be trained with those of the others.
    """
    for trace in finished.traces:
        if not trace.agent.trainable and trace.id in asked:
            role = trace.agent.name or "AGENT"
            raise ConfigError(
                f"--env verifiers:{name}: the agent {role} is not trained, but asks the policy; give it a model of its "
                f'own in --env-args, "config": {{"{role}": {{"model": NAME, "client": {{"base_url": URL}}}}}}'
            )


def outcome(episode: Any) -> Outcome:
    """Return the reward of a finished episode: the mean over its trained agents.

    Raises GradingLost for an episode that failed.
    """
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        last = f"{errors[-1].type}: {errors[-1].message}" if errors else "no error is recorded"
        raise GradingLost(f"verifiers: {last[:2000]}")
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    for trace in trained:  # its taskset nemo_gym keeps a verdict, and rewards a failed one with 0
        refuse_failure(getattr(trace, "info", {}).get("nemo_gym") or {})
    if not trained:
        raise GradingLost("verifiers: the episode has no agent that is trained")
    rewards = [reward for trace in trained for reward in trace.rewards.items()]
    missing = [name for name, reward in rewards if reward is None]
    if missing or not rewards:  # their sum counts them as 0
        raise GradingLost(
            f"verifiers: no reward was computed: {', '.join(missing) or 'none exists'}"
        )
    info = {
        "rewards": {name: reward.value for name, reward in rewards},
        "metrics": {key: value for trace in trained for key, value in trace.metrics.items()},
        "stop": [trace.stop_condition for trace in trained],
    }
    return Outcome(sum(trace.reward for trace in trained) / len(trained), info=info)


HEADER = "X-Session-ID"
# Headers that belong to one connection or that the relay replaces: of requests, then of answers.
_HOP = {"host", "content-length", "authorization", "x-api-key", "connection", "accept-encoding"}
_NOT_BACK = {"content-length", "content-encoding", "transfer-encoding", "connection"}
MAX_BODY = 256 << 20  # bytes of a request


class Relay:
    """Forwards requests to the gateway with the key of their episode; a context manager.

    verifiers has one key and one client for all episodes; it names the conversation in a header. A
    conversation that is not open is refused. Listens on the loopback interface of the driver's node.
    """

    def __init__(self) -> None:
        self._open: dict[str, tuple[str, str]] = {}
        self._asked: set[str] = set()
        self._runner: web.AppRunner | None = None
        self._session: aiohttp.ClientSession | None = None
        self.url = ""

    def open(self, conversation: str, base_url: str, api_key: str) -> None:
        """Forward a conversation to an episode; ``base_url`` ends in /v1."""
        self._open[conversation] = (base_url.removesuffix("/v1"), api_key)

    def close(self, conversation: str) -> bool:
        """Refuse a conversation from now on; return whether it made a request."""
        self._open.pop(conversation, None)
        made_one = conversation in self._asked
        self._asked.discard(conversation)
        return made_one

    async def __aenter__(self) -> Relay:
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_route("*", "/{path:.*}", self._forward)
        self._runner, self.url = await start_listener(app, "127.0.0.1", shutdown_s=0.1)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._runner is not None and self._session is not None
        await self._session.close()
        await self._runner.cleanup()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        assert self._session is not None
        conversation = request.headers.get(HEADER, "")
        endpoint = self._open.get(conversation)
        if endpoint is None:
            message = f"no episode is open for the conversation in {HEADER}"
            refusal = web.json_response({"error": {"message": message}}, status=401)
            refusal.force_close()
            return refusal
        admit(request)
        base_url, key = endpoint
        self._asked.add(conversation)
        headers = {
            name: value for name, value in request.headers.items() if name.lower() not in _HOP
        }
        headers["Authorization"] = f"Bearer {key}"
        async with self._session.request(
            request.method,
            f"{base_url}/{request.match_info['path']}",
            params=request.query,
            data=await request.read(),
            headers=headers,
        ) as answer:
            kept = {
                name: value
                for name, value in answer.headers.items()
                if name.lower() not in _NOT_BACK
            }
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response
