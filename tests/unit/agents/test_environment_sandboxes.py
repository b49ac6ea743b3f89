"""Environments with sandboxes share one pool, opened once; a lost sandbox never scores 0."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from rlpost.config.load import load
from rlpost.errors import ConfigError, GradingLost
from rlpost.extensions.agents.env_names import parse_envs
from rlpost.extensions.agents.env_table import EnvConfig
from rlpost.extensions.agents.environments import make as make_module
from rlpost.extensions.agents.environments.episodes import EnvironmentSet, Episodes
from rlpost.extensions.agents.environments.make import make_environments
from rlpost.extensions.agents.environments.plain import PlainRunner
from rlpost.extensions.agents.environments.protocol import Step, Turn
from rlpost.extensions.agents.sandbox.local import LocalSandbox, Root
from rlpost.extensions.agents.sandbox.protocol import SandboxLost, fresh
from rlpost.extensions.agents.sandbox.settings import check_node
from rlpost.rollout.response_builder import ResponseBuilder
from rlpost.types import Prompt
from tests.unit.agents.test_environment_episodes import CODEC, SAMPLING, Script, connected, prompt


class FakePool:
    """A pool whose first ``lost`` sandboxes fail at their first command."""

    def __init__(self, lost: int = 0) -> None:
        self.lost, self.log = lost, list[str]()

    async def __aenter__(self) -> FakePool:
        self.log.append("open")
        return self

    async def acquire(self, limits: object = None, image: object = None) -> Any:
        self.log.append("acquire")
        is_lost, self.lost = self.lost > 0, self.lost - 1

        async def run(command: str) -> str:
            if is_lost:
                raise SandboxLost("the node is gone")
            return command.upper()

        async def close() -> None:
            self.log.append("give back")

        return SimpleNamespace(run=run, close=close)

    async def close(self) -> None:
        self.log.append("close")


class Upper:
    """An environment that runs each turn in a fresh sandbox."""

    uses_sandboxes = True
    made: ClassVar[list[Upper]] = []
    sandboxes: Any

    def reset(self, given: Prompt) -> None:
        del given

    async def step(self, turn: Turn) -> Step:
        async with fresh(self.sandboxes) as sandbox:
            text = await sandbox.run(turn.text)
        return Step(reward=float(text == "AB"), done=True)


def played(pool: FakePool, *, retries: int) -> Any:
    settings = EnvConfig(env=("pkg.mod:Game",), env_retries=retries)

    def made() -> Upper:
        environment = Upper()
        environment.sandboxes = pool
        return environment

    async def play() -> Any:
        runner = PlainRunner("pkg.mod:Game", made, 4)
        every = EnvironmentSet(parse_envs(settings.env), {"Game": runner}, settings, sandboxes=pool)
        function = Episodes(every, seed=1, pause_s=0.001)
        async with connected(Script(*["ab"] * 3)) as connection:
            try:
                builder = ResponseBuilder(connection, prompt(), SAMPLING, codec=CODEC)
                (sample,) = await function(builder, prompt(), SAMPLING)
                return sample.extra["reward"], function.counters()["env/episodes_masked"]
            finally:
                await every.close()

    return asyncio.run(play())


def test_an_episode_that_loses_its_sandbox_restarts_in_another_one() -> None:
    pool = FakePool(lost=2)
    assert played(pool, retries=2) == (1.0, 0.0)
    assert pool.log == ["open", *["acquire", "give back"] * 3, "close"]


def test_an_episode_that_loses_every_sandbox_is_left_out_and_scores_nothing() -> None:
    pool = FakePool(lost=9)
    with pytest.raises(GradingLost, match="the node is gone"):
        played(pool, retries=1)
    assert pool.log == ["open", *["acquire", "give back"] * 2, "close"]


def test_all_environments_of_a_run_share_the_pool_of_its_settings(tmp_path, monkeypatch) -> None:
    pools = []

    def pool_of(settings: Any, run_folder: Any) -> FakePool:
        pools.append((settings.sandbox_places, run_folder))
        return FakePool()

    monkeypatch.setattr(make_module, "pool_of", pool_of)
    shell = "rlpost.extensions.agents.examples.shell:Shell"
    values = {"env": {"env": [f"a={shell}", f"b={shell}"]}, "sandbox": {"sandbox_places": 3}}
    make_environments(load([], values).config, tmp_path)
    assert pools == [(3, tmp_path)]
    plain = {"env": {"env": ["rlpost.extensions.agents.examples.guess:Guess"]}}
    make_environments(load([], plain).config, tmp_path)
    assert len(pools) == 1, "no sandbox without a need"


def test_a_driver_first_starts_one_sandbox_if_the_run_needs_local_ones(monkeypatch) -> None:
    started: list[Root | None] = []

    async def start(limits: Any, root: Any, cgroups: Any) -> Any:
        del limits, cgroups
        started.append(root)
        raise SandboxLost("Operation not permitted")

    monkeypatch.setattr(LocalSandbox, "start", start)
    values: dict[str, Any] = {"env": {"env": ["rlpost.extensions.agents.examples.shell:Shell"]}}
    values["sandbox"] = {"sandbox_image": "/image"}
    with pytest.raises(ConfigError, match=r"this node cannot run sandboxes: Operation not permit"):
        check_node(load([], values).config)
    assert started == [Root("/image")]
    elsewhere = {"sandbox": {"sandbox_backend": "slurm"}}
    other = {"env": {"env": ["rlpost.extensions.agents.examples.guess:Guess"]}}
    for given in (values | elsewhere, values | other):
        check_node(load([], given).config)
    assert len(started) == 1
