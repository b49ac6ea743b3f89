"""Make the environments that the settings name.

Input: settings. Output: an ``EnvironmentSet``, and the gateway that its harnesses need. A library
that is not installed, or a class with the wrong interface, raises ConfigError here;
``rlpost.extensions.agents.checks`` finds most of it on the login node.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from rlpost.algorithm.plugin import load_function
from rlpost.config.keys import SUFFIX
from rlpost.config.tree import Config
from rlpost.engines.group_client import EngineClients, GroupClient
from rlpost.errors import ConfigError
from rlpost.extensions.agents.checks import overlong_problem
from rlpost.extensions.agents.env_names import EnvName, parse_envs
from rlpost.extensions.agents.env_table import EnvConfig
from rlpost.extensions.agents.environments.episodes import EnvironmentSet, Runner
from rlpost.extensions.agents.environments.harness import HarnessRunner
from rlpost.extensions.agents.environments.plain import PlainRunner
from rlpost.extensions.agents.environments.resumption import resumption_of
from rlpost.extensions.agents.gateway import Gateway
from rlpost.extensions.agents.references import resolve_references
from rlpost.extensions.agents.sandbox.archives import STORE, Archives
from rlpost.extensions.agents.sandbox.protocol import Pool
from rlpost.extensions.agents.sandbox.settings import pool_of
from rlpost.extensions.agents.sandbox_table import SandboxConfig

T = TypeVar("T")
ADAPTERS = {
    "verifiers": "rlpost.extensions.agents.environments.of_verifiers.VerifiersHarness",
    "openenv": "rlpost.extensions.agents.environments.of_openenv.OpenEnvEnvironment",
    "tau2": "rlpost.extensions.agents.environments.of_tau2.Tau2Harness",
    "harbor": "rlpost.extensions.agents.environments.of_harbor.HarborEnvironment",
    "nemogym": "rlpost.extensions.agents.environments.of_nemogym.NemoGymHarness",
    "gymnasium": "rlpost.extensions.agents.environments.of_gymnasium.GymnasiumHarness",
    "textarena": "rlpost.extensions.agents.environments.of_textarena.TextArenaHarness",
    "reasoning_gym": "rlpost.extensions.agents.environments.of_reasoning_gym.ReasoningGym",
}
"""Classes of adapters, whose first argument is what follows the colon in --env."""


def make_environments(
    config: Config, run_folder: Path = Path(), engines: EngineClients | None = None
) -> tuple[EnvironmentSet, Gateway | None]:
    """Make the environments of --env, and the gateway if one of them needs it.

    The gateway has to be entered before the first episode. Servers of sandboxes register in
    ``run_folder``. ``engines``: the clients of the run's groups, for classes with
    ``uses_engines``; None makes them.

    Raises:
        ConfigError: an environment cannot be made.
    """
    settings = config.table(EnvConfig)
    names = parse_envs(settings.env)
    wrong = sorted(settings.env_args.keys() - {name.label for name in names})
    if wrong:
        raise ConfigError(
            f"--env-args: no environment has the label {wrong[0]}; --env has "
            f"{', '.join(name.label for name in names)}"
        )
    # Created only if an environment needs it: a pool or a gateway takes processes and a port.
    pool = _Once(lambda: pool_of(sandbox, run_folder))
    gateway = _Once(
        lambda: Gateway(
            config.checkpoint.hf_checkpoint,
            template_kwargs=dict(config.rollout.apply_chat_template_kwargs) or None,
            server_args=config.sglang.server_args,
        )
    )
    clients = _Once(lambda: EngineClients.of(config) if engines is None else engines)
    sandbox = config.table(SandboxConfig)
    archives = Archives(
        run_folder / STORE,
        max_mib=sandbox.sandbox_archive_mib,
        max_files=sandbox.sandbox_archive_files,
    )
    shared = _Shared(pool, archives, gateway, clients)
    runners = {name.label: _runner(name, config, shared) for name in names}
    keeps = archives if pool.made is not None else None
    environments = EnvironmentSet(names, runners, settings, sandboxes=pool.made, archives=keeps)
    return environments, gateway.made


def _with_keys(name: EnvName, env_args: Mapping[str, object]) -> dict[str, Any]:
    """Return arguments with the keys that they name. Raises ConfigError."""
    try:
        return dict(resolve_references(env_args, os.environ))
    except KeyError as error:
        raise ConfigError(
            f"--env-args of {name.label} name ${{{error.args[0]}}}, which this run does not have; set "
            f"a variable whose name ends in {SUFFIX} where the run is submitted"
        ) from None


class _Once(Generic[T]):
    """Makes a value at the first call; ``made`` is None before it."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self.made: T | None = None

    def __call__(self) -> T:
        if self.made is None:
            self.made = self._make()
        return self.made


