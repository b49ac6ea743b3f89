"""The prompt cursor: a position in an endless sequence of epochs that can be saved and restored.

Input: a prompt set, the shuffle seed, and the weights of its files. Output: prompts with ascending
ids, in an order that depends only on the input.

Without weights every prompt is used exactly once per epoch. With weights each file has its own
endless sequence of epochs, and after each prompt the files are as close to their shares as whole
prompts allow. A skipped row leaves a gap in the ids, and does not count for its file's share.
"""

from __future__ import annotations

import copy
import random
from array import array
from collections.abc import Mapping, Sequence

import numpy

from rlpost.errors import DataError
from rlpost.tasks.prompts import LIMITS, PromptSet
from rlpost.types import Prompt

# prefixes of a state's keys; the number of a file follows
TAKEN, SKIPPED = "taken_", "skipped_"


def epoch_order(size: int, epoch: int, *, shuffle: bool, seed: int | str) -> Sequence[int]:
    """Return the positions of all prompts in the order of one epoch; 4 bytes each if shuffled.

    Positions are sorted by random keys, because Python guarantees the same ``random()`` for a seed
    in every release, but not the same ``shuffle()``. Equal keys stay in order of position: the sort
    is stable.
    """
    if not shuffle:
        return range(size)
    draw = random.Random(f"{seed}/{epoch}").random
    keys = numpy.fromiter((draw() for _ in range(size)), dtype=numpy.float64, count=size)
    order = numpy.argsort(keys, kind="stable")
    kind = "i" if size < 1 << 31 else "q"
    return array(kind, order.astype(kind).tobytes())


class PromptCursor:
    """A position in the sequence of prompts."""

    def __init__(
        self,
        prompts: PromptSet,
        *,
        shuffle: bool = False,
        seed: int = 0,
        weights: Sequence[float] = (),
    ) -> None:
        """Start at the beginning of the sequence.

        Raises:
            DataError: the number of weights differs from the number of files.
        """
        if weights and len(weights) != len(prompts.sizes):
            raise DataError(
                f"--prompt-data-weights: {len(weights)} weights for {len(prompts.sizes)} files"
            )
        self._prompts = prompts
        self._weighted = bool(weights)
        sizes = prompts.sizes if weights else (len(prompts),)
        self._shares = [weight / sum(weights) for weight in weights] or [1.0]
        self._starts = [sum(sizes[:index]) for index in range(len(sizes))]
        self._files = [
            _FileEpochs(size, shuffle=shuffle, seed=f"{seed}/file {index}" if weights else seed)
            for index, size in enumerate(sizes)
        ]

    def take(self, n: int) -> list[Prompt]:
        """Return the next ``n`` prompts, across ends of epochs if necessary.

        Raises:
            DataError: a row is bad and bad rows are not skipped, or all rows are skipped.
        """
        prompts: list[Prompt] = []
        skipped = 0
        while len(prompts) < n:
            file = self._furthest_behind()
            prompt = self._next(file)
            if prompt is not None:
                prompts.append(prompt)
                skipped = 0
                continue
            skipped += 1  # of one file: a skipped row leaves it the furthest behind
            size = self._files[file].size
            if skipped > 2 * size:
                which = f"file {file + 1} of --prompt-data: " if self._weighted else ""
                raise DataError(
                    f"{which}{skipped} consecutive rows are bad or longer than {LIMITS} allows, more than twice the "
                    f"number of rows ({size}): no prompt is left to train on"
                )
        return prompts

    def read_ahead(self, n: int) -> None:
        """Store the images of about the next ``n`` prompts. Blocks; may be called from a thread.

        Bad rows are left to ``take``, which reports them.
        """
        ahead = self.copy()
        for _ in range(n):
            index = ahead._furthest_behind()
            file = ahead._files[index]
            ahead._prompts.read_images(ahead._starts[index] + file.position())
            file.taken += 1

    def copy(self) -> PromptCursor:
        """Return a cursor at the same position over the same prompts."""
        made = copy.copy(self)
        made._files = [copy.copy(file) for file in self._files]
        return made

    def state(self) -> dict[str, int]:
        """Return the state for ``from_state``: epoch, offset in it, size of the prompt set."""
        size = len(self._prompts)
        taken = sum(file.taken for file in self._files)
        if not self._weighted:
            # the epoch changes with the first prompt of the next one
            epoch = max(0, taken - 1) // size
            return {"epoch": epoch, "offset": taken - epoch * size, "num_prompts": size}
        state = {"epoch": 0, "offset": taken, "num_prompts": size}
        for index, file in enumerate(self._files):
            state |= {f"{TAKEN}{index}": file.taken, f"{SKIPPED}{index}": file.skipped}
        return state

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
        """Restore a cursor from its state; an empty one is the beginning.

        Raises:
            DataError: the number of prompts or of weights has changed.
        """
        if not state:
            return cls(prompts, shuffle=shuffle, seed=seed, weights=weights)
        if state["num_prompts"] != len(prompts):
            raise DataError(
                f"--prompt-data has {len(prompts)} prompts, but the checkpoint was made with {state['num_prompts']}: "
                "prompts would be lost or used twice; use the same file, or start a new run with another --save"
            )
        cursor = cls(prompts, shuffle=shuffle, seed=seed, weights=weights)
        keys = sorted(
            (key for key in state if key.startswith(TAKEN)),
            key=lambda key: int(key.removeprefix(TAKEN)),
        )
        taken = [state[key] for key in keys]
        if len(taken) != (len(cursor._files) if weights else 0):
            raise DataError(
                f"--prompt-data-weights: {len(weights)} weights, but the checkpoint was made with {len(taken)}: "
                "prompts would be lost or used twice; use the same number, or start a new run with another --save"
            )
        if not weights:
            taken = [state["epoch"] * len(prompts) + state["offset"]]
        for index, count in enumerate(taken):
            cursor._files[index].taken = count
            # earlier versions counted skipped rows for the share
            cursor._files[index].skipped = state.get(f"{SKIPPED}{index}", 0)
        return cursor

    def _furthest_behind(self) -> int:
        """Return the number of the file whose prompts are the furthest behind its share."""
        used = [file.taken - file.skipped for file in self._files]
        next_total = sum(used) + 1
        pairs = zip(self._shares, used, strict=True)
        deficits = [share * next_total - count for share, count in pairs]
        return deficits.index(max(deficits))

    def _next(self, index: int) -> Prompt | None:
        """Return the next prompt of a file; None if the row is skipped."""
        file = self._files[index]
        prompt_id = sum(each.taken for each in self._files)
        prompt = self._prompts.prompt(self._starts[index] + file.position(), prompt_id)
        file.taken += 1
        file.skipped += prompt is None
        return prompt


class _FileEpochs:
    """The endless sequence of epochs of one file, or of all files together."""

    def __init__(self, size: int, *, shuffle: bool, seed: int | str) -> None:
        self.taken = 0
        """Rows passed, skipped ones included."""
        self.skipped = 0
        self.size = size
        self._shuffle = shuffle
        self._seed = seed
        self._epoch: int | None = None
        self._order: Sequence[int] = ()

    def position(self) -> int:
        """Return the next position in the file."""
        epoch, offset = divmod(self.taken, self.size)
        if epoch != self._epoch:
            self._order = epoch_order(self.size, epoch, shuffle=self._shuffle, seed=self._seed)
            self._epoch = epoch
        return self._order[offset]
