"""Which prompt comes next: a place in an endless sequence of epochs that can be saved and taken up again.

Comes in: a prompt set, whether and with which seed to shuffle. Goes out: prompts in an order that depends on these
alone. Every prompt comes exactly once an epoch, and ids count on over epochs without a gap.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from rlpost.data.prompts import PromptSet
from rlpost.errors import DataError
from rlpost.types import Prompt


def epoch_order(size: int, epoch: int, *, shuffle: bool, seed: int) -> Sequence[int]:
    """Positions of all prompts in the order of one epoch.

    Sorted by random keys: Python promises the same ``random()`` for a seed in every release, but not the same
    ``shuffle()``.
    """
    if not shuffle:
        return range(size)
    draw = random.Random(f"{seed}/{epoch}").random  # its own generator; a text is a seed of every epoch by itself
    keys = [draw() for _ in range(size)]
    return sorted(range(size), key=keys.__getitem__)


class PromptCursor:
    """A place in the sequence of prompts."""

    def __init__(
        self, prompts: PromptSet, *, shuffle: bool = False, seed: int = 0, epoch: int = 0, offset: int = 0
    ) -> None:
        self._prompts = prompts
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = epoch
        self._offset = offset
        self._order = self._epoch_order()

    def take(self, n: int) -> list[Prompt]:
        """The next ``n`` prompts, over as many ends of epochs as it takes."""
        return [self._next() for _ in range(n)]

    def state(self) -> dict[str, int]:
        """What ``from_state`` needs: epoch, offset in it, and the size of the set they belong to."""
        return {"epoch": self._epoch, "offset": self._offset, "num_prompts": len(self._prompts)}

    @classmethod
    def from_state(
        cls, prompts: PromptSet, state: Mapping[str, int], *, shuffle: bool = False, seed: int = 0
    ) -> PromptCursor:
        """A cursor that goes on where another one stood.

        Raises:
            DataError: the file has another number of prompts than at that time.
        """
        if state["num_prompts"] != len(prompts):
            raise DataError(
                f"--prompt-data has {len(prompts)} prompts, but the checkpoint was made with {state['num_prompts']}: "
                "prompts would be lost or seen twice; use the same file, or start anew with another --save"
            )
        return cls(prompts, shuffle=shuffle, seed=seed, epoch=state["epoch"], offset=state["offset"])

    def _next(self) -> Prompt:
        if self._offset == len(self._prompts):
            self._epoch, self._offset = self._epoch + 1, 0
            self._order = self._epoch_order()
        prompt_id = self._epoch * len(self._prompts) + self._offset
        prompt = self._prompts.prompt(self._order[self._offset], prompt_id)
        self._offset += 1
        return prompt

    def _epoch_order(self) -> Sequence[int]:
        return epoch_order(len(self._prompts), self._epoch, shuffle=self._shuffle, seed=self._seed)
