"""Functions that the ranks of ``actor_ranks`` run in the contract tests of checkpoints."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from rlpost.errors import CheckpointError
from rlpost.types import TrainSample
from tests.contract.actor_ranks import my_batch


def live_through(
    actor: Any, steps: Sequence[Sequence[TrainSample]], *, folder: str, full_disk: str | None
) -> dict[str, Any]:
    """Train, with a save before the last step; then load the save and train that step again.

    Given ``full_disk``, first try both kinds of save, blocking and in the background, on that disk,
    which has no space left; ``said`` holds the errors. The last step is trained again without
    restoring the random generators; ``without_generators`` is the resulting hash of the weights.
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
    from rlpost.trainer import random_state

    random_state.layout = lambda: []  # as after a resume at another layout; the process ends soon
    actor.load(folder)
    _train(actor, samples)
    return actor.weights_hash()


def share_everything() -> None:
    """Let data-parallel replicas share the writing of every tensor, however small.

    The change is not undone: the process ends soon.
    """
    from rlpost.trainer.torch_dist import written

    written.SHARED_FROM = 2


def save_through_a_narrow_buffer(
    actor: Any, steps: Sequence[Sequence[TrainSample]], *, folders: Sequence[str]
) -> dict[str, Any]:
    """Save through a small buffer, blocking and in the background, and offload during the latter.

    One step is trained before the saves. All memory is offloaded and restored while the second save
    is still copying, and another step is trained. The writers of the second save release a slot of
    the buffer only when this function allows it.
    """
    from rlpost.trainer.torch_dist.host_stream import Filled, HostStream

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
    actor.saves.set_buffer(actor.config.checkpoint.save_buffer_bytes)
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


def load_and_train(
    actor: Any, steps: Sequence[Sequence[TrainSample]], *, folder: str
) -> dict[str, Any]:
    """Load and train the second step; return its metrics and the weights' hash before and after."""
    actor.load(folder)
    found = {"before": actor.weights_hash()}
    return found | {"metrics": _train(actor, steps[1]), "hash": actor.weights_hash()}


def load_and_train_last(
    actor: Any, steps: Sequence[Sequence[TrainSample]], *, folder: str
) -> dict[str, Any]:
    """Load, and train the last step."""
    actor.load(folder)
    return {"metrics": _train(actor, steps[-1]), "hash": actor.weights_hash()}


def refusal(save: Callable[[], None]) -> str:
    """Return the error of a save that fails."""
    try:
        save()
    except CheckpointError as error:
        return str(error)
    return "saved"


def _save_beside(actor: Any, full_disk: str) -> None:
    actor.save(f"{full_disk}/beside", 1, in_background=True)
    while not actor.save_is_done():
        time.sleep(0.01)


def _train(actor: Any, samples: Sequence[TrainSample]) -> dict[str, float]:
    return dict(actor.train_step(my_batch(actor, samples, max_tokens=None)).metrics)
