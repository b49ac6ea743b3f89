"""What the ranks do in the contract tests of checkpoints; see ``actor_ranks``."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from typing import Any

from rlpost.errors import CheckpointError
from rlpost.types import TrainSample
from tests.contract.actor_ranks import my_batch


def live_through(
    actor: Any, steps: Sequence[Sequence[TrainSample]], *, folder: str, full_disk: str | None
) -> dict[str, Any]:
    """Train; before the last step save, first to a disk that has no room, if there is one, in each
    way. After the last step load, and train it once more without the generators of the checkpoint.
    """
    actor.import_weights()
    for samples in steps[:-1]:
        _train(actor, samples)
    said = []
    if full_disk is not None:
        said.append(refusal(lambda: actor.save(f"{full_disk}/waited", 1)))
        shutil.rmtree(f"{full_disk}/waited", ignore_errors=True)
        said.append(refusal(lambda: _save_beside(actor, full_disk)))
    actor.save(folder, len(steps) - 1)
    found = {"said": said, "metrics": _train(actor, steps[-1]), "hash": actor.weights_hash()}
    return found | {"without_generators": _again_without_generators(actor, steps[-1], folder)}


def _again_without_generators(actor: Any, samples: Sequence[TrainSample], folder: str) -> str:
    from rlpost.actor import random_state

    random_state.layout = lambda: []  # as after a resume at another layout; the process ends soon
    actor.load(folder)
    _train(actor, samples)
    return actor.weights_hash()


def share_everything() -> None:
    """In this process, which ends soon, data-parallel replicas share every tensor, however
    small.
    """
    from rlpost.actor.torch_dist import written

    written.SHARED_FROM = 2


def save_through_a_narrow_buffer(
    actor: Any, steps: Sequence[Sequence[TrainSample]], *, folders: Sequence[str]
) -> dict[str, Any]:
    """Train a step, save waiting and in the background, give all memory up and take it back while
    the second save is still copying, train another step. Writers of the second save release a slot
    only when they are let.
    """
    from rlpost.actor.torch_dist.host_stream import Filled, HostStream

    actor.import_weights()
    _train(actor, steps[0])
    before = actor.weights_hash()
    actor.save(folders[0], 1)
    release, resident = HostStream.release, actor.memory.resident
    may_release, was_read = threading.Semaphore(0), threading.Semaphore(0)

    def gated(self: HostStream, filled: Filled) -> None:
        assert may_release.acquire(timeout=60)
        release(self, filled)

    def noted(tensor: Any) -> Any:
        found = resident(tensor)
        if found is not tensor:
            was_read.release()
        return found

    HostStream.release, actor.memory.resident = gated, noted  # type: ignore[method-assign]
    actor.saves.set_buffer(actor.settings.save_buffer_bytes)
    actor.save(folders[1], 1, in_background=True)
    actor.memory.offload("weights", "grads", "optimizer")
    may_release.release(2)
    was_read_while_away = was_read.acquire(timeout=60)
    actor.memory.restore("weights", "grads", "optimizer")
    threading.Timer(0.2, lambda: may_release.release(10**6)).start()  # the step waits until then
    metrics = _train(actor, steps[1])
    actor.saves.finish()
    return {
        "before": before,
        "away": was_read_while_away,
        "metrics": metrics,
        "hash": actor.weights_hash(),
    }


def load_and_sum(
    actor: Any, steps: Sequence[Sequence[TrainSample]], *, folder: str
) -> dict[str, Any]:
    """Load; a hash of the weights, sums of what Adam keeps over all ranks' parts, and the next
    step.
    """
    actor.load(folder)
    found = {"before": actor.weights_hash()}
    return found | {"metrics": _train(actor, steps[1]), "hash": actor.weights_hash()}


def go_on(actor: Any, steps: Sequence[Sequence[TrainSample]], *, folder: str) -> dict[str, Any]:
    """Load and train the last step."""
    actor.load(folder)
    return {"metrics": _train(actor, steps[-1]), "hash": actor.weights_hash()}


def refusal(save: Callable[[], None]) -> str:
    """What a save says that cannot be made."""
    try:
        save()
    except CheckpointError as error:
        return str(error)
    return "saved"


def _save_beside(actor: Any, full_disk: str) -> None:
    actor.save(f"{full_disk}/beside", 1, in_background=True)
    while not actor.save_is_done():
        pass


def _train(actor: Any, samples: Sequence[TrainSample]) -> dict[str, float]:
    return dict(actor.train_step(my_batch(actor, samples, max_tokens=None)).metrics)
