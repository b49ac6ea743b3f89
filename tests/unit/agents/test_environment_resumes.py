"""Conversations after a crash: replayed, restored or begun again; nothing is generated twice."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rlpost.durable.journal import Journal
from rlpost.durable.open_parts import Kept
from rlpost.engines.connection import Connection
from rlpost.errors import GradingLost
from rlpost.extensions.agents.env_names import parse_envs
from rlpost.extensions.agents.env_table import EnvConfig
from rlpost.extensions.agents.environments.episodes import EnvironmentSet, Episodes
from rlpost.extensions.agents.environments.plain import PlainRunner
from rlpost.extensions.agents.environments.protocol import Step, Turn
from rlpost.extensions.agents.environments.resumption import resumption_of
from rlpost.rollout.buffer import RolloutBuffer, Rules
from rlpost.rollout.collector import Choices, Collector
from rlpost.rollout.generate import GroupWriter
from rlpost.rollout.response_builder import ResponseBuilder
from rlpost.tasks.reward.grader import InlineGrader
from rlpost.types import Backlog, Prompt, SampleGroup, Unfinished
from tests.unit.agents.test_environment_episodes import (
    CODEC,
    SAMPLING,
    Script,
    connected,
    prompt,
)

TURNS = ("one", "two", "three", "four")
NUM_TURNS = len(TURNS)


class Killed(BaseException):
    """The driver dies."""


@dataclass
class World:
    """What survives a crash, and what environments were asked."""

    folder: Path
    dies_at: int | None = None  # the turn whose step kills the driver
    steps: list[str] = field(default_factory=list)
    resets: int = 0
    restores: int = 0
    is_damaged: bool = False


def environment_of(world: World, kind: str) -> Any:
    """The class of an environment that repeats what the model wrote."""

    class Echo:
        def __init__(self) -> None:
            self.said: list[str] = []

        def reset(self, given: Prompt) -> str:
            world.resets += 1
            return "a:"

        def step(self, turn: Turn) -> Step:
            if turn.number == world.dies_at:
                raise Killed
            world.steps.append(turn.text)
            self.said.append(turn.text)
            done = turn.number + 1 == NUM_TURNS
            return Step("=" + turn.text[0], reward=float(turn.number), done=done, tool="echo")

        def score(self) -> float:
            return float(len("".join(self.said)))

    class Replayed(Echo):
        deterministic = True

    class Restored(Echo):
        def save(self) -> bytes:
            return json.dumps(self.said).encode()

        async def restore(self, data: bytes) -> None:
            world.restores += 1
            if world.is_damaged:
                raise ValueError("no such archive")
            self.said = json.loads(data)

    return {"begun again": Echo, "replayed": Replayed, "restored": Restored}[kind]


async def attempt(world: World, make: Any, turns: Sequence[str]) -> tuple[Any, Script, Kept]:
    """Run the episode of one group of one answer, with an engine that has these turns to say."""
    settings = EnvConfig(env=("pkg.mod:Echo",), env_reward="turn", env_retries=1)
    runner = PlainRunner("pkg.mod:Echo", make, settings.env_max_turns, resumption_of(make))
    names = parse_envs(settings.env)
    function = Episodes(EnvironmentSet(names, {"Echo": runner}, settings), seed=1, pause_s=0.001)
    return await write(world.folder, function, turns)


async def write(
    folder: Path, function: Any, turns: Sequence[str], *, n: int = 1
) -> tuple[Any, Script, Kept]:
    """Complete the group of a prompt from the journal in a folder; None if the driver dies."""
    journal, engine = Journal.resume(folder, 0, step=3, settings="s"), Script(*turns)
    kept, written = journal.kept(), None
    finished = (await journal.kept_answers()).get(prompt().prompt_id, ())
    try:
        async with connected(engine) as connection:
            writer = writer_of(connection, function, journal, n=n)
            with contextlib.suppress(Killed):
                written = await writer.write(Unfinished(prompt(), tuple(finished)))
    finally:
        journal.close()
    return written, engine, kept


def writer_of(
    connection: Connection, function: Any, journal: Journal, *, n: int = 1
) -> GroupWriter:
    return GroupWriter(
        connection,
        SAMPLING,
        n=n,
        grader=InlineGrader(lambda *_: 1.0),
        function=function,
        codec=CODEC,
        journal=journal,
    )


def run(world: World, kind: Any, turns: Sequence[str]) -> tuple[Any, Script, Kept]:
    make = environment_of(world, kind) if isinstance(kind, str) else kind
    return asyncio.run(attempt(world, make, turns))


@pytest.mark.parametrize("dies_at", range(NUM_TURNS))
@pytest.mark.parametrize("kind", ["replayed", "restored"])
def test_a_killed_conversation_goes_on_with_the_turn_that_was_not_answered(
    tmp_path: Path, kind: str, dies_at: int
) -> None:
    undisturbed, _, _ = run(World(tmp_path / "undisturbed"), kind, TURNS)
    world = World(tmp_path / "killed", dies_at=dies_at)
    none, _, _ = run(world, kind, TURNS)
    assert none is None
    done_before = list(world.steps)
    world.dies_at = None
    group, engine, kept = run(world, kind, TURNS[dies_at + 1 :])
    assert group == undisturbed
    assert engine.turns == [], "each turn was generated once"
    assert kept.turns == dies_at + 1 and kept.answers == kept.begun_again == 0
    if kind == "restored":
        assert world.steps == list(TURNS), "each step was taken once"
        assert (world.resets, world.restores) == (1, 1)
    else:
        assert world.steps == [*done_before, *TURNS], "steps are taken again"


def test_a_conversation_that_cannot_go_on_is_begun_again_and_counted(tmp_path: Path) -> None:
    world = World(tmp_path, dies_at=2)
    run(world, "begun again", TURNS)
    world.dies_at = None
    group, engine, kept = run(world, "begun again", ["x1", "x2", "x3", "x4"])
    assert isinstance(group, SampleGroup) and engine.turns == []
    assert kept == Kept(answers=0, turns=0, begun_again=1, tokens=0)
    assert "x1" in group.samples[0].sample.text and "one" not in group.samples[0].sample.text


def test_a_restore_that_fails_begins_the_conversation_again_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path, dies_at=2)
    run(world, "restored", TURNS)
    world.dies_at, world.is_damaged = None, True
    with caplog.at_level(logging.WARNING):
        group, engine, _ = run(world, "restored", ["x1", "x2", "x3", "x4"])
    assert engine.turns == [] and "one" not in group.samples[0].sample.text
    assert (
        "restore failed: ValueError: no such archive; the episode of prompt 5, answer 0, is begun again"
        in (caplog.text)
    )


def test_an_environment_that_is_not_deterministic_after_all_asks_the_engine(tmp_path: Path) -> None:
    """A response belongs to its request: after other text of the environment, engines generate."""
    world = World(tmp_path, dies_at=1)
    run(world, "replayed", TURNS)
    world.dies_at = None
    kind = environment_of(world, "replayed")
    opening = kind.reset

    def other(self: Any, given: Prompt) -> str:
        return opening(self, given) + "?"

    group, engine, _ = run(world, type("Other", (kind,), {"reset": other}), TURNS)
    assert engine.turns == [] and CODEC.decode(group.samples[0].sample.response_ids)[:3] == "a:?"


def test_a_failed_episode_is_not_repeated_from_its_recorded_turns(tmp_path: Path) -> None:
    world = World(tmp_path)
    kind = environment_of(world, "replayed")
    step, failures = kind.step, [GradingLost("the node is gone")]

    def unlucky(self: Any, turn: Turn) -> Step:
        if turn.number == 1 and failures:
            raise failures.pop()
        made: Step = step(self, turn)
        return made

    group, engine, _ = run(
        world, type("Unlucky", (kind,), {"step": unlucky}), ["one", "two", *TURNS]
    )
    assert engine.turns == [] and group.samples[0].sample.text.startswith("a:one")


def test_a_group_keeps_finished_answers_beside_a_conversation_in_progress(tmp_path: Path) -> None:
    """The answers of custom generate functions, of which one was under way."""

    async def talk(builder: ResponseBuilder, given: Prompt, sampling: Any) -> Any:
        await builder.write()
        if builder.index == 1 and dies:
            await asyncio.wait_for(finished.wait(), 30)
            raise Killed
        await builder.write()
        if builder.index == 0:
            finished.set()
        return builder.sample()

    talk.deterministic = True  # type: ignore[attr-defined]

    finished, dies = asyncio.Event(), True
    assert asyncio.run(write(tmp_path, talk, ["aa", "bb", "cc"], n=2))[0] is None
    finished, dies = asyncio.Event(), False
    group, engine, kept = asyncio.run(write(tmp_path, talk, ["dd"], n=2))
    assert kept.answers == 1 and kept.turns == 1
    assert engine.turns == [] and len(group.samples) == 2
    assert group.samples[1].sample.text.endswith("dd")


def test_a_resume_deletes_files_that_no_open_conversation_needs(tmp_path: Path) -> None:
    """The store is told the states of the journal before the first answer begins."""

    class Store:
        async def keep_only(self, states: Sequence[bytes]) -> None:
            kept.extend(states)

    kept: list[bytes] = []
    world = World(tmp_path, dies_at=2)
    run(world, "restored", TURNS)
    world.dies_at = None
    make, settings = environment_of(world, "restored"), EnvConfig(env=("pkg.mod:Echo",))
    runner = PlainRunner("pkg.mod:Echo", make, 8, resumption_of(make))
    archives: Any = Store()
    environments = EnvironmentSet(
        parse_envs(settings.env), {"Echo": runner}, settings, archives=archives
    )

    async def resume() -> list[SampleGroup]:
        journal = Journal.resume(tmp_path, 0, step=3, settings="s")
        engine = Script(*TURNS[3:])
        try:
            async with connected(engine) as connection:
                writer = writer_of(connection, Episodes(environments, seed=1), journal)
                buffer = RolloutBuffer(Rules(1, 1, 9), Backlog(), step=3)
                cursor: Any = Cursor()
                collector = Collector(
                    buffer,
                    cursor,
                    writer,
                    choices=Choices(),
                    stop_requested=lambda: False,
                    journal=journal,
                )
                return await collector.batch()
        finally:
            journal.close()

    (group,) = asyncio.run(resume())
    assert kept == [json.dumps(list(TURNS[:2])).encode()]
    assert group.prompt_id == 5 and world.restores == 1


class Cursor:
    """Prompt 5, again and again."""

    def take(self, count: int) -> list[Prompt]:
        return [prompt()] * count

    def state(self) -> dict[str, int]:
        return {}

    def copy(self) -> Cursor:
        return Cursor()
