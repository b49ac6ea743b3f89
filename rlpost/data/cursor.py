"""The prompt cursor: a position in an endless sequence of epochs that can be saved and restored.

Input: a prompt set, whether and with which seed to shuffle, and the weights of its files. Output: prompts in an
order that depends on these alone, their ids rising. Without weights every prompt comes exactly once an epoch; with
weights each file is an endless sequence of its own epochs, and at any moment the files have come as near to their
shares as whole prompts can. A prompt that is to be skipped leaves a gap in the ids.
"""

from __future__ import annotations

import copy
import random
from array import array
from collections.abc import Mapping, Sequence

import numpy

from rlpost.data.prompts import LIMITS, PromptSet
from rlpost.errors import DataError
from rlpost.types import Prompt

TAKEN = "taken_"  # before the number of a file, in a state


def epoch_order(size: int, epoch: int, *, shuffle: bool, seed: int | str) -> Sequence[int]:
    """Positions of all prompts in the order of one epoch; 4 bytes each in memory, none without ``shuffle``.

    Sorted by random keys: Python promises the same ``random()`` for a seed in every release, but not the same
    ``shuffle()``. Equal keys stay in order of position, so numpy's stable sort and Python's give the same order.
    """
    if not shuffle:
        return range(size)
    draw = random.Random(f"{seed}/{epoch}").random  # its own generator; a text is a seed of every epoch by itself
    keys = numpy.fromiter((draw() for _ in range(size)), dtype=numpy.float64, count=size)
    order = numpy.argsort(keys, kind="stable")
    kind = "i" if size < 1 << 31 else "q"
    return array(kind, order.astype(kind).tobytes())


class PromptCursor:
    """A place in the sequence of prompts."""

    def __init__(
        self, prompts: PromptSet, *, shuffle: bool = False, seed: int = 0, weights: Sequence[float] = ()
    ) -> None:
        """At the start of the sequence.

        Raises:
            DataError: not one weight for each file.
        """
        if weights and len(weights) != len(prompts.sizes):
            raise DataError(f"--prompt-data-weights: {len(weights)} weights for {len(prompts.sizes)} files")
        self._prompts = prompts
        self._weighted = bool(weights)
        sizes = prompts.sizes if weights else (len(prompts),)
        self._shares = [weight / sum(weights) for weight in weights] or [1.0]
        self._starts = [sum(sizes[:index]) for index in range(len(sizes))]
        self._files = [
            _File(size, shuffle=shuffle, seed=f"{seed}/file {index}" if weights else seed)
            for index, size in enumerate(sizes)
        ]

    def take(self, n: int) -> list[Prompt]:
        """The next ``n`` prompts, over as many ends of epochs as it takes.

        Raises:
            DataError: a bad row, unless those are skipped; or all are to be skipped.
        """
        found: list[Prompt] = []
        skipped = 0
        while len(found) < n:
            prompt = self._next()
            if prompt is not None:
                found.append(prompt)
                skipped = 0
                continue
            skipped += 1
            if skipped > 2 * len(self._prompts):
                raise DataError(
                    f"{skipped} rows in a row are bad or longer than {LIMITS} allows, twice as many as there "
                    f"are ({len(self._prompts)}): no prompt is left to train on"
                )
        return found

    def copy(self) -> PromptCursor:
        """Another cursor that stands where this one does, over the same prompts."""
        made = copy.copy(self)
        made._files = [copy.copy(file) for file in self._files]
        return made

    def state(self) -> dict[str, int]:
        """What ``from_state`` needs: epoch, offset in it, and the size of the set they belong to."""
        size, taken = len(self._prompts), sum(file.taken for file in self._files)
        if not self._weighted:
            epoch = max(0, taken - 1) // size  # an epoch is left with the first prompt of the next
            return {"epoch": epoch, "offset": taken - epoch * size, "num_prompts": size}
        each = {f"{TAKEN}{index}": file.taken for index, file in enumerate(self._files)}
        return {"epoch": 0, "offset": taken, "num_prompts": size, **each}

    @classmethod
    def from_state(
        cls,
        prompts: PromptSet,
        state: Mapping[str, int],
        *,
        shuffle: bool = False,
        seed: int = 0,
        weights: Sequence[float] = (),
    ) -> PromptCursor:
        """A cursor that goes on where another one stood.

        Raises:
            DataError: the files have another number of prompts than at that time, or are mixed in another way.
        """
        if state["num_prompts"] != len(prompts):
            raise DataError(
                f"--prompt-data has {len(prompts)} prompts, but the checkpoint was made with {state['num_prompts']}: "
                "prompts would be lost or seen twice; use the same file, or start anew with another --save"
            )
        cursor = cls(prompts, shuffle=shuffle, seed=seed, weights=weights)
        taken = [state[key] for key in sorted(state, key=lambda key: (len(key), key)) if key.startswith(TAKEN)]
        if len(taken) != (len(cursor._files) if weights else 0):
            raise DataError(
                f"--prompt-data-weights: {len(weights)} weights, but the checkpoint was made with {len(taken)}: "
                "prompts would be lost or seen twice; use as many, or start anew with another --save"
            )
        for file, count in zip(cursor._files, taken or [state["epoch"] * len(prompts) + state["offset"]], strict=True):
            file.taken = count
        return cursor

    def _next(self) -> Prompt | None:
        prompt_id = sum(file.taken for file in self._files)
        behind = [share * (prompt_id + 1) - file.taken for share, file in zip(self._shares, self._files, strict=True)]
        index = behind.index(max(behind))
        position = self._starts[index] + self._files[index].position()
        prompt = self._prompts.prompt(position, prompt_id)
        self._files[index].taken += 1
        return prompt


class _File:
    """The endless sequence of epochs of one file, or of all as one."""

    def __init__(self, size: int, *, shuffle: bool, seed: int | str) -> None:
        self.taken = 0
        self._size = size
        self._shuffle = shuffle
        self._seed = seed
        self._epoch: int | None = None
        self._order: Sequence[int] = ()

    def position(self) -> int:
        """The next position in the file."""
        epoch, offset = divmod(self.taken, self._size)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, epoch_order(self._size, epoch, shuffle=self._shuffle, seed=self._seed)
        return self._order[offset]
