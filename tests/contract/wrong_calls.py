"""Calls of ranks for the type checker: each line with WRONG is an error, and no other line.

Input of ``test_types.py``; nothing imports it.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlpost.columns import FloatColumn
from rlpost.driver.worker_groups import (
    Actor,
    ActorGroup,
    Engine,
    StoredBatches,
    StoredLogprobs,
    received,
    remote,
)
from rlpost.driver.workers import Stored
from rlpost.trainer.stop_points import StopPoint, StopPoints
from rlpost.types import StepPlace, TrainBatch


async def right(ranks: ActorGroup, batches: StoredBatches, old: StoredLogprobs) -> None:
    calls = [
        remote(Actor.compute_old_logprobs, received(batch), 3)
        for batch, _ in zip(batches, old, strict=True)
    ]
    logprobs: list[Stored[list[list[FloatColumn]]] | None] = await ranks.each_stored(calls)
    stops: list[StopPoint] = await ranks.aside(remote(Actor.stop_points.hold))
    gpus: list[str] = await ranks.all(remote(Actor.visible_gpu))
    write = remote(Actor.write_flight_record, "folder")
    answers = await ranks.answers(write, within_s=1.0)
    paths: list[str | None] = answers
    print(logprobs, stops, gpus, paths)


async def wrong(ranks: ActorGroup, batch: Stored[TrainBatch], place: StepPlace) -> None:
    remote(Actor.train_step, batch, None, None, place)  # WRONG: the reference, not the value
    remote(Actor.train_step, received(batch), None, None, 3)  # WRONG: type of an argument
    remote(Actor.train_stepp, received(batch))  # WRONG: no such method
    remote(Actor.train_step)  # WRONG: an argument is missing
    remote(Actor.save, "folder", 1, in_backgrund=True)  # WRONG: no such keyword
    remote(Actor.memory.restore, 3)  # WRONG: type of an argument of a part's method
    await ranks.all(remote(StopPoints.hold))  # WRONG: a method of another class
    await ranks.all(remote(Engine.stop))  # WRONG: a method of other workers
    gpus: Sequence[int] = await ranks.all(remote(Actor.visible_gpu))  # WRONG: type of the result
    print(gpus)
