"""Games as chats: Gymnasium's own environments through the real gateway; a stand-in of TextArena and
of reasoning-gym, whose packages ``make test-environments`` installs.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rlpost.columns import IntColumn
from rlpost.errors import ConfigError, DataError
from rlpost.extensions.agents.environments.export import main as export
from rlpost.extensions.agents.environments.of_gymnasium import GymnasiumHarness
from rlpost.extensions.agents.environments.of_reasoning_gym import ReasoningGym
from rlpost.extensions.agents.environments.of_textarena import TextArenaHarness
from rlpost.extensions.agents.environments.protocol import Episode, Outcome, Turn
from rlpost.types import Prompt
from tests.unit.agents.chat_models import write_model
from tests.unit.agents.sampled import check
from tests.unit.agents.test_gateway import setup

pytest.importorskip("gymnasium", reason="the dev extra has it")
DRY = {"is_slippery": False}
ROUTE = ("down", "Down", "I go [RIGHT]", "[up] or [right]", "down", "right")
"""From the start of FrozenLake's 4x4 map to its goal."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("qwen"), "qwen")


async def play(folder: str, harness: Any, answers: Sequence[str], **metadata: Any) -> Outcome:
    """Play a game with scripted answers; its sampled tokens must be those of the trajectory."""
    async with setup(folder, answers) as made, await made.open() as opened:
        prompt = Prompt(3, "text", (1,), metadata=metadata)
        sampling = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 64}
        key = opened.api_key
        outcome: Outcome = await harness.run(
            Episode(opened.base_url, key, "policy", prompt, 0, sampling, 8)
        )
        check(opened.trajectories(), made.sampled)
        assert len(opened.trajectories()) == 1
    return outcome


@pytest.mark.parametrize(
    ("answers", "rewards", "stop"),
    [
        (ROUTE, [0.0] * 5 + [1.0], "terminated"),
        (("down", "[right]"), [0.0, 0.0], "terminated"),  # a hole
        (("fly", "", "[jump]"), [0.0] * 3, "max turns"),
    ],
)
async def test_a_game_of_gymnasium_is_a_chat_whose_moves_have_its_rewards(
    folder: str, answers: Sequence[str], rewards: list[float], stop: str
) -> None:
    turns = 8 if stop == "terminated" else len(answers)
    harness = GymnasiumHarness("FrozenLake-v1", config=DRY, max_turns=turns)
    outcome = await play(folder, harness, answers, task=5)
    assert (outcome.reward, list(outcome.turn_rewards)) == (0.0, rewards)
    assert outcome.info == {"seed": 5, "stop": stop}
    assert harness.deterministic


def test_positions_that_a_terminal_marks_by_colour_are_words() -> None:
    lake = GymnasiumHarness("FrozenLake-v1", config=DRY, instructions="Reach G.").open(0)
    assert lake.opening() == (
        "Reach G.\n\n[red S]FFF\nFHFH\nFFFH\nHFFG\n\n"
        "Actions: left, down, right, up. End with one in square brackets, such as [left]."
    )
    assert lake.play("down").text == "  (Down)\nSFFF\n[red F]HFH\nFFFH\nHFFG"
    taxi = GymnasiumHarness("Taxi-v4").open(1).opening()
    assert "\x1b" not in taxi and all(word in taxi for word in ("[magenta", "[yellow", "[blue"))


def test_equal_seeds_are_equal_games_and_numbers_are_pythons() -> None:
    harness = GymnasiumHarness("Blackjack-v1")
    openings = [harness.open(seed).opening() for seed in (1, 1, 2, 3)]
    assert openings[0] == openings[1] and len(set(openings)) > 1
    assert "np." not in openings[0] and openings[0].startswith("(")


