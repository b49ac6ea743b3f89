"""The interface of an environment, in one of two forms.

A class with ``reset`` and ``step`` is plain Python: the model writes a turn, the environment adds
text after it. One object is made for each episode. Every token is the sampled one, and what the
environment adds is masked out of the loss.

A class with ``run`` is a complete harness, which talks to the model over HTTP. One object is made
for the run; ``run`` is called for every episode, many at the same time, with an address and a key
of that episode alone. A follow-up request continues the sampled tokens (``rlpost.extensions.agents.gateway``).

All methods may be ``async``. A method that is not runs in a thread, so that it cannot stall the
run. The arguments of ``__init__`` are those of --env-args for the label of the environment.

A failure outside the answer (``GradingLost``, a refused connection, an error in the environment's
code) starts the episode again, up to --env-retries times; then it is left out of its group. It never
scores 0.

The end of a driver, a node or a job loses the objects of this module, and an object says which of
three ways brings an unfinished episode back. An attribute that is missing counts as False or None.

    restored        has ``save`` and ``restore`` (plain Python only): a new object, and ``restore``
                    with the bytes of the last saved turn in place of ``reset``
    replayed        ``deterministic`` is True: a new object, ``reset`` with the same prompt, then
                    ``step`` with each recorded turn; for a harness, ``run`` again, whose requests
                    get the recorded answers
    begun again     neither: from the prompt, and counted as such

``deterministic`` promises that the same prompt and the same turns give the same texts, rewards and
requests, at any time, on any node. A random generator seeded from the prompt keeps that promise; a
clock, a user's model or a stateful server breaks it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rlpost.extensions.agents.environments.turns import Content as Content
from rlpost.extensions.agents.environments.turns import Step as Step
from rlpost.extensions.agents.environments.turns import Turn as Turn
from rlpost.types import Prompt


class Environment(Protocol):
    """Plain Python.

    ``stop`` (strings that end a turn), ``deterministic``, ``info`` (JSON values for the record of the
    episode, read after ``score``), ``score``, ``save``, ``restore`` and ``close`` may be missing.
    """

    stop: Sequence[str]
    deterministic: bool
    info: Mapping[str, object]

    def reset(self, prompt: Prompt) -> Content | Awaitable[Content | None] | None:
        """Begin the episode of a prompt; return text and images to add before the first turn."""

    def step(self, turn: Turn) -> Step | Awaitable[Step]:
        """Act on a turn. Not called after ``done`` or when the answer's tokens are used up."""

    def score(self) -> float | Awaitable[float]:
        """Return the reward of the whole episode, beside those of its turns. Default: 0."""

    def save(self) -> bytes | Awaitable[bytes]:
        """Return the state after ``reset``, or after a ``step`` that was not the last.

        It holds everything that later turns and ``score`` need, and no secret. The bytes go to the
        run's journal at each turn, so keep them small: ``rlpost.extensions.agents.sandbox.archives`` saves
        files apart and returns a manifest. The episode goes on when this raises, and its last saved
        turn stays valid.
        """

    def restore(self, data: bytes) -> Awaitable[None] | None:
        """Take the state that ``save`` returned, in a new object whose ``reset`` is not called.

        When this raises, the episode begins again.
        """

    def close(self) -> Awaitable[None] | None:
        """Release what ``reset`` took; called after every episode, failed ones included.

        After a timeout or a halt a ``step`` that is not ``async`` may still be at work in its
        thread.
        """


@dataclass(frozen=True, slots=True)
class Episode:
    """What a harness gets for an episode.

    Attributes:
        base_url: of the OpenAI interface, ending in /v1; Anthropic's is at the same place.
        api_key: opens this episode and no other. It ends with ``run``.
        model: the name of the model to ask for.
        prompt: the row of the prompt set.
        index: of the answer within its group.
        images: the files of the prompt's images, in order; the harness writes its own messages.
        sampling: temperature, top_p and max_tokens of the run, as in a chat request.
        max_turns: --env-max-turns. Further requests are refused, so end before.
    """

    base_url: str
    api_key: str = field(repr=False)
    model: str
    prompt: Prompt
    index: int
    sampling: Mapping[str, object]
    max_turns: int
    images: Sequence[bytes] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a harness ended an episode.

    Attributes:
        reward: of the whole episode.
        turn_rewards: beside it, of each completion that the model gave, in the order in which they
            were requested; fewer are filled with 0.
        info: JSON values for the record of the episode.
    """

    reward: float = 0.0
    turn_rewards: Sequence[float] = ()
    info: Mapping[str, object] = field(default_factory=dict)


class Harness(Protocol):
    """A black box. ``deterministic``, ``start`` and ``close`` may be missing."""

    deterministic: bool

    def start(self) -> Awaitable[None] | None:
        """Prepare for the first episode."""

    def run(self, episode: Episode) -> float | Outcome | Awaitable[float | Outcome]:
        """Run an episode and score it."""

    def close(self) -> Awaitable[None] | None:
        """Release what ``start`` took; called at the end of the run."""