class UsesSandboxes(Protocol):
    """An environment that gets the run's pool of sandboxes, and the store of their files."""

    sandboxes: Pool
    archives: Archives


class UsesEngines(Protocol):
    """An environment that gets the clients of the run's groups of engines, by name."""

    engines: Mapping[str, GroupClient]


@dataclass(frozen=True)
class _Shared:
    """What environments of a run share, each made if one needs it.

    ``pool`` and ``archives`` are for classes with ``uses_sandboxes``, ``gateway`` for harnesses,
    ``engines`` for classes with ``uses_engines``.
    """

    pool: Callable[[], Pool]
    archives: Archives
    gateway: Callable[[], Gateway]
    engines: Callable[[], EngineClients]


def _runner(name: EnvName, config: Config, shared: _Shared) -> Runner:
    """Return the runner of an environment's episodes."""
    settings = config.table(EnvConfig)
    max_turns = settings.env_max_turns
    env_args: Mapping[str, object] = settings.env_args.get(name.label, {})
    path = name.target
    arguments: tuple[object, ...] = ()
    if name.kind != "own":
        path, arguments = ADAPTERS[name.kind], (name.target,)
    module, _, cls = path.rpartition(":")
    dotted = path if not module or module.endswith(".py") else f"{module}.{cls}"  # FILE.py:Class
    kind = load_function(dotted, key=f"--env {name.word}")
    is_harness = hasattr(kind, "run")
    if is_harness and name.kind != "own":  # ``PlainRunner`` counts the turns of others
        env_args = {"max_turns": max_turns, **env_args}
    create: Callable[[], Any] = partial(kind, *arguments, **_with_keys(name, env_args))
    if getattr(kind, "uses_sandboxes", False):
        create = partial(_with_sandboxes, create, shared)
    if getattr(kind, "uses_engines", False):
        create = partial(_with_engines, create, shared)
    if not is_harness and not (hasattr(kind, "reset") and hasattr(kind, "step")):
        public = [word for word in dir(kind) if word[0] != "_"]
        raise ConfigError(
            f"--env {name.word}: {cls or path} has neither reset and step nor run "
            f"(rlpost/extensions/agents/environments/protocol.py); it has {', '.join(public) or 'nothing'}"
        )
    try:
        environment = create()  # plain environments too, so that wrong arguments fail now
    except ConfigError:
        raise
    except Exception as error:  # a user's class
        raise ConfigError(
            f"--env {name.word}: {type(error).__name__}: {error}; --env-args of {name.label} are "
            f"{dict(env_args)!r}"
        ) from error
    if is_harness and config.grpo.overlong_buffer_len is not None:
        raise ConfigError(overlong_problem(config, name))
    if not is_harness:
        return PlainRunner(name.word, create, max_turns, resumption_of(environment))
    # An adapter's library has its own limits, at which it scores the episode.
    max_requests = max_turns if name.kind == "own" else None
    return HarnessRunner(
        name.word,
        environment,
        shared.gateway(),
        max_turns,
        max_requests=max_requests,
        limit_reward=settings.env_limit_reward,
        # An adapter's library decides which of its requests are the agent's.
        trains_side_requests=settings.env_train_side_requests or name.kind != "own",
        # A harness has the state of all its episodes: it cannot be restored for one.
        resumption="replayed" if getattr(environment, "deterministic", False) else "begun again",
        reads_prompts=name.kind == "own",
    )


def _with_sandboxes(create: Callable[[], UsesSandboxes], shared: _Shared) -> UsesSandboxes:
    environment = create()
    environment.sandboxes, environment.archives = shared.pool(), shared.archives
    return environment


def _with_engines(create: Callable[[], UsesEngines], shared: _Shared) -> UsesEngines:
    environment = create()
    environment.engines = shared.engines()
    return environment
