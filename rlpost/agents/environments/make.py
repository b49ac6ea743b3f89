"""Make the environments that the settings name.

Input: settings. Output: a ``EnvironmentSet``, and the gateway that its harnesses need. What is not installed
or has the wrong interface is a ConfigError here; ``rlpost.config.checks.agents`` finds most of it
on the login node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from rlpost.agents.environments.episodes import EnvironmentSet, Runner
from rlpost.agents.environments.harness import HarnessRunner
from rlpost.agents.environments.names import EnvName, parse_envs
from rlpost.agents.environments.plain import PlainRunner
from rlpost.agents.gateway import Gateway
from rlpost.agents.sandbox.protocol import Pool
from rlpost.agents.sandbox.settings import pool_of
from rlpost.algorithm.plugin import load_function
from rlpost.config.tree import Config
from rlpost.errors import ConfigError

ADAPTERS = {
    "verifiers": "rlpost.agents.environments.of_verifiers.VerifiersHarness",
    "openenv": "rlpost.agents.environments.of_openenv.OpenEnvEnvironment",
    "tau2": "rlpost.agents.environments.of_tau2.Tau2Harness",
}
"""Classes of adapters, whose first argument is what follows the colon in --env."""


def make_environments(
    config: Config, run_folder: Path = Path()
) -> tuple[EnvironmentSet, Gateway | None]:
    """Make the environments of --env. The gateway is None if none of them needs one; it has to be
    entered before the first episode. Servers of sandboxes register in ``run_folder``.

    Raises:
        ConfigError: an environment cannot be made.
    """
    settings = config.env
    names = parse_envs(settings.env)
    wrong = sorted(settings.env_args.keys() - {name.label for name in names})
    if wrong:
        raise ConfigError(
            f"--env-args: no environment has the label {wrong[0]}; --env has "
            f"{', '.join(name.label for name in names)}"
        )
    pools: list[Pool] = []

    @cache
    def sandboxes() -> Pool:
        pools.append(pool_of(config.sandbox, run_folder))
        return pools[0]

    made: dict[str, Any] = {name.label: _make(name, config, sandboxes) for name in names}
    gateway = None
    if any(isinstance(each, _Harness) for each in made.values()):
        gateway = Gateway(
            config.checkpoint.hf_checkpoint,
            template_kwargs=dict(config.rollout.apply_chat_template_kwargs) or None,
            context_length=config.sglang.server_args.get("context_length"),
        )
    runners: dict[str, Runner] = {}
    for name in names:
        thing = made[name.label]
        if isinstance(thing, _Harness):
            assert gateway is not None
            # An adapter's library has its own limits, at which it scores the episode.
            most = settings.env_max_turns if name.kind == "own" else None
            runners[name.label] = HarnessRunner(
                name.word, thing.harness, gateway, settings.env_max_turns, max_requests=most
            )
        else:
            runners[name.label] = PlainRunner(name.word, thing, settings.env_max_turns)
    pool = pools[0] if pools else None
    return EnvironmentSet(names, runners, settings, sandboxes=pool), gateway


class _Harness:
    def __init__(self, harness: Any) -> None:
        self.harness = harness


def _make(
    name: EnvName, config: Config, sandboxes: Callable[[], Pool]
) -> _Harness | Callable[[], object]:
    """Return the harness of a name, or a function that makes an environment.

    ``sandboxes`` returns the run's pool, for classes with ``uses_sandboxes``.
    """
    given: Mapping[str, Any] = config.env.env_args.get(name.label, {})
    path = name.target
    arguments: tuple[Any, ...] = ()
    if name.kind != "own":
        path, arguments = ADAPTERS[name.kind], (name.target,)
        if name.kind != "openenv":  # its turns are counted as those of environments of our own
            given = {"max_turns": config.env.env_max_turns, **given}
    module, _, cls = path.rpartition(":")
    dotted = path if not module or module.endswith(".py") else f"{module}.{cls}"  # FILE.py:Class
    kind = load_function(dotted, key=f"--env {name.word}")
    create: Callable[[], Any] = partial(kind, *arguments, **given)
    if getattr(kind, "uses_sandboxes", False):
        create = partial(_with_sandboxes, create, sandboxes())
    try:
        if hasattr(kind, "run"):
            return _Harness(create())
        if hasattr(kind, "reset") and hasattr(kind, "step"):
            create()  # wrong arguments fail now, not in an episode
            return create
    except ConfigError:
        raise
    except Exception as error:  # a user's class
        raise ConfigError(
            f"--env {name.word}: {type(error).__name__}: {error}; --env-args of {name.label} are "
            f"{dict(given)!r}"
        ) from error
    raise ConfigError(
        f"--env {name.word}: {cls or path} has neither reset and step nor run "
        "(rlpost/agents/environments/protocol.py); it has "
        f"{', '.join(word for word in dir(kind) if word[0] != '_') or 'nothing'}"
    )


def _with_sandboxes(create: Callable[[], Any], pool: Pool) -> Any:
    made = create()
    made.sandboxes = pool
    return made