@pytest.mark.parametrize(
    ("target", "options", "told"),
    [
        ("Nope-v0", {}, "--env gymnasium:Nope-v0: NameNotFound"),
        ("FrozenLake-v1", {"actions": ["a"]}, '"actions" has 1 names, the environment 4 actions'),
        ("FrozenLake-v1", {"config": {"map": 1}}, "unexpected keyword argument 'map'"),
    ],
)
def test_a_game_that_cannot_be_opened_is_refused_before_the_run(
    target: str, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        GymnasiumHarness(target, **options)


async def test_a_task_that_is_no_seed_is_refused(folder: str) -> None:
    with pytest.raises(DataError, match="'task' in its metadata is 'x'"):
        await play(folder, GymnasiumHarness("FrozenLake-v1"), ["down"], task="x")


def test_export_writes_a_prompt_for_each_seed(tmp_path: Path) -> None:
    out = tmp_path / "tasks.jsonl"
    arguments = '{"lake": {"tasks": 2}}'
    assert export(["lake=gymnasium:FrozenLake-v1", "--env-args", arguments, "--out", str(out)]) == 0
    assert out.read_text().splitlines() == [
        '{"prompt": "gymnasium:FrozenLake-v1 #0", "env": "lake", "task": 0}',
        '{"prompt": "gymnasium:FrozenLake-v1 #1", "env": "lake", "task": 1}',
    ]


class Guessing:
    """A game in the form of TextArena 0.7.4, which draws from the global random numbers."""

    def reset(self, num_players: int, seed: int) -> None:
        assert num_players == 1, "The number of players has to be 1"
        random.seed(seed)
        self.secret = random.randint(0, 9)
        self.state = SimpleNamespace(done=False)
        self.messages = [(-1, "Guess.", None)]

    def get_observation(self) -> tuple[int, list[tuple[int, str, None]]]:
        messages, self.messages = self.messages, []
        return 0, messages

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        self.state.done = action == f"[{self.secret}]"
        self.messages = [(0, action, None), (-1, f"No. A hint: {random.random()}", None)]
        return self.state.done, {}

    def close(self) -> tuple[dict[int, float], dict[int, dict[str, str]]]:
        return {0: 1.0}, {0: {"reason": "found"}}


class Wrapper:
    def __init__(self, game: Any) -> None:
        self.env = game


@pytest.fixture
def textarena(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("textarena")
    module.core, module.Wrapper = SimpleNamespace(GAME_ID=-1), Wrapper
    module.make = lambda target, **config: Wrapper(Guessing(**config))
    monkeypatch.setitem(sys.modules, "textarena", module)


async def test_a_game_of_textarena_is_scored_at_its_end(folder: str, textarena: None) -> None:
    secret = random.Random(5).randint(0, 9)
    wrong = f"[{(secret + 1) % 10}]"
    harness = TextArenaHarness("Guess-v0", max_turns=2)
    found = await play(folder, harness, [wrong, f"[{secret}]"], task=5)
    assert (found.reward, found.info["stop"]) == (1.0, "found")
    lost = await play(folder, harness, [wrong, wrong], task=5)
    assert (lost.reward, lost.info["stop"]) == (0.0, "max turns")


def test_games_of_textarena_at_the_same_time_disturb_neither_each_other_nor_the_driver(
    textarena: None,
) -> None:
    harness = TextArenaHarness("Guess-v0")
    alone = harness.open(1)
    expected = [alone.play("[x]").text for _ in range(3)]
    random.seed(7)
    one, other, hints = harness.open(1), harness.open(2), []
    for _ in range(3):
        hints.append(one.play("[x]").text)
        other.play("[x]")
    assert hints == expected and len(set(expected)) == 3
    assert random.random() == random.Random(7).random()


class Legs:
    """A data set in the form of reasoning-gym 0.1.25."""

    def __init__(self, size: int, seed: int, more: int = 0) -> None:
        self.size, self.first = size, seed + more

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"question": f"How many legs have {self.first + number} spiders?\n", "answer": "x"}

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        return float(answer == entry["answer"])


@pytest.fixture
def reasoning_gym(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("reasoning_gym")
    module.create_dataset = lambda name, **options: {"legs": Legs}[name](**options)
    utils: Any = ModuleType("reasoning_gym.utils")
    utils.extract_answer = lambda text, tag_name: (
        text.partition(f"<{tag_name}>")[2].partition("</")[0] or None
    )
    monkeypatch.setitem(sys.modules, "reasoning_gym", module)
    monkeypatch.setitem(sys.modules, "reasoning_gym.utils", utils)


def answer_of(text: str) -> Turn:
    return Turn(0, text, IntColumn([]), "stop", None)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Hm.</think>x", "x"),
        ("\n<think>x", ""),
        ("<think>x</think>\n<think>y", ""),
        ("grep '<think>' x", "grep '<think>' x"),
        ("<think>x</think>grep '<think>' x", "grep '<think>' x"),
    ],
)
def test_an_answer_may_mention_the_tag_of_a_thought(text: str, answer: str) -> None:
    assert answer_of(text).answer == answer


def test_an_answer_is_scored_by_the_data_set_of_its_prompt(reasoning_gym: None) -> None:
    environment = ReasoningGym("legs", size=3)
    text = environment.tasks[2].prompt_text
    assert text.endswith("44 spiders?\n\nWrite the final answer between <answer> and </answer>.")
    environment.reset(Prompt(0, text, (), metadata={"task": 2}))
    thought = "<think>is it <answer>x</answer>?"
    for answer, reward in (
        *(("<answer>x</answer>", 1.0), ("x", 0.0), ("<answer>y</answer>", 0.0)),
        *((thought, 0.0), (thought + "</think>No.", 0.0)),
        ("<think><answer>y</answer>?</think><answer>x</answer>", 1.0),
    ):
        step = environment.step(answer_of(answer))
        assert (step.reward, step.done) == (reward, True)
    whole = ReasoningGym("legs", size=3, tag=None)
    whole.reset(Prompt(0, text, (), metadata={"task": 2}))
    assert whole.step(answer_of("<think>y?</think> x\n")).reward == 1.0


def test_a_prompt_of_another_data_set_is_not_scored(reasoning_gym: None) -> None:
    """Else answers are compared with those of other questions."""
    text = ReasoningGym("legs", size=3).tasks[2].prompt_text
    for environment, number, told in (
        (ReasoningGym("legs", size=3, seed=9), 2, "export the prompts again"),
        (ReasoningGym("legs", size=3, config={"more": 1}), 2, "export the prompts again"),
        (ReasoningGym("legs", size=3), 1, "export the prompts again"),
        (ReasoningGym("legs", size=2), 2, "has the tasks 0 to 1"),
    ):
        with pytest.raises(DataError, match=told):
            environment.reset(Prompt(0, text, (), metadata={"task": number}))
    with pytest.raises(ConfigError, match="reasoning_gym:arms: KeyError"):
        ReasoningGym("arms")
