"""Interrupt training between micro-batches again and again, on the ranks of ``actor_ranks``.

A second thread of each rank handles the driver's requests, as a worker does beside a running call.
The driver is the second thread of rank 0; requests and replies are files.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlpost.types import TrainSample
from tests.contract.actor_ranks import my_batch

DEADLINE_S = 60.0


def written(path: Path) -> Any:
    """Wait until the file exists; return its JSON value."""
    ends = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < ends, f"{path} was not written"
        time.sleep(0.001)
    return json.loads(path.read_text())


def write(path: Path, value: Any) -> None:
    beside = path.with_name(path.name + ".new")
    beside.write_text(json.dumps(value))
    beside.rename(path)


class Crossings:
    """Counts the stop points that a rank crosses.

    Before its hold a rank crosses ``after`` stop points, and without pipeline parallelism every
    second rank one more. So the attempt cannot complete before the hold, and ranks drift apart as
    far as their collectives allow.
    """

    def __init__(self, actor: Any) -> None:
        import torch.distributed as dist

        self._cross, self._slow = actor.stop_points.cross, random.Random(dist.get_rank())
        is_one_unit = actor.config.perf.pipeline_model_parallel_size > 1
        self._ahead = 0 if is_one_unit else dist.get_rank() % 2
        self.begin(0)
        self.held.set()
        actor.stop_points.cross = self

    def begin(self, after: int) -> None:
        """Start counting; ``reached`` is set after ``after`` stop points."""
        self.count, self.after, self.reached, self.held = (
            0,
            after,
            threading.Event(),
            threading.Event(),
        )

    def __call__(self, index: int) -> None:
        if self.count == self.after + self._ahead:
            assert self.held.wait(DEADLINE_S)
        self._cross(index)
        self.count += 1
        if self.count == self.after:
            self.reached.set()
        time.sleep(self._slow.uniform(0.0, 0.03))


def train_with_stops(
    actor: Any, steps: Sequence[Sequence[TrainSample]], *, stops: Sequence[int], folder: str
) -> dict[str, Any]:
    """Train on the steps, each after attempts that are interrupted.

    Each step is first started once for each of ``stops``, and a stop is requested when rank 0 has
    crossed that many stop points of it. Returns the metrics, the weights' hash, and for each step
    how many stop points the interrupted attempts had crossed.
    """
    actor.import_weights()
    crossings = Crossings(actor)
    metrics, left = [], []
    for number, samples in enumerate(steps):
        batch, made = my_batch(actor, samples, max_tokens=None), None
        left.append([])
        for attempt, after in enumerate(stops):
            crossings.begin(after)
            made = _stopped(actor, batch, Path(folder) / f"{number}-{attempt}", crossings)
            if made is not None:  # it completed before the stop point
                break
            left[-1].append(crossings.count)
        metrics.append(made or _step(actor, batch))
    return {"metrics": metrics, "hash": actor.weights_hash(), "left": left}


def _step(actor: Any, batch: Any) -> dict[str, float]:
    old = actor.compute_logprobs(batch)
    return dict(actor.train_step(batch, old).metrics)


def _stopped(actor: Any, batch: Any, place: Path, crossings: Crossings) -> dict[str, float] | None:
    """Run a step and request a stop; return its metrics if it completes, None if interrupted.

    All ranks must agree on which.
    """
    import torch.distributed as dist

    from rlpost.errors import Interrupted
    from rlpost.trainer.stop_points import StopPoint, common_stop_point

    rank, world = dist.get_rank(), dist.get_world_size()

    def aside() -> None:
        if rank == 0:
            assert crossings.reached.wait(DEADLINE_S)
            write(place.with_suffix(".hold"), True)
        written(place.with_suffix(".hold"))
        held_at = actor.stop_points.hold()
        crossings.held.set()
        write(place.with_suffix(f".held{rank}"), asdict(held_at))
        if rank == 0:
            held = [
                StopPoint(**written(place.with_suffix(f".held{other}"))) for other in range(world)
            ]
            write(place.with_suffix(".release"), asdict(common_stop_point(held)))
        actor.stop_points.release(StopPoint(**written(place.with_suffix(".release"))))

    thread = threading.Thread(target=aside)
    thread.start()
    try:
        made = _step(actor, batch)
    except Interrupted:
        made = None
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    actor.stop_points.release(None)
    everybody: list[Any] = [None] * world
    dist.all_gather_object(everybody, made is None)
    assert len(set(everybody)) == 1, everybody
    return made
