"""Games as chats: the base of the adapters for Gymnasium and TextArena.

An episode is one game. What the game shows is a message of the user, the policy's answer is the
move, without its reasoning. A prompt names the game's seed by ``task`` in the metadata
(``rlpost.extensions.agents.environments.export`` writes such prompts), else it is the prompt id, so all answers
of a group play the same game. A game that is not over after --env-max-turns keeps the rewards of
its moves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp

from rlpost.errors import ConfigError, DataError
from rlpost.extensions.agents.environments.calls import call
from rlpost.extensions.agents.environments.of_nemogym import raise_refusal
from rlpost.extensions.agents.environments.protocol import Episode, Outcome, Step


class Game(Protocol):
    """One game in progress. Methods may block."""

    def opening(self) -> str:
        """Return what the policy reads before its first move."""

    def play(self, move: str) -> Step:
        """Act on an answer of the policy."""

    def outcome(self) -> tuple[float, str]:
        """Return the reward of the game beside those of its moves, and why it ended."""

    def close(self) -> None:
        """Release what the game holds."""


@dataclass(frozen=True)
class GameTask:
    """A game as an entry of a prompt file."""

    id: str


class ChatGame:
    """All episodes with one kind of game. A subclass has ``open``."""

    deterministic = False

    def __init__(self, word: str, max_turns: int, tasks: int) -> None:
        """``word``: as --env names it. ``tasks``: seeds from 0 that ``export`` writes.

        Raises ConfigError if a game cannot be opened here.
        """
        self._word, self._max_turns = word, max_turns
        self.tasks = [GameTask(f"{word} #{seed}") for seed in range(tasks)]
        try:
            self.open(0).close()
        except ConfigError:
            raise
        except Exception as error:  # a package's code
            raise ConfigError(f"--env {word}: {type(error).__name__}: {error}".rstrip()) from error

    def open(self, seed: int) -> Game:
        """Start the game of a seed."""
        raise NotImplementedError

    async def run(self, episode: Episode) -> Outcome:
        """Play a game.

        Raises:
            DataError: the prompt's ``task`` is no seed.
            aiohttp.ClientError: the gateway refuses a request, with its reason.
        """
        seed = episode.prompt.metadata.get("task", episode.prompt.prompt_id)
        if not isinstance(seed, int) or seed < 0:
            raise DataError(
                f"prompt {episode.prompt.prompt_id}: 'task' in its metadata is {seed!r}; "
                f"{self._word} needs a seed, a whole number from 0"
            )
        game = await call(self.open, seed)
        try:
            rewards = await self._play(game, episode)
            reward, stop = await call(game.outcome)
        finally:
            await call(game.close)
        return Outcome(reward, rewards, info={"seed": seed, "stop": stop})

    async def _play(self, game: Game, episode: Episode) -> list[float]:
        """Let policy and game take turns; return the rewards of the moves."""
        messages: list[dict[str, Any]] = [{"role": "user", "content": await call(game.opening)}]
        rewards = list[float]()
        headers = {"Authorization": f"Bearer {episode.api_key}"}
        url = f"{episode.base_url}/chat/completions"
        async with aiohttp.ClientSession(headers=headers, raise_for_status=raise_refusal) as policy:
            for _ in range(self._max_turns):
                body = {"model": episode.model, "messages": messages, **episode.sampling}
                async with policy.post(url, json=body) as response:
                    message = (await response.json())["choices"][0]["message"]
                step = await call(game.play, message["content"] or "")
                rewards.append(step.reward)
                if step.done:
                    break
                messages += [message, {"role": "user", "content": step.text}]
        return rewards
