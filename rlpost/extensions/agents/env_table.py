"""The table [env] of a recipe."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from rlpost.config.groups.base import Group, JsonTable, Positive, PositiveNumber, Switch, several
from rlpost.extensions.agents.env_names import parse_envs

_PATHS = (
    re.compile(r"(?P<before>(?:[A-Za-z0-9_.-]+=)?)(?P<path>.+\.py)(?P<after>:\w+)"),
    re.compile(r"(?P<before>(?:[A-Za-z0-9_.-]+=)?harbor:)(?P<path>.+)(?P<after>)"),
)


def _absolute(words: tuple[str, ...]) -> tuple[str, ...]:
    """Make the path of FILE.py:Class or harbor:FOLDER absolute: a job may run in another folder."""
    return tuple(map(_absolute_word, words))


def _absolute_word(word: str) -> str:
    for pattern in _PATHS:
        if match := pattern.fullmatch(word):
            path = Path(match["path"]).expanduser().absolute()
            return f"{match['before']}{path}{match['after']}"
    return word


Names = Annotated[tuple[str, ...], BeforeValidator(several), AfterValidator(_absolute)]


class EnvConfig(Group):
    """Environments that answers are episodes of, in place of a single turn and a reward by name."""

    env: Names = ()
    """Environments: pkg.mod:Class or FILE.py:Class, verifiers:NAME, openenv:URL, tau2:DOMAIN,
    harbor:FOLDER, nemogym:URL, gymnasium:ID, textarena:ID, reasoning_gym:NAME; LABEL=ENVIRONMENT
    gives one another label in metrics and prompts (docs/agents.md)."""
    env_weights: tuple[PositiveNumber, ...] = ()
    """Share of each environment among prompts that name none, in the order of --env. Default:
    equal shares. The seed is --rollout-seed."""
    env_key: str = "env"
    """Key of a prompt's metadata that holds the label of its environment."""
    env_args: JsonTable = Field(default={})
    """Arguments of environments, a JSON object by label: {"LABEL": {"NAME": VALUE}}."""
    env_reward: Literal["episode", "turn"] = "episode"
    """What a token is rewarded for: the reward of the whole episode, or the rewards of its turn and
    of all later ones."""
    env_max_turns: Positive = 16
    """Maximum turns of the model in an episode."""
    env_limit_reward: float = 0.0
    """Reward of an episode whose harness ends with an error after the gateway refused a request
    beyond --env-max-turns or the context."""
    env_train_side_requests: bool = False
    """Train also requests that a harness sends beside the task, such as that for a title: one
    answer to a request without tools, where another request of the episode has tools."""
    env_timeout_s: PositiveNumber = 1800.0
    """Timeout in seconds of an episode, waiting for engines included; on expiry it is left out."""
    env_concurrency: Positive = 256
    """Maximum episodes of one environment at a time."""
    env_retries: Annotated[int, Field(ge=0)] = 2
    """How often an episode that fails for reasons outside the answer is started again before it is
    left out."""
    env_traces: bool = True
    """Record every episode in RUN/episodes.jsonl."""

    switch: ClassVar[Switch | None] = Switch(
        "env", "without an environment", "add --env ENVIRONMENT"
    )
    decides: ClassVar[frozenset[str]] = frozenset(
        [
            "env",
            "env_weights",
            "env_key",
            "env_args",
            "env_reward",
            "env_max_turns",
            "env_train_side_requests",
        ]
    )

    @property
    def writes_answers(self) -> bool:
        """See ``Group``: with --env, answers are episodes."""
        return bool(self.env)

    @property
    def draws_by_seed(self) -> bool:
        """See ``Group``: the environment of a prompt that names none."""
        return len(self.env) > 1

    @property
    def paths(self) -> list[tuple[str, str]]:
        """See ``Group``: absolute files of environments and folders of tasks."""
        paths = []
        for word in self.env:
            path = word.partition("=")[2] if "=/" in word else word
            if path.startswith("/"):  # FILE.py:Class
                paths.append(path.rpartition(":")[0])
            elif "harbor:/" in word:
                paths.append(word.partition("harbor:")[2])
        return [("--env", path) for path in paths]

    @property
    def functions(self) -> dict[str, str]:
        """See ``Group``: classes of users. Raises ConfigError for a word that names none."""
        return {
            f"--env {env.label}": env.target for env in parse_envs(self.env) if env.kind == "own"
        }
