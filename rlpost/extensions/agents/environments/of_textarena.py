"""The adapter for games of TextArena with one player.

    --env textarena:GuessTheNumber-v0

The policy reads each message of the game once, as a turn of the chat; TextArena's wrappers, which
repeat the whole history with every turn, are taken off. The reward is that of the game at its end;
a game that is not over after --env-max-turns has 0.

TextArena draws from Python's global random numbers. Each game has a state of its own, so games that
run at the same time, and the driver, do not disturb each other. Some games draw from NumPy or need
data of NLTK, so an interrupted game begins again.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from rlpost.errors import ConfigError
from rlpost.extensions.agents.environments.chat_game import ChatGame
from rlpost.extensions.agents.environments.protocol import Step

INSTALL = "pip install 'rlpost[textarena]'"
_RANDOM = threading.Lock()
"""Held while the global random numbers are those of a game."""


class TextArenaHarness(ChatGame):
    """All episodes with one game."""

    def __init__(
        self,
        target: str,
        *,
        max_turns: int = 16,
        tasks: int = 1000,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """``config``: arguments of the game. Raises ConfigError."""
        try:
            import textarena
        except ImportError as error:
            raise ConfigError(f"--env textarena:{target}: {error}; {INSTALL}") from error
        self._textarena, self._target, self._config = textarena, target, dict(config or {})
        super().__init__(f"textarena:{target}", max_turns, tasks)

    def open(self, seed: int) -> TextArenaGame:
        """Start the game of a seed. Raises ConfigError for a game that needs an opponent."""
        try:
            return TextArenaGame(self._textarena, self._target, self._config, seed)
        except AssertionError as error:
            if "number of players" not in str(error):
                raise
            raise ConfigError(
                f"--env textarena:{self._target}: {error}; choose a game for one player"
            ) from error


class TextArenaGame:
    """One game."""

    def __init__(
        self, textarena: ModuleType, target: str, config: Mapping[str, Any], seed: int
    ) -> None:
        self._from_game = textarena.core.GAME_ID
        self._random_state = random.Random(seed).getstate()
        with self._own_random():
            game = textarena.make(target, **config)
            while isinstance(game, textarena.Wrapper):
                game = game.env
            self._game = game
            game.reset(num_players=1, seed=seed)
            self._shown = self._news()

    def opening(self) -> str:
        """Return the rules and the first board."""
        return self._shown

    def play(self, move: str) -> Step:
        """Make a move."""
        with self._own_random():
            done, _ = self._game.step(move)
            return Step("" if done else self._news(), done=bool(done))

    def outcome(self) -> tuple[float, str]:
        """Return the game's reward and its reason."""
        state = self._game.state
        if not state.done:
            return 0.0, "max turns"
        rewards, info = self._game.close()
        return float(rewards[0]), str(info[0].get("reason"))

    def close(self) -> None:
        """A game holds nothing."""

    def _news(self) -> str:
        """Return what the game has said since the last time."""
        _, messages = self._game.get_observation()
        return "\n".join(str(text) for sender, text, _ in messages if sender == self._from_game)

    @contextlib.contextmanager
    def _own_random(self) -> Iterator[None]:
        """Put the game's state in place of the global random numbers."""
        with _RANDOM:
            state = random.getstate()
            random.setstate(self._random_state)
            try:
                yield
            finally:
                self._random_state = random.getstate()
                random.setstate(state)
