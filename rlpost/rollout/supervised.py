"""Batches of supervised examples, with the interface of ``Collector``.

Input: the cursor over prompts with responses. Output: groups of one sample each. Nothing is
generated, and no engine is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlpost.rollout.buffer import RolloutBuffer
from rlpost.rollout.collector import Replay
from rlpost.rollout.replay import Cursor
from rlpost.types import Prompt, SampleGroup


class Supervised(Replay):
    """Like ``Replay``, with groups that are made from the prompts themselves."""

    def __init__(
        self,
        buffer: RolloutBuffer,
        cursor: Cursor,
        make: Callable[[Prompt], SampleGroup],
        *,
        stop_requested: Callable[[], bool],
    ) -> None:
        super().__init__(buffer, cursor, "", stop_requested=stop_requested)
        self._make = make

    def _recorded(self) -> Sequence[SampleGroup]:
        prompts = self._cursor.take(self._buffer.rules.batch_size)
        self._buffer.fetched(prompts)
        return [self._make(prompt) for prompt in prompts]
