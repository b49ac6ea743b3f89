"""The adapter for environments of Gymnasium whose actions are a number or a text.

    --env gymnasium:FrozenLake-v1       an id, or MODULE:ID for one that MODULE registers

The policy reads what the environment renders as text (``ansi``), else its observation. A terminal's
colours become words, [red S], since FrozenLake and Taxi mark positions by colour alone. A move is
what stands in the last square brackets of an answer, or the whole answer without any; one that is
no action changes nothing and costs a turn.

Gymnasium's own environments give the same answers to the same seed and actions, so an interrupted
game is replayed. Those of other packages begin again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlpost.errors import ConfigError
from rlpost.extensions.agents.environments.chat_game import ChatGame
from rlpost.extensions.agents.environments.protocol import Step

INSTALL = "pip install 'rlpost[gymnasium]'"
ACTIONS = {
    "FrozenLake": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pick up", "drop off"),
    "Blackjack": ("stick", "hit"),
}
"""Names of the actions of Gymnasium's text environments, in the order of their numbers."""
COLOURS = ("gray", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_COLOURED = re.compile(r"\x1b\[([0-9;]+)m(.*?)\x1b\[0m", re.DOTALL)
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")


class GymnasiumHarness(ChatGame):
    """All episodes with one environment."""

    def __init__(
        self,
        target: str,
        *,
        max_turns: int = 16,
        tasks: int = 1000,
        config: Mapping[str, Any] | None = None,
        actions: Sequence[str] | None = None,
        instructions: str = "",
    ) -> None:
        """
        Args:
            config: arguments of ``gymnasium.make``.
            actions: names of the actions, in the order of their numbers.
            instructions: text before the first observation: the rules of the game.

        Raises ConfigError.
        """
        try:
            import gymnasium
        except ImportError as error:
            raise ConfigError(f"--env gymnasium:{target}: {error}; {INSTALL}") from error
        self._gymnasium, self._target = gymnasium, target
        self._config, self._instructions = dict(config or {}), instructions
        family = target.rpartition(":")[2].rpartition("-v")[0]
        self._names = tuple(actions or ACTIONS.get(family, ()))
        super().__init__(f"gymnasium:{target}", max_turns, tasks)
        entry_point = str(gymnasium.spec(target).entry_point)
        self.deterministic = entry_point.startswith("gymnasium.envs.")

    def open(self, seed: int) -> GymnasiumGame:
        """Start the game of a seed. Raises ConfigError for actions that no text names."""
        make = self._gymnasium.make
        environment = make(self._target, **self._config)
        if "ansi" in environment.metadata.get("render_modes", ()):
            environment.close()
            environment = make(self._target, **{"render_mode": "ansi", **self._config})
        space = environment.action_space
        if isinstance(space, self._gymnasium.spaces.Text):
            return GymnasiumGame(environment, seed, None, self._instructions)
        if not isinstance(space, self._gymnasium.spaces.Discrete):
            raise ConfigError(
                f"--env gymnasium:{self._target}: its actions are {space}; only Discrete and Text "
                "can be written as text"
            )
        numbers = range(int(space.start), int(space.start + space.n))
        names = self._names or tuple(map(str, numbers))
        if len(names) != len(numbers):
            raise ConfigError(
                f'--env gymnasium:{self._target}: --env-args "actions" has {len(names)} names, the '
                f"environment {len(numbers)} actions"
            )
        table = dict(zip(map(str.lower, names), numbers, strict=True))
        return GymnasiumGame(environment, seed, table, self._instructions)


class GymnasiumGame:
    """One game."""

    def __init__(
        self, environment: Any, seed: int, actions: Mapping[str, int] | None, instructions: str
    ) -> None:
        """``actions``: number by name in lower case; None if an action is a text."""
        self._environment, self._actions = environment, actions
        self._instructions, self._stop = instructions, "max turns"
        observation, _ = environment.reset(seed=seed)
        self._shown = self._text_of(observation)

    def opening(self) -> str:
        """Return rules, first observation and actions."""
        parts = [self._instructions, self._shown]
        if self._actions is not None:
            names = list(self._actions)
            parts.append(
                f"Actions: {', '.join(names)}. End with one in square brackets, such as [{names[0]}]."
            )
        return "\n\n".join(part for part in parts if part)

    def play(self, move: str) -> Step:
        """Take an action."""
        action: int | str | None = move
        if self._actions is not None:
            word = (_BRACKETS.findall(move) or [move])[-1].strip().lower()
            action = self._actions.get(word)
            if action is None:
                return Step(f"No action: {word[:100]}. Actions: {', '.join(self._actions)}.")
        observation, reward, terminated, truncated, _ = self._environment.step(action)
        if terminated or truncated:
            self._stop = "terminated" if terminated else "truncated"
        return Step(
            self._text_of(observation), reward=float(reward), done=bool(terminated or truncated)
        )

    def outcome(self) -> tuple[float, str]:
        """All rewards are those of moves."""
        return 0.0, self._stop

    def close(self) -> None:
        """Close the environment."""
        self._environment.close()

    def _text_of(self, observation: Any) -> str:
        if self._environment.render_mode == "ansi":
            return _COLOURED.sub(_in_words, str(self._environment.render())).strip("\n")
        return observation if isinstance(observation, str) else str(_plain(observation))


def _in_words(match: re.Match[str]) -> str:
    """Return a coloured text with its colour as a word: codes 30 to 37, or 40 to 47 behind it."""
    codes = [int(code) for code in match[1].split(";") if code]
    names = [COLOURS[code % 10] for code in codes if code // 10 in (3, 4) and code % 10 < 8]
    return f"[{' '.join([*names, match[2]])}]"


def _plain(value: Any) -> Any:
    """Return an observation with Python's numbers and lists for NumPy's."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_plain(entry) for entry in value)
    return value.tolist() if hasattr(value, "tolist") else value
